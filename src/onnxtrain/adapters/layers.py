"""Layers of a model that can have an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.adapters.checkpoint import in_checkpoints
from onnxtrain.autodiff.missing import FOR_ONE_CPU
from onnxtrain.errors import OptionError
from onnxtrain.errors.formatting import listed
from onnxtrain.graph.domains import MICROSOFT_DOMAIN, NCHWC_DOMAIN
from onnxtrain.graph.layers import form_of_node, reads_transposed
from onnxtrain.graph.patterns import alternatives, no_match
from onnxtrain.graph.patterns import matches as matches_glob
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.model_file.exporters import NameOrigin, genai, origin_of
from onnxtrain.parameters.names import module_paths, node_names
from onnxtrain.parameters.readers import Functions, chooses_one

ALL_LINEAR = "all-linear"
"""Target that selects all linear layers except the output layer, as in PEFT."""

AUTO = "auto"
"""Target that selects the projections of attention; without any, all linear layers; without these, all convolutions."""

_PROJECTIONS = (
    "{q,k,v,qkv}_proj", "{query,key,value}", "{query,key,value}_proj", "{q,k,v}_lin", "to_{q,k,v,qkv}",
    "{Q,K,V}", "w{q,k,v}", "*attn.{q,k,v,qkv}", "*ttention.{q,k,v,qkv}", "*EncDecAttention.{q,k,v}",
    "query_key_value", "Wqkv", "in_proj", "c_attn", "qkv",
)  # fmt: skip
"""Names of the query, key and value projections in PyTorch models and their exports."""

_MIXERS = (
    "{o,out}_proj", "out_lin", "to_out", "to_out.0", "*attn.{proj,c_proj,o,wo,dense}",
    "*ttention.{o,wo,dense,proj}", "*ttention.output.dense", "out_project",
)  # fmt: skip
"""Names of attention's output projections, which are adapted with them."""

_FURTHER = (
    ("*self_attn.dense", ("mlp.fc{1,2}",)),  # Phi
    ("mlp.c_fc2", ("mlp.c_proj",)),  # BTLM
    ("receptance", ("receptance", "{attention,feed_forward,att,ffn}.output")),  # RWKV
    ("r_proj", ("r_proj",)),  # RWKV 7
)
"""Further targets of single architectures that PEFT adapts by default, after the name of a layer that others lack."""

_VIEWS = frozenset({"Identity", "Cast", "Transpose", "DequantizeLinear"})
"""Operators between an initializer and the matrix multiplication that reads it."""


_INNER_BIAS = {"Gemm": 2, "Conv": 2, "MatMulNBits": 5, "DynamicQuantizeMatMul": 4}
"""Operators that add a bias themselves, with the index of the bias input."""

_BEHIND_THE_HEAD = frozenset({"Identity", "Cast", "Reshape", "Softmax", "LogSoftmax", "Mul", "Div", "Tanh"})
"""Operators between the layer that computes the output and the output."""


