"""Graphs that each target one weakness: depths, sizes, counts, cycles, and extreme values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import FunctionProto, ModelProto, TensorProto, helper, numpy_helper

from reliability.crafting import CRAFTED, HUGE, base, changed, crafted, text, write

# Depth: messages in messages, written as bytes, since protocol buffers refuse to build them.


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(head) + bytes([size]) + content


def _deep(levels: int) -> bytes:
    graph = _field(1, _field(1, b"c") + _field(2, b"y") + _field(4, b"Identity"))
    for level in range(levels):
        attribute = _field(1, b"then_branch") + _field(6, graph) + b"\xa0\x01\x05"
        node = _field(1, b"c") + _field(2, b"y%d" % level) + _field(4, b"If") + _field(5, attribute)
        graph = _field(1, node)
    return b"\x08\x08" + _field(7, graph + _field(2, b"deep") + _field(12, _field(1, b"y"))) + _field(8, b"\x10\x12")


for _levels in (20, 30, 100, 2000):
    CRAFTED[f"{_levels} branches deep"] = lambda folder, levels=_levels: write(folder, _deep(levels))


@crafted("a type of types")
def _type_of_types(folder: Path) -> None:
    model = base()
    kind = model.graph.input.add(name="deep").type
    for _ in range(25):
        kind = kind.sequence_type.elem_type
    kind.tensor_type.elem_type = TensorProto.FLOAT
    write(folder, model)


# Functions: a call is replaced by a body, and a body may call.


def _function(name: str, *calls: str) -> FunctionProto:
    nodes, value = [], "a"
    for index, call in enumerate(calls):
        domain = "" if call[0].isupper() else "own"
        nodes.append(helper.make_node(call, [value], [f"v{index}"], domain=domain))
        value = f"v{index}"
    nodes.append(helper.make_node("Identity", [value], ["b"]))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], nodes, imports)


def _with_functions(name: str, *functions: FunctionProto, call: str) -> None:
    def change(model: ModelProto) -> None:
        model.opset_import.append(helper.make_opsetid("own", 1))
        model.functions.extend(functions)
        model.graph.node[0].output[0] = "h"
        model.graph.node.append(helper.make_node(call, ["h"], ["y"], domain="own"))

    changed(name, change)


_with_functions("a function that calls itself", _function("again", "again"), call="again")
_with_functions("two functions in a cycle", _function("one", "two"), _function("two", "one"), call="one")
_with_functions(
    "a chain of 300 functions", *(_function(f"f{i}", f"f{i - 1}" if i else "Relu") for i in range(300)), call="f299"
)
_with_functions(
    "40 functions that each call the next twice",
    *(_function(f"f{i}", *([f"f{i - 1}"] * 2 if i else ["Relu"])) for i in range(40)),
    call="f39",
)
_with_functions("a function that is there twice", _function("f", "Relu"), _function("f", "Tanh"), call="f")

# Huge sizes in a few bytes.

text(
    "a huge fill",
    "(float[N, 4] x) => (float[?] y)",
    "int64[1] s = {1099511627776}",
    "c = ConstantOfShape(s)  y = Add(c, s1)  s1 = ReduceSum(x)",
)
text(
    "a huge expansion",
    "(float[1] x) => (float[?] y)",
    "int64[1] s = {1099511627776}, float w = {1}",
    "m = Mul(x, w)  y = Expand(m, s)",
)
text(
    "a huge tile",
    "(float[1] x) => (float[?] y)",
    "int64[1] s = {1099511627776}, float w = {1}",
    "m = Mul(x, w)  y = Tile(m, s)",
)
text(
    "a huge range",
    "(float[N, 4] x) => (int64[?] y)",
    "int64 a = {0}, int64 b = {1099511627776}, int64 c = {1}",
    "y = Range(a, b, c)",
)
text(
    "a huge padding",
    "(float[N] x) => (float[?] y)",
    "int64[2] p = {0, 1099511627776}, float w = {1}",
    "m = Mul(x, w)  y = Pad(m, p)",
)
text(
    "a negative padding",
    "(float[N] x) => (float[?] y)",
    "int64[2] p = {-9, -9}, float w = {1}",
    "m = Mul(x, w)  y = Pad(m, p)",
)
text(
    "a huge resize",
    "(float[1, 1, 4, 4] x) => (float[?, ?, ?, ?] y)",
    "float[4] s = {1, 1, 1e9, 1e9}, float w = {1}",
    "m = Mul(x, w)  y = Resize(m, , s)",
)
text(
    "a huge one-hot",
    "(int64[N] x) => (float[N, ?] y)",
    "int64 d = {1099511627776}, float[2] v = {0, 1}",
    "y = OneHot(x, d, v)",
)
text(
    "huge randomness",
    "(float[N] x) => (float[?] y)",
    "float w = {1}",
    "r = RandomNormal <shape = [1099511627776]> ()  y = Mul(r, w)",
)
text(
    "a batch of nothing",
    "(float[0, 4] x) => (float[0, 4] y)",
    "float[4] w = {1, 2, 3, 4}",
    "y = Mul(x, w)",
)
text(
    "a huge batch",
    "(float[1152921504606846976, 4] x) => (float[1152921504606846976, 4] y)",
    "float[4] w = {1, 2, 3, 4}",
    "y = Mul(x, w)",
)
text(
    "a vector that is doubled 40 times",
    "(float[1] x) => (float[?] y)",
    "float w = {1}",
    # Of 64 MiB there are 256 at once: more than a process may have, before much memory is written, which can be slow.
    "v0 = Mul(x, w)  "
    + "  ".join(f"v{i + 1} = Concat<axis = 0>({', '.join([f'v{i}'] * (256 if i == 24 else 2))})" for i in range(40))
    + "  y = Neg(v40)",
)
text(
    "a loop without end",
    "(float[N] x) => (float[N] y)",
    "float w = {1}, bool yes = {1}",
    "y = Loop (, yes, x) <body = b (int64 i, bool c, float[N] s) => (bool c, float[N] t) { t = Mul(s, w) }>",
)
text(
    "a loop of 2**40",
    "(float[N] x) => (float[N] y)",
    "float w = {1}, bool yes = {1}, int64 n = {1099511627776}",
    "y = Loop (n, yes, x) <body = b (int64 i, bool c, float[N] s) => (bool d, float[N] t) { d = Identity(c) "
    "t = Mul(s, w) }>",
)


def _dims(*dims: int) -> Callable[[ModelProto], object]:
    def change(model: ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("dims")
        tensor.dims.extend(dims)

    return change


changed("a huge weight without data", _dims(HUGE, 3))
changed("a size that overflows", _dims(2**32, 2**32))
changed("a size that overflows to what is there", _dims(2**62, 4, 12))
changed("a negative size", _dims(-4, -3))
changed("a minimal size", _dims(-(2**63), 3))
changed("a rank of 1000", _dims(*[1] * 1000))
for _name, _tensor in {
    "a rank of 200": TensorProto(name="c", data_type=1, dims=[1] * 200, raw_data=bytes(4)),
    "an unknown type": TensorProto(name="c", data_type=2**31 - 1, dims=[1], raw_data=bytes(4)),
    "a segment": TensorProto(name="c", data_type=1, dims=[1], raw_data=bytes(4), segment=TensorProto.Segment(end=1)),
}.items():
    changed(f"{_name} in an initializer", lambda model, tensor=_tensor: model.graph.initializer.append(tensor))
    node = helper.make_node("Constant", [], ["c"], value=_tensor)
    changed(f"{_name} in a constant", lambda model, node=node: model.graph.node.insert(0, node))


def _sparse(dims: list[int], indices: list[int]) -> Callable[[ModelProto], object]:
    def change(model: ModelProto) -> None:
        values = numpy_helper.from_array(np.ones(len(indices), np.float32), "w")
        index = numpy_helper.from_array(np.array(indices, np.int64), "")
        del model.graph.initializer[0]
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, index, dims))

    return change


changed("a huge sparse weight", _sparse([HUGE, 3], [0]))
changed("a sparse weight of 2 GiB in 24 bytes", _sparse([20_000, 20_000], [0]))
changed("a sparse weight of rank 200", _sparse([1] * 200, [0]))
changed("a sparse weight with indices out of range", _sparse([4, 3], [0, 5, 99]))
changed("a sparse weight with negative indices", _sparse([4, 3], [-1, 5]))
changed("a sparse weight with an index twice", _sparse([4, 3], [5, 5]))
changed("a sparse weight out of order", _sparse([4, 3], [7, 2]))
changed("a sparse weight of nothing", _sparse([4, 3], []))

# Amounts.


@crafted("a chain of 5000 nodes")
def _chain(folder: Path) -> None:
    model = base()
    model.graph.node[0].output[0] = "h0"
    for index in range(5000):
        model.graph.node.append(helper.make_node("Relu", [f"h{index}"], [f"h{index + 1}" if index < 4999 else "y"]))
    write(folder, model)


@crafted("a sum of 3000 inputs")
def _wide(folder: Path) -> None:
    model = base()
    model.graph.node[0].output[0] = "h"
    model.graph.node.append(helper.make_node("Sum", ["h"] * 3000, ["y"]))
    write(folder, model)


@crafted("20000 initializers that nobody reads")
def _many(folder: Path) -> None:
    model = base()
    for index in range(20000):
        model.graph.initializer.append(helper.make_tensor(f"unused{index}", TensorProto.FLOAT, [1], [1.0]))
    write(folder, model)


changed("a name of a megabyte", lambda model: setattr(model.graph, "name", "n" * 2**20))

# Invalid graphs.

changed("a cycle", lambda model: model.graph.node.append(helper.make_node("Add", ["y", "z"], ["z"])))
changed("a value that is made twice", lambda model: model.graph.node.append(helper.make_node("Relu", ["x"], ["y"])))
changed("an output that is there twice", lambda model: model.graph.output.append(model.graph.output[0]))
changed("an output that is an input", lambda model: model.graph.output.append(model.graph.input[0]))
changed(
    "an output that is a weight", lambda model: model.graph.output.append(helper.make_tensor_value_info("w", 1, [4, 3]))
)
changed(
    "an output that nobody makes", lambda model: model.graph.output.append(helper.make_tensor_value_info("z", 1, []))
)
changed("an input that is there twice", lambda model: model.graph.input.append(model.graph.input[0]))
changed("an output without a name", lambda model: setattr(model.graph.output[0], "name", ""))
changed("an output without a type", lambda model: model.graph.output[0].ClearField("type"))
changed("no nodes", lambda model: model.graph.ClearField("node"))
changed("a node without outputs", lambda model: model.graph.node.append(helper.make_node("Relu", ["x"], [])))
changed("an operator without a name", lambda model: setattr(model.graph.node[0], "op_type", ""))
changed("imports that contradict", lambda model: model.opset_import.append(helper.make_opsetid("ai.onnx", 7)))

# Numbers that processors or libraries do not like.

text(
    "an integer division by zero",
    "(float[N, 4] x) => (float[N, 4] y)",
    "float w = {1}, int64 a = {7}, int64 b = {0}",
    "d = Div(a, b)  e = Cast <to = 1> (d)  m = Mul(x, w)  y = Add(m, e)",
)
text(
    "the smallest integer by -1",
    "(float[N, 4] x) => (float[N, 4] y)",
    "float w = {1}, int64 a = {-9223372036854775808}, int64 b = {-1}",
    "d = Div(a, b)  e = Cast <to = 1> (d)  m = Mul(x, w)  y = Add(m, e)",
)
text(
    "a remainder by zero",
    "(float[N, 4] x, int64[N] i) => (float[N, 4] y, int64[N] r)",
    "float w = {1}, int64 b = {0}",
    "r = Mod(i, b)  y = Mul(x, w)",
)
text(
    "strides of zero",
    "(float[1, 1, 4, 4] x) => (float[?, ?, ?, ?] y)",
    "float[1, 1, 2, 2] w = {1, 1, 1, 1}",
    "y = Conv <strides = [0, 0]> (x, w)",
)
text(
    "a group of zero",
    "(float[1, 1, 4, 4] x) => (float[?, ?, ?, ?] y)",
    "float[1, 1, 2, 2] w = {1, 1, 1, 1}",
    "y = Conv <group = 0> (x, w)",
)
text(
    "a huge kernel",
    "(float[1, 1, 4, 4] x) => (float[?, ?, ?, ?] y)",
    "float w = {1}",
    "m = Mul(x, w)  y = MaxPool <kernel_shape = [4611686018427387904, 2]> (m)",
)
text(
    "huge padding of a pool",
    "(float[1, 1, 4, 4] x) => (float[?, ?, ?, ?] y)",
    "float w = {1}",
    "m = Mul(x, w)  y = AveragePool <kernel_shape = [2, 2], pads = [1099511627776, 0, 0, 0]> (m)",
)
text(
    "a slice with steps of zero",
    "(float[N, 4] x) => (float[?, ?] y)",
    "float w = {1}, int64[1] a = {0}, int64[1] e = {4}, int64[1] d = {1}, int64[1] s = {0}",
    "m = Mul(x, w)  y = Slice(m, a, e, d, s)",
)
text(
    "an index outside",
    "(float[N, 4] x) => (float[?, ?] y)",
    "float[4, 3] w = {1,1,1,1,1,1,1,1,1,1,1,1}, int64[1] i = {1000000000}",
    "g = Gather(w, i)  m = MatMul(x, w)  y = Add(m, g)",
)
text(
    "two unknown sizes",
    "(float[N, 4] x) => (float[?, ?] y)",
    "float w = {1}, int64[2] s = {-1, -1}",
    "m = Mul(x, w)  y = Reshape(m, s)",
)
text(
    "a scale of zero",
    "(float[N, 4] x) => (float[N, 4] y)",
    "float w = {1}, float s = {0}, uint8 z = {0}",
    "m = Mul(x, w)  q = QuantizeLinear(m, s, z)  y = DequantizeLinear(q, s, z)",
)
text(
    "ellipses of different ranks",
    "(float[2, 3, 4] x) => (float[?, ?] y)",
    "float[4] w = {1, 1, 1, 1}",
    'y = Einsum <equation = "...ij,...j->...i"> (x, w)',
)
text("an equation of nothing", "(float[N, 4] x) => (float y)", "float w = {1}", 'y = Einsum <equation = ","> (w, w)')
text(
    "a split into nothing",
    "(float[N, 4] x) => (float[?, ?] y)",
    "float w = {1}, int64[2] s = {0, 4}",
    "m = Mul(x, w)  a, y = Split <axis = 1> (m, s)",
)
text(
    "a pool that keeps nothing",
    "(float[1, 1, 4, 4] x) => (float[?, ?, ?, ?] y)",
    "float w = {1}",
    "m = Mul(x, w)  y = MaxPool <kernel_shape = [9, 9]> (m)",
)
text(
    "a constant without a value",
    "(float[N, 4] x) => (float[N, 4] y)",
    "float w = {1}",
    "c = Constant ()  m = Mul(x, w)  y = Add(m, c)",
)
text(
    "a sequence of nothing",
    "(float[N, 4] x) => (float[N, 4] y, seq(float[?]) s)",
    "float w = {1}",
    "s = SequenceEmpty()  y = Mul(x, w)",
)
