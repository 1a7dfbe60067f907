"""Check the bodies of If, Loop and Scan against their nodes; ONNX's checker looks at each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper

from onnxtrain.errors import ModelError
from onnxtrain.ir.domains import is_default_domain
from onnxtrain.model_file.skeleton import proto_subgraphs


def check_bodies(label: str, proto: ModelProto) -> None:
    """Check the bodies of a model that ONNX's checker took.

    Raises:
        ModelError: A body has another number of inputs or outputs than its node needs.
    """
    for holder in (proto.graph, *proto.functions):
        for node in _nodes(holder):
            wrong = _misfit(node) if _is_control_flow(node) else None
            if wrong is not None:
                named = f"{node.op_type} node {node.name!r}" if node.name else f"{node.op_type} node"
                given = f" (output {node.output[0]!r})" if node.output else ""
                raise ModelError(f"{label} has the {named}{given}, {wrong}; export it again.")


def _nodes(holder: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    for node in holder.node:
        yield node
        for body in proto_subgraphs(node):
            yield from _nodes(body)


def _is_control_flow(node: NodeProto) -> bool:
    return is_default_domain(node.domain) and node.op_type in _MISFITS


def _misfit(node: NodeProto) -> str | None:
    """Return the mismatch of a node, as the end of a sentence after its name, or None."""
    given = {attribute.name for attribute in node.attribute}
    missing = [name for name in _REQUIRED[node.op_type] if name not in given]  # the checker looks into no function
    return f"which has no attribute {missing[0]!r}" if missing else next(_MISFITS[node.op_type](node), None)


def _body(node: NodeProto, name: str) -> GraphProto:
    found: GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == name)
    return found


def _of_if(node: NodeProto) -> Iterator[str]:
    for name in ("then_branch", "else_branch"):
        body = _body(node, name)
        if len(body.output) != len(node.output):
            yield f"whose {name} gives {_count(body.output, 'value')} where the node gives {len(node.output)}"
        if body.input:
            yield f"whose {name} has inputs, which nobody gives it: a branch reads values of its surroundings"


def _of_loop(node: NodeProto) -> Iterator[str]:
    body, states = _body(node, "body"), max(len(node.input) - 2, 0)
    if len(body.input) != 2 + states:
        yield (
            f"whose body has {_count(body.input, 'input')} where {_states(states)} and the number and the condition "
            f"of a step make {2 + states}"
        )
    yield from _outputs(node, body, states, 1)


def _of_scan(node: NodeProto) -> Iterator[str]:
    body = _body(node, "body")
    number = next(item for item in node.attribute if item.name == "num_scan_inputs")
    if number.ref_attr_name:  # an attribute of the function that this node is in
        return
    slices = int(helper.get_attribute_value(number))
    states = len(node.input) - slices
    if slices < 1 or states < 0:
        yield f"which takes slices of {slices} inputs but has {len(node.input)}"
        return
    if len(body.input) != len(node.input):
        yield f"whose body has {_count(body.input, 'input')} where the node has {len(node.input)}"
    yield from _outputs(node, body, states, 0)


def _outputs(node: NodeProto, body: GraphProto, states: int, before: int) -> Iterator[str]:
    found = len(body.output) - before
    if found < states:
        yield f"whose body gives {_count(body.output, 'value')}, too few for {_states(states)}"
    elif len(node.output) != found:
        yield f"whose body gives {_count(body.output, 'value')} where the node gives {len(node.output)}"


def _states(count: int) -> str:
    return f"{count} state{'' if count == 1 else 's'}"


def _count(values: object, word: str) -> str:
    number = len(values)  # type: ignore[arg-type]
    return f"{number} {word}{'' if number == 1 else 's'}"


_MISFITS: dict[str, Callable[[NodeProto], Iterator[str]]] = {"If": _of_if, "Loop": _of_loop, "Scan": _of_scan}
"""Functions that describe the mismatches of a node, as the end of a sentence after its name."""

_REQUIRED = {
    "If": ("then_branch", "else_branch"),
    "Loop": ("body",),
    "Scan": ("body", "num_scan_inputs"),
}
