"""Mutations of the meaning of fields in ONNX: shapes, types, names, edges, operators, attributes, graphs."""

from __future__ import annotations

import random
from collections.abc import Callable

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from reliability.mutation_of_fields import FLOATS, INTEGERS, OPERATORS, TEXTS, copy, messages, other_data, other_name

Mutate = Callable[[ModelProto, random.Random], object]
MEANT: list[Mutate] = []


def _meant(mutation: Mutate) -> Mutate:
    MEANT.append(mutation)
    return mutation


def graphs(model: ModelProto) -> list[GraphProto]:
    return [message for message in messages(model) if isinstance(message, GraphProto)]


def nodes(model: ModelProto) -> list[NodeProto]:
    return [message for message in messages(model) if isinstance(message, NodeProto)]


def _tensors(model: ModelProto) -> list[TensorProto]:
    return [message for message in messages(model) if isinstance(message, TensorProto)]


@_meant
def dimensions(model: ModelProto, generator: random.Random) -> None:
    """Change the shape of a tensor, with or without its data."""
    tensor = generator.choice(_tensors(model))
    dims = list(tensor.dims)
    match generator.randrange(4):
        case 0:
            dims.insert(generator.randrange(len(dims) + 1), generator.choice((0, 1, 2, -1, 2**40)))
        case 1:
            del dims[generator.randrange(len(dims))]
        case 2:
            dims[generator.randrange(len(dims))] = generator.choice(INTEGERS)
        case 3:
            generator.shuffle(dims)
    tensor.ClearField("dims")
    tensor.dims.extend(dims)
    size = 1
    for dim in dims:
        size *= dim
    if (
        tensor.data_type == TensorProto.FLOAT
        and 0 <= size < 4096
        and generator.random() < 0.7
        and not tensor.external_data
    ):
        tensor.ClearField("float_data")
        tensor.raw_data = generator.randbytes(4 * size)


@_meant
def declared_shape(model: ModelProto, generator: random.Random) -> None:
    """Change the declared shape of an input, an output or a value."""
    graph = generator.choice(graphs(model))
    value = generator.choice([*graph.input, *graph.output, *graph.value_info])
    shape = value.type.tensor_type.shape
    match generator.randrange(5):
        case 0:
            value.type.tensor_type.ClearField("shape")
        case 1:
            shape.dim.add().dim_value = generator.choice(INTEGERS)
        case 2:
            del shape.dim[generator.randrange(len(shape.dim))]
        case 3:
            generator.choice(shape.dim).dim_value = generator.choice(INTEGERS)
        case 4:
            generator.choice(shape.dim).dim_param = generator.choice(("N", "M", "?", "", "unk__1", "N + 1", "\x1b"))


@_meant
def element_type(model: ModelProto, generator: random.Random) -> None:
    """Change the element type of a declaration or of a tensor."""
    kind = generator.choice([*TensorProto.DataType.values(), 99])
    if generator.random() < 0.5:
        generator.choice(_tensors(model)).data_type = kind
        return
    graph = generator.choice(graphs(model))
    generator.choice([*graph.input, *graph.output]).type.tensor_type.elem_type = kind


@_meant
def rename(model: ModelProto, generator: random.Random) -> None:
    """Rename a value everywhere in the graph: the model computes the same, unless the name is in use."""
    node = generator.choice(nodes(model))
    old = generator.choice([*node.input, *node.output])
    new = other_name(list(messages(model)), generator)
    for message in list(messages(model)):
        if isinstance(message, NodeProto):
            for names in (message.input, message.output):
                for index, name in enumerate(names):
                    if name == old:
                        names[index] = new
        elif hasattr(message, "name") and message.name == old:
            message.name = new


@_meant
def rewire(model: ModelProto, generator: random.Random) -> None:
    """Connect an input of a node to another value, perhaps to a later one."""
    found = nodes(model)
    node, other = generator.choice(found), generator.choice(found)
    node.input[generator.randrange(len(node.input))] = generator.choice([*other.input, *other.output])


@_meant
def operator(model: ModelProto, generator: random.Random) -> None:
    """Change the operator of a node."""
    generator.choice(nodes(model)).op_type = generator.choice(OPERATORS)


@_meant
def insert_node(model: ModelProto, generator: random.Random) -> None:
    """Insert a node between a value and one of its readers."""
    graph = generator.choice(graphs(model))
    index = generator.randrange(len(graph.node))
    reader = graph.node[index]
    slot = generator.randrange(len(reader.input))
    others = [name for node in graph.node for name in (*node.input, *node.output)]
    inputs = [reader.input[slot], *generator.sample(others, generator.choice((0, 0, 1, 2)))]
    node = helper.make_node(generator.choice(OPERATORS), inputs, [f"between{generator.randrange(10**6)}"])
    reader.input[slot] = node.output[0]
    graph.node.insert(index, node)


@_meant
def attribute(model: ModelProto, generator: random.Random) -> None:
    """Change an attribute of a node: to an extreme value or another type, double it, or remove it."""
    node = generator.choice([node for node in nodes(model) if node.attribute])
    index = generator.randrange(len(node.attribute))
    found = node.attribute[index]
    match generator.randrange(6):
        case 0:
            del node.attribute[index]
        case 1:
            node.attribute.append(found)
        case 2:
            found.type = generator.choice(AttributeProto.AttributeType.values())
        case 3:
            found.i = generator.choice(INTEGERS)
        case 4:
            found.ints[generator.randrange(len(found.ints))] = generator.choice(INTEGERS)
        case 5:
            found.name = generator.choice(("axis", "perm", "pads", "to", "mode", "body", "epsilon", ""))


