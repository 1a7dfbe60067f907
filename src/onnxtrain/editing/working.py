"""Open a model for editing, and make it self-contained and valid again at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.clone import computed_from, subgraphs
from onnxtrain.graph.declared_shapes import forget_shapes
from onnxtrain.graph.passes import remove_unused
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import is_float
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.proto import drop_initializer_inputs, sort_nodes, unify_default_domain
from onnxtrain.model_file.working_copy import maps_to_tensors

Model = str | os.PathLike[str] | onnx.ModelProto
"""The type of an edit's model argument: a path or a loaded model."""


class Working:
    """A model that is being edited."""

    def __init__(self, given: Model) -> None:
        proto = ModelFile.load(given).dense().inlined()
        unify_default_domain(proto)
        drop_initializer_inputs(proto)
        maps_to_tensors(proto.graph)
        sort_nodes("The model", proto)
        self.model = ir.from_proto(proto)
        self.graph = self.model.graph
        self._declared = {value for value in _values(self.graph) if value.shape is not None}
        self._unread = {value for value in self.graph.inputs if not value.uses()}
        infer_shapes(self.model)

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators that the model imports."""
        return self.graph.opset_imports[""]

    def output(self, name: str | None) -> ir.Value:
        """Find an output by its name; by default the first floating-point one."""
        names = ", ".join(repr(value.name) for value in self.graph.outputs)
        if name is None:
            found = next((value for value in self.graph.outputs if is_float(value)), None)
            if found is None:
                raise OptionError(f"The model has no floating output ({names}); there is no layer to build on.")
            return found
        found = next((value for value in self.graph.outputs if value.name == name), None)
        if found is None:
            raise OptionError(f"output={name!r}, but the outputs are {names}.")
        return found

    def value(self, name: str, option: str = "at") -> ir.Value:
        """Find a value by its name, or by the name of the node that computes it."""
        for node in self.graph:
            for value in node.outputs:
                if value.name == name:
                    return value
        for node in self.graph:
            if node.name == name:
                given = [value for value in node.outputs if value.name]
                if len(given) > 1:
                    names = ", ".join(repr(value.name) for value in given)
                    raise OptionError(
                        f"{option}={name!r} is a {node.op_type} with {len(given)} outputs ({names}); name one."
                    )
                return given[0]
        others = [str(value.name) for node in self.graph for value in node.outputs if value.name]
        shown = ", ".join(repr(other) for other in others[-6:])
        raise OptionError(
            f"{option}={name!r} is neither a node of the model nor an output of one; the last outputs are {shown}."
        )

    def free_name(self, name: str) -> str:
        """Return this name, with a number appended if it is taken."""
        taken = {value.name for value in _values(self.graph)} | set(self.graph.initializers)
        taken |= {value.name for value in self.graph.inputs} | {node.name for node in self.graph}
        made, count = name, 1
        while any(other == made or str(other).startswith(f"{made}.") for other in taken):
            count += 1
            made = f"{name}{count}"
        return made

    def initializer(self, name: str, array: object, dtype: ir.DataType) -> ir.Value:
        """Add an initializer to the main graph."""
        value = ir.val(name, const_value=ir.tensor(array, dtype=dtype, name=name))  # type: ignore[arg-type]
        self.graph.register_initializer(value)
        return value

    def follow_from_weights(self, values: Iterable[ir.Value | None]) -> bool:
        """Return whether values depend on weights alone, not on a graph input."""
        fed = computed_from(self.graph, (value for value in self.graph.inputs if not value.is_initializer()))
        return all(value is not None and value not in fed for value in values)

    def forget_behind(self, values: Iterable[ir.Value]) -> None:
        """Forget the shapes of values and of all that is computed from them."""
        known = computed_from(self.graph, values)
        for node in dict.fromkeys(value.producer() for value in known):
            for body in () if node is None else subgraphs(node):
                forget_shapes(body)
        for value in known:
            value.shape = None

    def finish(self) -> onnx.ModelProto:
        """Return the edited model, without nodes, weights and inputs that no output needs, and without stale shapes."""
        remove_unused(self.model)
        for value in list(self.graph.inputs):
            if not value.uses() and not value.is_graph_output() and value not in self._unread:
                self.graph.inputs.remove(value)
        infer_shapes(self.model)
        for value in _values(self.graph):
            if value not in self._declared and not value.is_graph_output():
                value.type = value.shape = None
        proto = ir.to_proto(self.model)
        ModelFile.load(proto)
        return proto


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [output for node in graph for output in node.outputs]