@dataclass(frozen=True)
class Part:
    """A layer of the checkpoint that an exporter packed with others into one linear layer."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Layer:
    """A layer y = x W that can have an adapter.

    Attributes:
        kind: The operator type of the node.
        node: The node that multiplies by W.
        x: The floating-point input; the indices for an embedding.
        y: The floating-point output, to which the adapter's is added.
        product: x W without a separate bias; equal to ``y`` if no Add follows.
        weight: The initializer that holds W.
        names: Names of the layer; the first is its adapter's.
        inputs: Number of input features; the number of rows for an embedding.
        outputs: Number of output features.
        window: The kernel shape of a convolution, () otherwise.
        bits: Bits per weight.
        parts: The layers that are packed into it; empty if it is not packed.
        readers: The largest number of readers of the weight and of its views.
    """

    kind: str
    node: ir.Node
    x: ir.Value
    y: ir.Value
    product: ir.Value
    weight: ir.Value
    names: tuple[str, ...]
    inputs: int
    outputs: int
    window: tuple[int, ...] = ()
    bits: int = 32
    parts: tuple[Part, ...] = ()
    readers: int = 1

    @property
    def name(self) -> str:
        """Name of its adapter."""
        return self.names[0]

    @property
    def is_embedding(self) -> bool:
        """Return whether the layer is an embedding lookup."""
        return self.kind == "Gather"

    @property
    def is_convolution(self) -> bool:
        """Return whether the layer is a convolution."""
        return self.kind == "Conv"

    @property
    def inner_bias(self) -> ir.Value | None:
        """The bias that the node itself adds."""
        slot = _INNER_BIAS.get(self.kind, len(self.node.inputs))
        return self.node.inputs[slot] if slot < len(self.node.inputs) else None

    @property
    def views(self) -> list[ir.Value]:
        """The values from the one that the node reads as its weight to the initializer that holds W."""
        found, value = list[ir.Value](), self.node.inputs[0 if self.is_embedding else 1]
        while value is not None:
            found.append(value)
            producer = value.producer()
            value = None if producer is None else producer.inputs[0]
        return found

    @property
    def targets(self) -> list[Target]:
        """The layer, or its parts if it is packed: each can have an adapter."""
        return [Target(self, part) for part in self.parts or (None,)]


class Target(NamedTuple):
    """A layer that has an adapter, or a part of a packed one."""

    layer: Layer
    part: Part | None = None

    @property
    def name(self) -> str:
        """Name of its adapter."""
        return self.layer.name if self.part is None else self.part.name

    @property
    def names(self) -> tuple[str, ...]:
        """All its names; those of a packed layer also stand for its parts."""
        return self.layer.names if self.part is None else (self.part.name, *self.layer.names)

    @property
    def start(self) -> int:
        """The first of its output features in the layer."""
        return 0 if self.part is None else self.part.start

    @property
    def outputs(self) -> int:
        """Number of output features."""
        return self.layer.outputs if self.part is None else self.part.size

    def of_weight(self, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of its outputs in the layer's dense weight."""
        outputs = slice(self.start, self.start + self.outputs)
        return weight[outputs] if self.layer.is_convolution else weight[:, outputs]


def find_layers(model: ir.Model) -> list[Layer]:
    """Return the layers of a model's main graph that can have an adapter, in the order of their nodes."""
    found = []
    for node in model.graph:
        kind = _KINDS.get((node.domain, node.op_type))
        layer = None if kind is None else kind(node, model.functions)
        if layer is not None:
            read = (len(value.uses()) + value.is_graph_output() for value in layer.views)
            found.append(replace(layer, readers=max(1, *read)))
    return _with_own_names(found)


def _with_own_names(layers: list[Layer]) -> list[Layer]:
    """Make first names unique: of layers that share a weight, the one whose node is called like it keeps its name."""
    owners: dict[str, Layer] = {}
    for layer in layers:
        if layer.name not in owners or (_is_named_by_node(layer) and not _is_named_by_node(owners[layer.name])):
            owners[layer.name] = layer
    final = dict(owners)
    own_names = []
    for layer in layers:
        own = layer.name
        if owners[own] is not layer:
            own = next((name for name in layer.names if name not in final), "")
            number = 2
            while not own or own in final:
                own, number = f"{layer.name}.{number}", number + 1
            final[own] = layer
        own_names.append(own)
    return [
        replace(
            layer, names=(own, *(n for n in layer.names if n != own and not _is_of_other_kind(layer, final.get(n))))
        )
        for layer, own in zip(layers, own_names, strict=True)
    ]


def _is_of_other_kind(layer: Layer, owner: Layer | None) -> bool:
    """Return whether one of two layers is an embedding, so that a target for the name of one is not for the other."""
    return owner is not None and owner.is_embedding != layer.is_embedding


def _is_named_by_node(layer: Layer) -> bool:
    name = name_of_node(layer.node)
    return layer.name in (name, in_checkpoints(name))


