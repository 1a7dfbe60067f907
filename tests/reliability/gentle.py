"""Mutations that mostly keep a model valid for plain onnxruntime, and so reach code behind its checks."""

from __future__ import annotations

import random

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from reliability.mutation import NOTHING_TO_CHANGE
from reliability.mutation_of_meanings import Mutate, depth, graphs, nodes, order, rename

UNARY = ("Identity", "Relu", "Neg", "Abs", "Tanh", "Sigmoid", "Exp", "Sqrt", "Floor", "Softplus", "Erf", "Sign", "Sin")
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
EXTREMES = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, 0.0)
SMOOTH = (
    "Relu",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Sigmoid",
    "Tanh",
    "Softplus",
    "Softsign",
    "HardSigmoid",
    "Identity",
    "Erf",
)


def after(model: ModelProto, generator: random.Random) -> None:
    """Insert a node between a value and one of its readers."""
    graph = generator.choice(graphs(model))
    index = generator.randrange(len(graph.node))
    slot = generator.choice([slot for slot, name in enumerate(graph.node[index].input) if name])
    name = graph.node[index].input[slot]
    fresh = f"more{generator.randrange(10**9)}"
    inputs = [name] if generator.random() < 0.6 else [name, name]
    node = helper.make_node(generator.choice(UNARY if len(inputs) == 1 else BINARY), inputs, [fresh])
    graph.node[index].input[slot] = fresh
    graph.node.insert(index, node)


def other_activation(model: ModelProto, generator: random.Random) -> None:
    """Replace a function of one value by another."""
    chosen = generator.choice([node for node in nodes(model) if node.op_type in SMOOTH])
    chosen.op_type = generator.choice(SMOOTH)
    chosen.ClearField("attribute")


def another_output(model: ModelProto, generator: random.Random) -> None:
    """Make an intermediate value an output, before or after the others."""
    names = [name for node in model.graph.node for name in node.output if name]
    value = helper.make_tensor_value_info(generator.choice(names), TensorProto.FLOAT, None)
    model.graph.output.insert(generator.choice((0, len(model.graph.output))), value)


def extreme_weight(model: ModelProto, generator: random.Random) -> None:
    """Write an extreme number into a weight."""
    tensors = [
        tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT and tensor.raw_data
    ]
    tensor = generator.choice(tensors)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[generator.randrange(array.size)] = generator.choice(EXTREMES)
    tensor.raw_data = array.tobytes()


def unknown_shapes(model: ModelProto, generator: random.Random) -> None:
    """Remove the sizes of declarations, or their shapes."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.HasField("tensor_type") and generator.random() < 0.5:
            for axis in value.type.tensor_type.shape.dim:
                if generator.random() < 0.5:
                    axis.dim_param = generator.choice(("a", "b", "?", "unk__0"))


def in_a_function(model: ModelProto, generator: random.Random) -> None:
    """Replace a node by a call of a function that contains it."""
    node = generator.choice([node for node in model.graph.node if not any(a.HasField("g") for a in node.attribute)])
    body = NodeProto()
    body.CopyFrom(node)
    del body.input[:], body.output[:]
    inputs, outputs = (
        [f"{kind}{i}" for i in range(len(names))] for kind, names in (("i", node.input), ("o", node.output))
    )
    body.input.extend(inputs)
    body.output.extend(outputs)
    name = f"wrapped{generator.randrange(10**6)}"
    imports = [helper.make_opsetid(entry.domain, entry.version) for entry in model.opset_import]
    model.functions.append(helper.make_function("wrapping", name, inputs, outputs, [body], imports))
    if not any(entry.domain == "wrapping" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("wrapping", 1))
    node.domain, node.op_type = "wrapping", name
    node.ClearField("attribute")
    model.ir_version = max(model.ir_version, 8)


def twice(model: ModelProto, generator: random.Random) -> None:
    """Apply the graph twice if its output fits its input; otherwise add a second copy beside it."""
    graph: GraphProto = model.graph
    copies = []
    made = {name for node in graph.node for name in node.output}
    for node in graph.node:
        copied = NodeProto()
        copied.CopyFrom(node)
        for names in (copied.input, copied.output):
            for index, name in enumerate(names):
                if name in made:
                    names[index] = f"{name}_again"
        copies.append(copied)
    graph.node.extend(copies)
    value = graph.output[0]
    again = graph.output.add()
    again.CopyFrom(value)
    again.name = f"{value.name}_again"


def newer(model: ModelProto, generator: random.Random) -> None:
    """Declare a later opset, in which most operators are the same."""
    entry = model.opset_import[0]
    entry.version = min(entry.version + generator.choice((1, 2, 3)), 23)
    model.ir_version = max(model.ir_version, 10)


GENTLE: tuple[Mutate, ...] = (
    after, after, other_activation, another_output, extreme_weight, unknown_shapes, in_a_function, twice, newer, rename,
    order, depth,
)  # fmt: skip


def mutate_gently(model: ModelProto, generator: random.Random) -> bytes:
    """Change a model in place, mostly to a valid one; return its bytes."""
    for _ in range(generator.choice((1, 1, 2, 3))):
        for _ in range(4):
            try:
                generator.choice(GENTLE)(model, generator)
                break
            except NOTHING_TO_CHANGE:
                continue
    return model.SerializeToString()