@_meant
def add_attribute(model: ModelProto, generator: random.Random) -> None:
    """Add an attribute that other operators have."""
    name = generator.choice(
        ("axis", "axes", "perm", "pads", "strides", "dilations", "group", "kernel_shape", "keepdims", "to", "mode",
         "alpha", "epsilon", "transA", "hidden_size", "direction", "auto_pad", "ceil_mode", "training_mode")
    )  # fmt: skip
    value = generator.choice(
        (
            generator.choice(INTEGERS),
            generator.choice(FLOATS),
            generator.choice(TEXTS),
            [generator.choice(INTEGERS)] * 4,
        )
    )
    generator.choice(nodes(model)).attribute.append(helper.make_attribute(name, value))


@_meant
def order(model: ModelProto, generator: random.Random) -> None:
    """Change the order of the nodes of a graph."""
    graph = generator.choice(graphs(model))
    nodes = [copy(node) for node in graph.node]
    generator.shuffle(nodes)
    graph.ClearField("node")
    graph.node.extend(nodes)


@_meant
def ports(model: ModelProto, generator: random.Random) -> None:
    """Add or remove an input or output of the graph."""
    graph = model.graph
    names = [name for node in graph.node for name in (*node.input, *node.output)]
    match generator.randrange(5):
        case 0:
            generator.choice(graph.output).name = generator.choice(names)
        case 1:
            generator.choice(graph.input).name = generator.choice(names)
        case 2:
            del graph.output[generator.randrange(len(graph.output))]
        case 3:
            graph.output.add().name = generator.choice(names)
        case 4:
            tensor = generator.choice(graph.initializer)
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


@_meant
def depth(model: ModelProto, generator: random.Random) -> None:
    """Move the graph into nested branches of If nodes."""
    graph = model.graph
    inner = GraphProto()
    inner.node.extend(graph.node)
    inner.output.extend(graph.output)
    inner.name = "deep"
    outputs = [value.name for value in graph.output]
    for level in range(generator.choice((1, 2, 5, 10, 20, 30))):
        renamed = GraphProto()
        renamed.CopyFrom(inner)
        node = helper.make_node("If", ["condition"], outputs, name=f"deep{level}")
        node.attribute.append(helper.make_attribute("then_branch", renamed))
        node.attribute.append(helper.make_attribute("else_branch", renamed if level < 3 else GraphProto()))
        inner = GraphProto(name="deep")
        inner.node.append(node)
        inner.output.extend(graph.output)
    graph.ClearField("node")
    graph.node.extend(inner.node)
    graph.initializer.append(helper.make_tensor("condition", TensorProto.BOOL, [], [True]))


@_meant
def versions(model: ModelProto, generator: random.Random) -> None:
    """Change the opset, the IR version or an import."""
    match generator.randrange(4):
        case 0:
            generator.choice(model.opset_import).version = generator.choice((*range(1, 28), *INTEGERS))
        case 1:
            model.ir_version = generator.choice((*range(1, 15), 2**31))
        case 2:
            model.opset_import.append(helper.make_opsetid(generator.choice(("", "ai.onnx", "ai.onnx.ml", "own")), 3))
        case 3:
            generator.choice(nodes(model)).domain = generator.choice(TEXTS)


@_meant
def external(model: ModelProto, generator: random.Random) -> None:
    """Change the location of external data, or add one to a tensor without."""
    tensor = generator.choice(_tensors(model))
    tensor.data_location = TensorProto.EXTERNAL
    if not tensor.external_data:
        onnx.external_data_helper.set_external_data(tensor, "weights.bin", 0, 16) if tensor.HasField(
            "raw_data"
        ) else None
    entry = generator.choice(tensor.external_data) if tensor.external_data else tensor.external_data.add()
    match generator.randrange(4):
        case 0:
            entry.key = generator.choice(("location", "offset", "length", "checksum", "", "other"))
        case 1:
            entry.value = str(generator.choice(INTEGERS))
        case 2:
            entry.value = generator.choice(
                ("weights.bin", "./weights.bin", "a/../weights.bin", "../weights.bin", "/etc/hostname", "", ".", "pipe",
                 "link", "a\0b", "folder", "1e3", "0x10", " 4", "-4", "9" * 30, "\u0664")
            )  # fmt: skip
        case 3:
            tensor.ClearField("raw_data")


@_meant
def tensor_data(model: ModelProto, generator: random.Random) -> None:
    """Change the data of a tensor: longer, shorter, other values, in two fields."""
    tensor = generator.choice(_tensors(model))
    if generator.random() < 0.3:
        tensor.float_data.append(1.0)
    else:
        tensor.raw_data = other_data(tensor.raw_data, generator)


@_meant
def splice(model: ModelProto, generator: random.Random) -> None:
    """Copy a node of one graph into another."""
    found = graphs(model)
    source, target = generator.choice(found), generator.choice(found)
    node = copy(generator.choice(source.node))
    target.node.insert(generator.randrange(len(target.node) + 1), node)


@_meant
def functions(model: ModelProto, generator: random.Random) -> None:
    """Add a function that shadows an operator, calls itself, or is defined twice."""
    node = generator.choice(model.graph.node)
    function = onnx.FunctionProto(name=node.op_type, domain=node.domain)
    function.input.extend(f"in{index}" for index in range(len(node.input)))
    function.output.extend(f"out{index}" for index in range(len(node.output)))
    inner = generator.choice(("Identity", node.op_type, "Relu"))
    function.node.append(helper.make_node(inner, function.input[:1], function.output[:1], domain=node.domain))
    function.opset_import.extend(model.opset_import)
    model.functions.append(function)
    model.ir_version = max(model.ir_version, 8) if generator.random() < 0.5 else model.ir_version