def choose_layers(layers: Sequence[Layer], targets: str | Sequence[str], output: ir.Value | None) -> list[Layer]:
    """Return the layers that match targets, packed ones with the matching parts only."""
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if AUTO in patterns:
        if len(patterns) > 1:
            raise OptionError("targets has 'auto' beside other patterns; give it alone, or name all layers.")
        return _usual(layers, output)
    chosen: dict[str, Layer] = {}
    for pattern in patterns:
        found = [other for layer in layers if (other := _chosen(layer, pattern, output)) is not None]
        if not found:
            names = [layer.name for layer in layers]
            advice = "`onnxtrain inspect MODEL --adaptable` lists them."
            raise OptionError(no_match("lora_targets", pattern, "layer that can have an adapter", names, advice))
        for layer in found:
            before = chosen.get(layer.name)
            if before is not None and before.parts and layer.parts:
                named = {part.name for part in (*before.parts, *layer.parts)}
                whole = next(one for one in layers if one.node is layer.node)
                layer = _with_parts(layer, [part for part in whole.parts if part.name in named])
            elif before is not None:
                layer = before if not before.parts else layer
            chosen[layer.name] = layer
    return [chosen[layer.name] for layer in layers if layer.name in chosen]


def _usual(layers: Sequence[Layer], output: ir.Value | None) -> list[Layer]:
    """Return the layers that "auto" selects."""
    linear = [layer for layer in layers if _chosen(layer, ALL_LINEAR, output) is not None]
    projections = _named(linear, _PROJECTIONS)
    if projections:
        further = [pattern for mark, patterns in _FURTHER if _named(linear, [mark]) for pattern in patterns]
        mixers = {layer.name for layer in _named(linear, [*_MIXERS, *further])} - {layer.name for layer in projections}
        own = {layer.name: layer for layer in projections}
        return [own.get(layer.name, layer) for layer in linear if layer.name in own or layer.name in mixers]
    found = [_with_parts(layer, []) for layer in linear] or [layer for layer in layers if layer.is_convolution]
    graph = None if output is None else output.graph
    if not found and graph is not None and any(node.domain == NCHWC_DOMAIN for node in graph):
        raise OptionError(FOR_ONE_CPU)
    if not found:
        known = listed((layer.name for layer in layers), 8, counted=False) or "none"
        raise OptionError(
            "The default targets are linear layers before the output's, and convolutions, of which the model has none; "
            f"name the layers with targets=, of these: {known}."
        ).about("targets")
    return found


def _named(layers: Sequence[Layer], patterns: Sequence[str]) -> list[Layer]:
    found = (next((one for p in patterns if (one := _chosen(layer, p, None)) is not None), None) for layer in layers)
    return [layer for layer in found if layer is not None]


def main_output(graph: ir.Graph, name: str | None = None) -> ir.Value | None:
    """Return the output with this name, by default the first floating-point output, or ``None``."""
    return next((value for value in graph.outputs if (value.name == name if name else is_float(value))), None)


def _chosen(layer: Layer, pattern: str, output: ir.Value | None) -> Layer | None:
    if pattern == ALL_LINEAR:
        return None if layer.is_embedding or layer.is_convolution or _gives(layer, output) else layer
    parts = [part for part in layer.parts if matches(pattern, [part.name])]
    if parts:
        return _with_parts(layer, parts)
    return _with_parts(layer, []) if matches(pattern, layer.names) else None


def _with_parts(layer: Layer, parts: Sequence[Part]) -> Layer:
    return replace(layer, parts=tuple(parts))


def _gives(layer: Layer, output: ir.Value | None) -> bool:
    """Return whether only shape operations, casts, a softmax, scales or caps lie between a layer and the output."""
    value = layer.y
    while value is not output:
        readers = [node for node in value.consumers() if not node.domain]
        if len(readers) != 1 or readers[0].op_type not in _BEHIND_THE_HEAD:
            return False
        if readers[0].op_type in ("Mul", "Div") and not any(map(_is_constant, readers[0].inputs)):
            return False
        value = readers[0].outputs[0]
    return True


