"""A book of other people's bugs: what is wrong in the packages that onnxtrain stands on, and what it does instead.

Each entry of :data:`BOOK` names one bug, the versions in which it was seen, and the code that works around it. Small
workarounds are here; where the workaround is a form that a rule chooses, the entry says where.
``tests/workarounds/`` shows every bug in the installed version and fails when it is gone: then its workaround
can go, too, as soon as no supported version has the bug.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import StepError


class Workaround(NamedTuple):
    """One bug of another package.

    Attributes:
        name: What it is called in comments and tests.
        package: The distribution that has it.
        seen: The oldest and the newest version in which it was seen.
        wrong: What happens.
        done: What onnxtrain does.
        where: Files of this package with the workaround.
        gone: The oldest version in which it was seen to be gone; ``None`` while the newest has it.
    """

    name: str
    package: str
    seen: tuple[str, str]
    wrong: str
    done: str
    where: tuple[str, ...]
    gone: str | None = None


_RUNTIME = ("1.20.1", "1.32.0")
_WEB = ("1.30.0", "1.30.0")
_ONNX = ("1.23.2", "1.23.2")
_ONNX_IR = ("1.1.0", "1.1.0")

BOOK: tuple[Workaround, ...] = (
    Workaround(
        "eliminated dropout",
        "onnxruntime",
        _RUNTIME,
        "The optimizer EliminateDropout removes a Dropout whose mask nobody reads, also in training mode.",
        "Sessions are opened without this optimizer.",
        ("workarounds.py", "runtime/step.py"),
    ),
    Workaround(
        "quantized biases",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "WeightBiasQuantization takes a Conv of another domain for ONNX's: where it stands between dequantized and "
        "quantized values and its bias is constant, it writes a Mul of that domain, which nobody knows.",
        "Sessions are opened without this optimizer.",
        ("workarounds.py", "runtime/step.py"),
    ),
    Workaround(
        "branches that move twice",
        "onnxruntime",
        _RUNTIME,
        "Where conditions are constant, ConstantFolding moves the nodes of a branch out of its If, the inner ones "
        "first. A node with a body that was two branches deep keeps references to what was freed: opening the session "
        "may end the process.",
        "Sessions of graphs with such a node are opened without this optimizer.",
        ("workarounds.py", "graph/nesting.py", "runtime/step.py"),
    ),
    Workaround(
        "ellipses of different ranks",
        "onnxruntime",
        ("1.31.1", "1.31.1"),
        "Opening a session with an Einsum whose ellipses stand for different numbers of axes ends the process.",
        "Such nodes are refused by name; gradients have letters instead of ellipses where ranks are known.",
        ("workarounds.py", "runtime/step.py", "autodiff/rules/einsum.py"),
        gone="1.32.0",
    ),
    Workaround(
        "types of others",
        "onnxruntime",
        _RUNTIME,
        "An array of a type that NumPy has from elsewhere (bfloat16, float8) cannot be bound as an input, and a result "
        "of such a type cannot be read as an array.",
        "The bytes are bound and read as unsigned integers of that size.",
        ("workarounds.py", "runtime/step.py"),
    ),
    Workaround(
        "convolutions on WebGPU",
        "onnxruntime-web",
        _WEB,
        "The WebGPU provider computes another result than the processor for a Conv with a multiple of four filters "
        "where the channels are a multiple of three and not of four (issue 29651), and for grouped ones where the "
        "filters of all groups together are a multiple of four and those of one group are not.",
        "Step graphs for WebGPU have one filter more in such nodes, or a node for each group.",
        ("lowering/webgpu_convolutions.py",),
    ),
    Workaround(
        "transposed padding",
        "onnxruntime",
        _RUNTIME,
        "The transpose optimizer moves transpositions across a Pad with axes as if it had none; the session fails.",
        "Where the rank is known, a Pad is written for all axes.",
        ("graph/builder.py",),
    ),
    Workaround(
        "races of ScatterND",
        "onnxruntime",
        _RUNTIME,
        "ScatterND with reduction='add' loses updates of repeated indices where it runs on several threads.",
        "Gradients use ScatterElements, which is right.",
        ("autodiff/rules/placement.py",),
    ),
    Workaround(
        "types of OneHot",
        "onnxruntime",
        _RUNTIME,
        "There is no kernel of OneHot for indices of int32, nor for values of double and bool.",
        "OneHot is written for int64 and float32, with casts around it.",
        ("autodiff/rules/placement.py",),
    ),
    Workaround(
        "sizes of Resize",
        "onnxruntime",
        _RUNTIME,
        "A Resize is refused where shape inference cannot tell how many sizes it is given.",
        "A Reshape states their number.",
        ("autodiff/rules/resize.py",),
    ),
    Workaround(
        "shapes of bound outputs",
        "onnxruntime",
        _RUNTIME,
        "A binding keeps the memory that was allocated for an output, and fails when the next batch has another size.",
        "Outputs of varying shape are bound anew before each step.",
        ("runtime/step.py",),
    ),
    Workaround(
        "optional inputs of custom operators",
        "onnxruntime",
        ("1.20.1", "1.20.1"),
        "A custom operator with an optional input that is left out between others ends the process.",
        "ClipGradient always has a lower bound.",
        ("autodiff/rules/elementwise.py", "autodiff/rules/fused_recurrent.py"),
        gone="1.32.0",
    ),
    Workaround(
        "opsets without kernels",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "Models of opset 28 are accepted, but DequantizeLinear of that opset has no kernel.",
        "The newest opset is the one at which operators that were defined anew can be run.",
        ("model/limits.py",),
    ),
    Workaround(
        "copies of external initializers",
        "onnxruntime",
        _RUNTIME,
        "Tensors given to add_external_initializers are copied, for as long as the session lives.",
        "They are given as shared initializers, too, on whose memory the session then works.",
        ("workarounds.py", "runtime/frozen.py"),
    ),
    Workaround(
        "packed elements",
        "onnxruntime",
        _RUNTIME,
        "The Python interface takes the shape of a tensor of 4-bit elements from an array, which has two in one item.",
        "The array claims one byte for each element.",
        ("workarounds.py", "runtime/frozen.py"),
    ),
    Workaround(
        "numbers of recurrent activations",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "LSTM, GRU and RNN take 0 for an alpha or beta of Affine, ScaledTanh and ThresholdedRelu that the model leaves "
        "out; the defaults are 1, and 0 for the beta of Affine.",
        "Lists of alpha and beta are written down in full.",
        ("lowering/write_activation_defaults.py",),
    ),
    Workaround(
        "computed bounds",
        "onnx",
        _ONNX,
        "Data propagation takes bounds of a Slice that it does not know for absent ones, and the whole input for the "
        "result: shapes made of it are wrong.",
        "Inference sees a Compress in place of such a Slice.",
        ("workarounds.py", "graph/shapes.py"),
    ),
    Workaround(
        "the matrix of Attention",
        "onnx",
        _ONNX,
        "The fourth output of an Attention of unknown shapes is inferred as a scalar.",
        "This shape is not taken over.",
        ("workarounds.py", "graph/shapes.py"),
    ),
    Workaround(
        "converted Hardmax",
        "onnx",
        _ONNX,
        "The version converter keeps the axis of a Hardmax below opset 13, which flattened its input there.",
        "The flattening is written out before the conversion.",
        ("model/repairs.py",),
    ),
    Workaround(
        "converted Resize",
        "onnx",
        _ONNX,
        "The version converter gives an Upsample or Resize below opset 11 another coordinate transformation.",
        "The node is rewritten before the conversion.",
        ("model/repairs.py",),
    ),
    Workaround(
        "converted BatchNormalization",
        "onnx",
        _ONNX,
        "The version converter refuses a BatchNormalization below opset 14 with the outputs of training mode.",
        "The node is rewritten before the conversion.",
        ("model/repairs.py",),
    ),
    Workaround(
        "functions and metadata of converted models",
        "onnx",
        _ONNX,
        "The version converter drops functions and metadata.",
        "It converts a skeleton of the graph; everything else is put back as it was.",
        ("model/upgrade.py",),
    ),
    Workaround(
        "dropped training_info",
        "onnx-ir",
        _ONNX_IR,
        "Reading a model drops its training_info.",
        "The entries stay protos, and become graphs of their own where they are worked on.",
        ("training_info/read.py",),
    ),
    Workaround(
        "dropped sparse initializers",
        "onnx-ir",
        _ONNX_IR,
        "Reading a model drops its sparse initializers.",
        "They are made dense before.",
        ("model/working.py",),
    ),
    Workaround(
        "merged random nodes",
        "onnx-ir",
        _ONNX_IR,
        "Its elimination of common subexpressions merges two Dropouts in training mode, which draw the same mask then.",
        "An elimination of our own leaves out what is random.",
        ("graph/passes.py",),
    ),
    Workaround(
        "merged outputs",
        "onnx-ir",
        _ONNX_IR,
        "Its elimination of identities gives two outputs of a graph one name.",
        "An elimination of our own keeps an Identity that names an output.",
        ("graph/passes.py",),
    ),
    Workaround(
        "sympy at every start",
        "onnx-ir",
        _ONNX_IR,
        "Importing onnx-ir imports sympy: half of the time and a third of the memory before the first step.",
        "A hook puts the import off until sympy is used.",
        ("deferred.py",),
    ),
    Workaround(
        "attributes of zero",
        "onnxruntime-openvino",
        ("1.24.1", "1.24.1"),
        "The provider takes an attribute beta=0.0 of HardSigmoid for the default, 0.5.",
        "Rules write no attribute of zero where zero is not the default.",
        ("autodiff/rules/activation.py",),
    ),
)
"""Every bug that is worked around, by package."""


DISABLED_OPTIMIZERS = ("EliminateDropout", "WeightBiasQuantization")
"""Graph optimizers of ONNX Runtime that no session has ("eliminated dropout")."""


DISABLED_WITH_DEEP_BODIES = ("ConstantFolding",)
"""Those that go, too, where a node with a body lies in a branch of a branch ("branches that move twice")."""


def refuse_what_crashes(graph: ir.Graph) -> None:
    """Refuse nodes on which ONNX Runtime does not fail but takes the process with it ("ellipses of different ranks").

    Raises:
        StepError: An Einsum has ellipses of different ranks.
    """
    for node in graph:
        if node.op_type != "Einsum" or node.domain:
            continue
        equation = node.attributes["equation"].as_string().replace(" ", "")
        ranks = set()
        for term, value in zip(equation.split("->")[0].split(","), node.inputs, strict=False):
            if "..." in term and value is not None and value.shape is not None:
                ranks.add(len(value.shape) - len(term.replace("...", "")))
        if len(ranks) > 1:
            raise StepError(
                f"The Einsum node {node.name!r} ({equation}) has ellipses of {' and '.join(map(str, sorted(ranks)))} "
                "axes, on which ONNX Runtime crashes; write these axes as letters."
            )


def hand_over(
    settings: Any,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    dtypes: Mapping[str, ir.DataType],
    *,
    shared: bool = True,
) -> list[Any]:
    """Let a session work on initializers where they are in memory ("copies of external initializers").

    Args:
        settings: The options of the session.
        arrays: Memory by name: unsigned numbers of the size of an element, or what :func:`packed` gives.
        dtypes: Element types.
        shared: Whether the session reads this memory itself, instead of a copy.

    Returns:
        What must live as long as the session.
    """
    values = in_place(arrays, dtypes)
    if values:
        settings.add_external_initializers(list(arrays), values)
        for name, value in zip(arrays, values, strict=True) if shared else ():
            settings.add_initializer(name, value)
    return values


def in_place(arrays: Mapping[str, np.ndarray[Any, Any]], dtypes: Mapping[str, ir.DataType]) -> list[Any]:
    """Values of ONNX Runtime on the memory of arrays, which must live as long; see :func:`hand_over`."""
    import onnxruntime

    make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    return [make(array, int(dtypes[name])) for name, array in arrays.items()]


def is_foreign(dtype: ir.DataType) -> bool:
    """Whether NumPy has a type from another package ("types of others")."""
    if dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return False
    return dtype.bitwidth in _BYTES and dtype.numpy().isbuiltin != 1


_BYTES = {8: np.uint8, 16: np.uint16}


def bind_foreign(binding: Any, name: str, array: np.ndarray[Any, Any], dtype: ir.DataType) -> Any:
    """Bind an input by the bytes of its elements; returns what must live until the run has ended."""
    (value,) = in_place({name: array.view(_BYTES[dtype.bitwidth])}, {name: dtype})
    binding.bind_ortvalue_input(name, value)
    return array, value


def fetched(value: Any, dtype: ir.DataType) -> np.ndarray[Any, Any]:
    """A copy of a result, read as the bytes of its elements."""
    shape, unsigned = tuple(value.shape()), np.dtype(_BYTES[dtype.bitwidth])
    size = math.prod(shape) * unsigned.itemsize
    content = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(content, unsigned).reshape(shape).view(dtype.numpy()).copy()


def packed(raw: np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Packed elements as an array with one byte for each, as far as NumPy knows ("packed elements").

    ONNX Runtime, which knows the element type, reads the bytes that there are. Nobody else may read the array.
    """
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False)


