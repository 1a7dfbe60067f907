"""Registry of upstream bugs and workarounds.

Each entry of :data:`BOOK` names one bug, the versions in which it was seen, and the files that work around it: modules
beside this one, or the rule or pass that avoids the bug. ``tests/workarounds/`` shows every bug in the installed
version and fails when it is gone: then its workaround can go, too, as soon as no supported version has the bug.
"""

from __future__ import annotations

from typing import NamedTuple


class Workaround(NamedTuple):
    """One bug of another package."""

    name: str
    package: str
    seen: tuple[str, str]
    wrong: str
    done: str
    where: tuple[str, ...]
    gone: str | None = None


_RUNTIME = ("1.20.1", "1.32.0")
_GPU = ("1.31.1", "1.31.1")
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
        ("graph/upstream/sessions.py", "runtime/step.py"),
    ),
    Workaround(
        "quantized biases",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "WeightBiasQuantization mistakes a Conv of another domain for ONNX's. If the Conv stands between dequantized "
        "and quantized values and has a constant bias, it inserts a Mul of that domain, which does not exist.",
        "Sessions are opened without this optimizer.",
        ("graph/upstream/sessions.py", "runtime/step.py"),
    ),
    Workaround(
        "rows of two bits",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "A MatMul with dequantized int2 or uint2 weights becomes a MatMulNBits with its weights in the wrong order if "
        "the number of columns is not a multiple of 4, since rows then do not begin at a byte.",
        "Sessions are opened without the optimizer, and a hint says how others open the file "
        "(session.disable_quant_qdq).",
        ("graph/upstream/sessions.py", "runtime/step.py", "training/advice/hints.py"),
    ),
    Workaround(
        "branches that move twice",
        "onnxruntime",
        _RUNTIME,
        "If conditions are constant, ConstantFolding moves the nodes of a branch out of its If, inner ones first. A "
        "node with a body that was two branches deep keeps references to freed memory: opening the session may end "
        "the process.",
        "Sessions of graphs with such a node are opened without this optimizer.",
        ("graph/upstream/sessions.py", "graph/limits.py", "runtime/step.py"),
    ),
    Workaround(
        "ellipses of different ranks",
        "onnxruntime",
        ("1.31.1", "1.31.1"),
        "Opening a session with an Einsum whose ellipses stand for different numbers of axes ends the process.",
        "Such nodes are refused by name; gradients have letters instead of ellipses where ranks are known.",
        ("graph/upstream/sessions.py", "runtime/step.py", "autodiff/rules/einsum.py"),
        gone="1.32.0",
    ),
    Workaround(
        "extension types",
        "onnxruntime",
        _RUNTIME,
        "An array of an ml_dtypes extension type (bfloat16, float8) cannot be bound as an input, and a result of such "
        "a type cannot be read as an array.",
        "The bytes are bound and read as unsigned integers of that size.",
        ("graph/upstream/sessions.py", "runtime/step.py"),
    ),
    Workaround(
        "convolutions on WebGPU",
        "onnxruntime-web",
        _WEB,
        "The WebGPU provider computes wrong results for two kinds of Conv: a multiple of four filters on channels that "
        "are a multiple of three but not of four (issue 29651), and groups whose filters are a multiple of four in "
        "all but not in each group.",
        "Step graphs for WebGPU have one filter more in such nodes, or a node for each group.",
        ("lowering/portable.py", "lowering/rules/convolutions.py"),
    ),
    Workaround(
        "statistics on WebGPU",
        "onnxruntime-web",
        _WEB,
        "The WebGPU provider claims BatchNormalization in training mode, and fails when it runs.",
        "Step graphs for WebGPU have it in other operators.",
        ("lowering/rules/batch_norm.py",),
    ),
    Workaround(
        "statistics on CUDA",
        "onnxruntime-gpu",
        _GPU,
        "The CUDA provider claims BatchNormalization in training mode, and refuses it from operator set 14 on when the "
        "session opens.",
        "Steps on CUDA have it in other operators.",
        ("lowering/rules/batch_norm.py",),
    ),
    Workaround(
        "indices on WebGPU",
        "onnxruntime-web",
        _WEB,
        "The WebGPU provider claims MaxPool with the output Indices, and fails when it runs.",
        "Step graphs for WebGPU recompute the maxima where sizes are known, and are refused elsewhere.",
        ("lowering/portable.py",),
    ),
    Workaround(
        "transposed padding",
        "onnxruntime",
        _RUNTIME,
        "The transpose optimizer moves transpositions across a Pad with axes as if it had none; the session fails.",
        "A Pad is written for all axes; where the rank is not known, it is computed.",
        ("graph/builder.py",),
    ),
    Workaround(
        "padded weights",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "The optimizer PadFusion fuses a Pad with the Conv that reads it as its weight; the session fails.",
        "The fill value of such a Pad is computed, which the optimizer does not fuse.",
        ("lowering/rules/convolutions.py",),
    ),
    Workaround(
        "races of ScatterND",
        "onnxruntime",
        _RUNTIME,
        "ScatterND with reduction='add' loses updates of repeated indices where it runs on several threads.",
        "Gradients use ScatterElements, which is right.",
        ("autodiff/placement.py",),
    ),
    Workaround(
        "types of OneHot",
        "onnxruntime",
        _RUNTIME,
        "There is no kernel of OneHot for indices of int32, nor for values of double and bool.",
        "OneHot is written for int64 and float32, with casts around it.",
        ("autodiff/placement.py",),
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
        "Outputs of varying shape are rebound before each step.",
        ("runtime/step.py",),
    ),
    Workaround(
        "optional inputs of custom operators",
        "onnxruntime",
        ("1.20.1", "1.20.1"),
        "A custom operator with an optional input that is left out between others ends the process.",
        "Operators of this project have all inputs: an empty tensor, or an infinite bound, replaces an absent one.",
        (
            "autodiff/rules/elementwise.py",
            "autodiff/rules/fused_recurrent.py",
            "autodiff/rules/matmul_nbits.py",
            "lowering/rules/rows.py",
            "lowering/rules/linear.py",
        ),
        gone="1.32.0",
    ),
    Workaround(
        "opsets without kernels",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "Models of opset 28 are accepted, but DequantizeLinear of that opset has no kernel.",
        "Models are upgraded at most to the newest opset whose redefined operators have kernels.",
        ("model_file/validity.py",),
    ),
    Workaround(
        "copies of external initializers",
        "onnxruntime",
        _RUNTIME,
        "Tensors given to add_external_initializers are copied, for as long as the session lives.",
        "They are also added as shared initializers, whose memory the session then uses.",
        ("graph/upstream/sessions.py", "runtime/frozen.py"),
    ),
    Workaround(
        "packed elements",
        "onnxruntime",
        _RUNTIME,
        "The Python interface takes the shape of a 4-bit tensor from an array that holds two elements in one item.",
        "The array claims one byte for each element.",
        ("graph/upstream/sessions.py", "runtime/frozen.py"),
    ),
    Workaround(
        "defaults of recurrent activations",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "LSTM, GRU and RNN take 0 for an alpha or beta of Affine, ScaledTanh and ThresholdedRelu that the model leaves "
        "out; the defaults are 1, and 0 for the beta of Affine.",
        "Lists of alpha and beta are written out in full.",
        ("lowering/rules/recurrent.py",),
    ),
    Workaround(
        "versions of libraries",
        "onnxruntime",
        ("1.32.0", "1.32.0"),
        "Once a session has registered a library of operators, every model that a session of the process writes "
        "imports the library's domain in version 1000, also where no node uses it.",
        "The import is dropped where no node uses it.",
        ("model_file/proto.py",),
    ),
    Workaround(
        "computed bounds",
        "onnx",
        _ONNX,
        "Data propagation treats unknown bounds of a Slice as absent, and takes the whole input as the result: shapes "
        "computed from it are wrong.",
        "Inference sees a Compress instead of such a Slice.",
        ("graph/bounded_inference.py",),
    ),
    Workaround(
        "bins of STFT",
        "onnx",
        _ONNX,
        "Shape inference takes an omitted onesided of STFT for 0, not for the default 1: for a window of 64 it finds "
        "64 bins instead of 33.",
        "The default is written out before inference.",
        ("graph/bounded_inference.py",),
    ),
    Workaround(
        "the matrix of Attention",
        "onnx",
        _ONNX,
        "The fourth output of an Attention of unknown shapes is inferred as a scalar.",
        "This shape is ignored.",
        ("graph/shapes.py",),
    ),
    Workaround(
        "converted Hardmax",
        "onnx",
        _ONNX,
        "The version converter keeps the axis of a Hardmax below opset 13, where Hardmax flattened its input.",
        "The flattening is written out before the conversion.",
        ("model_file/upgrade.py",),
    ),
    Workaround(
        "converted Resize",
        "onnx",
        _ONNX,
        "The version converter gives an Upsample or Resize below opset 11 another coordinate transformation.",
        "The node is rewritten before the conversion.",
        ("model_file/upgrade.py",),
    ),
    Workaround(
        "converted BatchNormalization",
        "onnx",
        _ONNX,
        "The version converter refuses a BatchNormalization below opset 14 with the outputs of training mode.",
        "The node is rewritten before the conversion.",
        ("model_file/upgrade.py",),
    ),
    Workaround(
        "functions and metadata of converted models",
        "onnx",
        _ONNX,
        "The version converter drops functions and metadata.",
        "It converts a skeleton of the graph; everything else is restored.",
        ("model_file/upgrade.py",),
    ),
    Workaround(
        "long vectors",
        "onnx",
        _ONNX,
        "Data propagation computes vectors of sizes of any length: a model of a few bytes can take all memory.",
        "Nodes that make such vectors are hidden from inference.",
        ("graph/bounded_inference.py",),
    ),
    Workaround(
        "references in converted functions",
        "onnx",
        _ONNX,
        "The version converter drops references to attributes of the enclosing function.",
        "A placeholder without attributes is converted, and replaced by the node afterwards.",
        ("model_file/upgrade.py",),
    ),
    Workaround(
        "two spellings of a domain",
        "onnx",
        _ONNX,
        "The checker does not know that ai.onnx is the default domain, as the specification says.",
        "It is shown a skeleton of the model with one spelling.",
        ("model_file/proto.py",),
    ),
    Workaround(
        "evaluated Scan",
        "onnx",
        _ONNX,
        "The reference evaluator scans along the first axis and forward only.",
        "The evaluator of gradient checks has a Scan of its own.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated Loop",
        "onnx",
        _ONNX,
        "The reference evaluator concatenates the scan outputs of a Loop along an existing axis instead of a new one.",
        "The evaluator of gradient checks has a Loop of its own.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated SequenceInsert",
        "onnx",
        _ONNX,
        "The reference evaluator inserts in front of the last item where the position is the end.",
        "The evaluator of gradient checks has a SequenceInsert of its own.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated SequenceMap",
        "onnx",
        _ONNX,
        "The reference evaluator maps one sequence only, and bodies that read no value from outside.",
        "The evaluator of gradient checks has a SequenceMap of its own.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated Optional",
        "onnx",
        _ONNX,
        "The reference evaluator turns a tensor that is made optional into a sequence.",
        "The evaluator of gradient checks has an Optional of its own.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated Erf",
        "onnx",
        _ONNX,
        "The reference evaluator computes Erf, and so Gelu, in single precision, even for doubles.",
        "The evaluator of gradient checks has its own of both.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated GridSample",
        "onnx",
        _ONNX,
        "The reference evaluator rounds the coordinates of a GridSample to single precision.",
        "The evaluator of gradient checks does not.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated LpNormalization",
        "onnx",
        _ONNX,
        "The reference evaluator forgets the absolute value where p is 1.",
        "The evaluator of gradient checks has an LpNormalization of its own.",
        ("autodiff/evaluator.py",),
    ),
    Workaround(
        "evaluated ConvTranspose",
        "onnx",
        _ONNX,
        "The reference evaluator does not compute grouped transposed convolutions of several images and filters.",
        "The gradient of a depthwise convolution is written so that its own gradient needs none.",
        ("autodiff/rules/conv.py",),
    ),
    Workaround(
        "dropped training_info",
        "onnx-ir",
        _ONNX_IR,
        "Reading a model drops its training_info.",
        "The entries stay protos, and become graphs where they are edited.",
        ("lowering/training_info/read.py",),
    ),
    Workaround(
        "dropped sparse initializers",
        "onnx-ir",
        _ONNX_IR,
        "Reading a model drops its sparse initializers.",
        "They are made dense before.",
        ("model_file/working_copy.py",),
    ),
    Workaround(
        "merged random nodes",
        "onnx-ir",
        _ONNX_IR,
        "Its elimination of common subexpressions merges two Dropouts in training mode, which then draw the same mask.",
        "This project's own elimination skips random nodes.",
        ("graph/passes.py",),
    ),
    Workaround(
        "merged outputs",
        "onnx-ir",
        _ONNX_IR,
        "Its elimination of identities gives two outputs of a graph one name.",
        "This project's own elimination keeps an Identity that names an output.",
        ("graph/passes.py",),
    ),
    Workaround(
        "sympy at every start",
        "onnx-ir",
        _ONNX_IR,
        "Importing onnx-ir imports sympy: half of the time and a third of the memory until the first step.",
        "The module of sympy runs when its first attribute is read.",
        ("graph/upstream/lazy_sympy.py",),
    ),
    Workaround(
        "attributes of zero",
        "onnxruntime-openvino",
        ("1.24.1", "1.24.1"),
        "The provider reads beta=0.0 of HardSigmoid as the default, 0.5.",
        "Rules write no attribute of zero where zero is not the default.",
        ("autodiff/rules/activation.py",),
    ),
    Workaround(
        "one tensor given twice",
        "torch",
        ("2.13.0", "2.13.0"),
        "The exporter with dynamo=True takes two inputs for one where the same tensor is their example: in a model "
        "exported with (x, h, h), an LSTM begins with one value as hidden state and as cell state.",
        "A hint names the input that no node reads, and says how to export.",
        ("training/advice/hints.py",),
    ),
)
"""All bugs that are worked around, by package."""