def _is_constant(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return source(value) is not None or (node is not None and node.op_type == "Constant")


def source(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer behind a value, through transpositions, casts and dequantization; ``None`` without one."""
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.op_type not in _VIEWS or node.domain not in ("", MICROSOFT_DOMAIN) or not node.inputs:
            return None
        value = node.inputs[0]
    return value if value is None or not value.is_graph_input() or value.const_value is not None else None


def _sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    shape = None if value is None else dimensions(value)
    if shape is None or not all(isinstance(size, int) for size in shape):
        return None
    return tuple(int(size) for size in shape if isinstance(size, int))


def _matrix(value: ir.Value | None) -> tuple[int, ...] | None:
    sizes = _sizes(value)
    return sizes if sizes is not None and len(sizes) == 2 else None


def _behind_bias(product: ir.Value, outputs: int) -> ir.Value:
    """Return the output of the bias Add behind a matmul if it is the only reader, else the matmul's output.

    ONNX Runtime fuses the two, which an addition in between would prevent.
    """
    readers = list(product.consumers())
    if product.is_graph_output() or len(readers) != 1 or readers[0].op_type != "Add" or readers[0].domain:
        return product
    other = readers[0].inputs[1] if readers[0].inputs[0] is product else readers[0].inputs[0]
    bias = source(other)
    return readers[0].outputs[0] if bias is not None and _sizes(bias) == (outputs,) else product


def _layer(
    node: ir.Node,
    functions: Functions,
    x: ir.Value | None,
    view: ir.Value | None,
    sizes: Sequence[int] | None,
    *,
    product: ir.Value | None = None,
    bits: int | None = None,
    biased: bool = True,
    packed: bool = True,
) -> Layer | None:
    """Return the layer of a node: its input, what it reads as its weight, and sizes (inputs, outputs, *window)."""
    weight, product = source(view), product or node.outputs[0]
    if x is None or weight is None or sizes is None:
        return None
    inputs, outputs, *window = sizes
    bits = bits or (32 if weight.dtype is None else weight.dtype.bitwidth)
    y = _behind_bias(product, outputs) if biased else product
    names = layer_names(weight, node, functions)
    parts = _parts(names[0], y, outputs) if packed else ()
    return Layer(node.op_type, node, x, y, product, weight, names, inputs, outputs, tuple(window), bits, parts)


def _matmul(node: ir.Node, functions: Functions) -> Layer | None:
    x, view = node.inputs[:2]
    if form_of_node(node) is None or source(x) is not None or not is_float(node.outputs[0]):
        return None
    sizes = _matrix(view)
    return _layer(node, functions, x, view, sizes[::-1] if sizes is not None and reads_transposed(node) else sizes)


def _convolution(node: ir.Node, functions: Functions) -> Layer | None:
    x, view = node.inputs[:2]
    sizes = _sizes(view)
    if sizes is None or node.attributes.get_int("group", 1) != 1 or not is_float(node.outputs[0]):
        return None
    return _layer(node, functions, x, view, (sizes[1], sizes[0], *sizes[2:]), biased=False, packed=False)


def _embedding(node: ir.Node, functions: Functions) -> Layer | None:
    view, indices = node.inputs[:2]
    if node.attributes.get_int("axis", 0) != 0 or not is_float(node.outputs[0]) or chooses_one(node):
        return None
    return _layer(node, functions, indices, view, _matrix(view), biased=False, packed=False)


def _of_bits(node: ir.Node, functions: Functions) -> Layer | None:
    """Match MatMulNBits, whose weight is block-quantized to low bits."""
    x, weight = node.inputs[:2]
    if weight is None or not weight.is_initializer() or (len(node.inputs) > 4 and node.inputs[4]):
        return None
    sizes = node.attributes["K"].as_int(), node.attributes["N"].as_int()
    return _layer(node, functions, x, weight, sizes, bits=node.attributes.get_int("bits", 4))


def _dynamic(node: ir.Node, functions: Functions) -> Layer | None:
    """Match DynamicQuantizeLinear, MatMulInteger, Cast, and the Mul by the scales."""
    giver = None if node.inputs[0] is None else node.inputs[0].producer()
    if giver is None or giver.op_type != "DynamicQuantizeLinear":
        return None
    value = node.outputs[0]
    for operator in ("Cast", "Mul"):
        readers = list(value.consumers())
        if len(readers) != 1 or readers[0].op_type != operator:
            return None
        value = readers[0].outputs[0]
    view = node.inputs[1]
    if not is_float(value):
        return None
    return _layer(node, functions, giver.inputs[0], view, _matrix(view), product=value, packed=False)


def _dynamic_fused(node: ir.Node, functions: Functions) -> Layer | None:
    """Match DynamicQuantizeMatMul, the fused form of :func:`_dynamic`."""
    x, view = node.inputs[:2]
    return _layer(node, functions, x, view, _matrix(view), biased=False, packed=False)


_KINDS: dict[tuple[str, str], Callable[[ir.Node, Functions], Layer | None]] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _matmul,
    ("", "Conv"): _convolution,
    ("", "Gather"): _embedding,
    ("", "MatMulInteger"): _dynamic,
    (MICROSOFT_DOMAIN, "FusedMatMul"): _matmul,
    (MICROSOFT_DOMAIN, "MatMulNBits"): _of_bits,
    (MICROSOFT_DOMAIN, "DynamicQuantizeMatMul"): _dynamic_fused,
}

_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of packed linear layers, with the checkpoint's names of their parts."""


def _parts(name: str, y: ir.Value, outputs: int) -> tuple[Part, ...]:
    path, dot, last = name.rpartition(".")
    named = _PACKED.get(last)
    sizes = None if named is None else _packed_sizes(y, outputs, len(named))
    if named is None or sizes is None:
        return ()
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(
        Part(f"{path}{dot}{other}", start, size) for other, start, size in zip(named, starts, sizes, strict=True)
    )


def _packed_sizes(y: ir.Value, outputs: int, count: int) -> list[int] | None:
    """Return the columns of each part, from the GroupQueryAttention or Split that reads the output."""
    for reader, index in y.uses():
        heads = reader.attributes.get("num_heads")
        if reader.op_type == "GroupQueryAttention" and index == 0 and heads is not None:
            queries, keys = heads.as_int(), reader.attributes.get_int("kv_num_heads", heads.as_int())
            head = outputs // (queries + 2 * keys)
            return [queries * head, keys * head, keys * head]
        last = -1 if y.shape is None else len(y.shape) - 1
        splits = reader.op_type == "Split" and len(reader.outputs) == count
        if splits and reader.attributes.get_int("axis", 0) in (-1, last):
            sizes = [shape[-1] for value in reader.outputs if (shape := dimensions(value)) is not None and shape]
            known = [size for size in sizes if isinstance(size, int)]
            if len(known) == count and sum(known) == outputs:
                return known
    return None


def refuse_magnitudes(layers: Sequence[Layer]) -> None:
    """Refuse DoRA for layers whose weight has no column norms."""
    for layer in layers:
        if layer.kind in ("Gather", "MatMulInteger", "DynamicQuantizeMatMul"):
            raise OptionError(
                f"DoRA trains magnitudes of columns, but {layer.name!r} is a {layer.kind}, whose weight has none; "
                "leave it out of the targets, or go without DoRA."
            ).about(layer.name, got=layer.kind)


def layer_names(weight: ir.Value, node: ir.Node, functions: Functions | None = None) -> tuple[str, ...]:
    """Return the names of a layer; the first is the name of its adapter.

    Example:
        >>> weight, x = ir.Value(name="model.layers.0.attn.q_proj.MatMul.weight"), ir.Value(name="x")
        >>> layer_names(weight, ir.Node("", "MatMul", [x, weight], name="/model/layers.0/attn/q_proj/MatMul"))
        ('model.layers.0.self_attn.q_proj', 'model.layers.0.attn.q_proj')
    """
    name = weight.name or ""
    found = [] if origin_of(name) is NameOrigin.EXPORTER else [genai.layer_of_weight(name)]
    found += [genai.layer_of_weight(path) for path in module_paths(weight, functions)]
    found += [genai.layer_of_node(other) for other in node_names(weight, functions) if "/" not in other]
    found += [own] if (own := name_of_node(node)) else []
    found += [name] if not found else []
    return tuple(dict.fromkeys(other for one in found for other in (in_checkpoints(one), one) if other))


def name_of_node(node: ir.Node) -> str:
    """Return the name of a layer by its node, "" for a node without name.

    Example:
        >>> name_of_node(ir.Node("", "MatMul", [], name="/model/lm_head/MatMul"))
        'model.lm_head'
    """
    return genai.layer_of_node((node.name or "").strip("/").replace("/", "."))


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern matches one of a layer's names.

    Example:
        >>> [matches(pattern, ["a.b.q_proj"]) for pattern in ("*.{q,v}_proj", "q_proj", "proj", "a.*.k_proj")]
        [True, True, False, False]
    """
    found = tuple(names)
    ends = tuple(f".{one}" for one in alternatives(pattern))
    return matches_glob(pattern, *found) or any(name.endswith(ends) for name in found)