_OF_SIZES = frozenset({"Concat", "Cast", "Identity", "Slice", "Add", "Sub", "Mul", "Div", "Max", "Min", "Neg"})


def hide_computed_slices(graph: onnx.GraphProto) -> None:
    """Keep ONNX's data propagation from Slice nodes whose bounds are computed, in place ("computed bounds").

    Compress has the same types and no propagation.
    """
    known = {tensor.name for tensor in graph.initializer}
    known |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    # What is propagated has one axis and holds sizes; its rank may not be declared yet.
    integers: set[str] = set()
    for node in graph.node:
        read = node.input[:1] if node.op_type == "Slice" else node.input  # bounds are sizes of whatever is sliced
        if node.op_type == "Shape" or (node.op_type in _OF_SIZES and any(name in integers for name in read)):
            integers.add(node.output[0])
    ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in (*graph.value_info, *graph.input)}
    ranks.update((tensor.name, len(tensor.dims)) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Slice" and any(name and name not in known for name in node.input[1:]):
            if ranks.get(node.input[0]) != 1 and node.input[0] not in integers:
                continue
            condition = node.input[1]
            del node.input[1:]
            node.input.append(condition)
            node.op_type = "Compress"
            node.attribute.append(onnx.helper.make_attribute("axis", 0))


def is_taken_for_scalar(node: ir.Node, inferred: onnx.TypeProto.Tensor) -> bool:
    """Whether ONNX's inference took a matrix for a scalar ("the matrix of Attention")."""
    return node.op_type == "Attention" and not inferred.shape.dim
