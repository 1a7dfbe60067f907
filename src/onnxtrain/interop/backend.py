"""The ONNX Backend API: run any model, training operators included, on stock ONNX Runtime.

The path is the usual one: Gradient nodes become the nodes that compute them, optimizers their bodies, and ONNX Runtime
runs the result.

A model may declare a newer opset or IR version than ONNX Runtime accepts. Where none of its operators has changed since
the newest accepted opset (same text and parameters; new element types do not count, as the runtime rejects them
itself), that opset is declared instead. Likewise for the IR version.

Example:
    >>> import numpy as np, onnx
    >>> node = onnx.helper.make_node(
    ...     "Adagrad", ["R", "T", "X", "G", "H"], ["X_new", "H_new"], domain="ai.onnx.preview.training", epsilon=0.0
    ... )
    >>> one = np.ones(1)
    >>> run_node(node, [np.float64(0.5), np.int64(0), one, 2 * one, 0 * one])
    (array([0.5]), array([4.]))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from onnxtrain.errors import ModelError, OnnxTrainError, OptionError
from onnxtrain.graph.domains import TRAINING_DOMAIN, is_default_domain
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.model_file import validity
from onnxtrain.model_file.external import with_external_data
from onnxtrain.model_file.proto import all_tensors
from onnxtrain.model_file.upgrade import upgrade_opset
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session

GRADIENT_OPSET = 18
"""First opset that the gradient rules are written for."""


class OnnxTrainBackendRep(BackendRep):
    """A model that is ready to run many times."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model.

        Args:
            inputs: One array per input in the order of the graph, a mapping by name, or, for a single input, the
                array itself.
            **kwargs: Part of the interface; ignored.

        Returns:
            The outputs in the order of the graph.
        """
        names = [value.name for value in self._session.get_inputs()]
        if isinstance(inputs, dict):
            feeds = dict(inputs)
        else:
            given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
            if len(given) > len(names):
                raise OptionError(
                    f"The model has {len(names)} inputs, but {len(given)} arrays came; give one each."
                ).about(got=len(given), wanted=len(names))
            feeds = dict(zip(names, given, strict=False))
        arrays = {name: np.asarray(item) if isinstance(item, np.generic) else item for name, item in feeds.items()}
        return tuple(self._session.run(None, arrays))


class OnnxTrainBackend(Backend):
    """The backend, as :class:`onnx.backend.base.Backend` specifies it."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return whether the model can be prepared."""
        try:
            cls.prepare(model, device, **kwargs)
        except (OnnxTrainError, onnx.checker.ValidationError):
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> OnnxTrainBackendRep:
        """Lower a model to standard operators and open a session for it.

        Args:
            model: Any model.
            device: "CPU", or a device for which this onnxruntime has a provider.
            **kwargs: Fields of :class:`onnxtrain.runtime.options.RuntimeOptions`: ``threads=1``.

        Raises:
            OnnxTrainError: The model cannot be lowered or run; the message names the operator.
            onnx.checker.ValidationError: It is not valid ONNX.
        """
        super().prepare(model, device, **kwargs)
        return cls._prepare(model, device, **kwargs)

    @classmethod
    def _prepare(cls, model: onnx.ModelProto, device: str, **kwargs: Any) -> OnnxTrainBackendRep:
        """Prepare a model without ONNX's checker, which rejects outputs without types."""
        if not cls.supports_device(device):
            raise OptionError(f"There is no provider for the device {device!r} in this onnxruntime; use 'CPU'.").about(
                "device", got=device
            )
        model = _runnable(model)
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in all_tensors(model)):
            model = with_external_data(_copy(model), "")  # relative to the working directory, as the runtime has it
        working = ir.from_proto(model)
        lower_graph(working)
        options = RuntimeOptions(providers=[_PROVIDERS[device.partition(":")[0]]], **kwargs)
        return OnnxTrainBackendRep(create_session(working, options))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Prepare a model and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Sequence[Any],
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node.

        Args:
            node: The node; omitted inputs have empty names.
            inputs: One array for each input with a name.
            device: As in :meth:`prepare`.
            outputs_info: Type and shape of each output; not used.
            **kwargs: As in :meth:`prepare`, and ``opset_version`` of ONNX's own operators.
        """
        opset = int(kwargs.pop("opset_version", None) or validity.newest_opset())
        names = list(dict.fromkeys(name for name in node.input if name))
        if len(names) != len(inputs):
            raise OptionError(
                f"{node.op_type} has {len(names)} inputs, but {len(inputs)} arrays came; give one each."
            ).about(node.op_type, got=len(inputs), wanted=len(names))
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, map(np.asarray, inputs), strict=True)
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        imports = {"": opset, node.domain: opset if not node.domain else 1}
        model = helper.make_model(
            helper.make_graph([node], "node", infos, outputs),
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in imports.items()],
            ir_version=validity.newest_ir_version(),
        )
        return cls._prepare(model, device, **kwargs).run(list(inputs))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether this onnxruntime has a provider for a device ("CPU", "CUDA", "CUDA:1")."""
        import onnxruntime

        return _PROVIDERS.get(device.partition(":")[0]) in onnxruntime.get_available_providers()


_PROVIDERS = {"CPU": "CPUExecutionProvider", "CUDA": "CUDAExecutionProvider"}


def _runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model to versions that the gradient rules and ONNX Runtime accept; returns it if it has them."""
    declared = _opset(model)
    if declared is not None and not validity.supports_opset(max(declared, validity.MINIMUM_OPSET)):
        model = _declared_older(model, declared)
    if not validity.supports_ir_version(max(model.ir_version, validity.MINIMUM_IR_VERSION)):
        model = _copy(model)
        model.ir_version = validity.newest_ir_version()
    if any(node.domain == TRAINING_DOMAIN and node.op_type == "Gradient" for node in model.graph.node):
        return upgrade_opset(model, GRADIENT_OPSET)
    return model


def _declared_older(model: onnx.ModelProto, declared: int) -> onnx.ModelProto:
    newest = validity.newest_opset()
    for node in _nodes(model):
        if is_default_domain(node.domain) and _meaning(node, declared) != _meaning(node, newest):
            raise ModelError(
                f"The model declares opset {declared}, where {node.op_type} differs from opset {newest}, the "
                "newest that ONNX Runtime supports; export the model at that one."
            ).about(node.op_type, got=declared, wanted=newest)
    model = _copy(model)
    for function in (model, *model.functions):
        for entry in function.opset_import:
            if is_default_domain(entry.domain):
                entry.version = min(entry.version, newest)
    return model


def _meaning(node: onnx.NodeProto, opset: int) -> tuple[Any, ...] | None:
    """Return the specification of an operator without the element types that it supports."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    attributes = {
        name: (attribute.type, attribute.required, attribute.default_value.SerializeToString())
        for name, attribute in schema.attributes.items()
    }
    parameters = [(item.name, item.option, item.type_str) for item in (*schema.inputs, *schema.outputs)]
    return schema.doc, attributes, parameters


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    pending = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while pending:
        node = pending.pop()
        yield node
        for attribute in node.attribute:
            pending.extend(inner for graph in (attribute.g, *attribute.graphs) for inner in graph.node)


def _opset(model: onnx.ModelProto) -> int | None:
    return next((entry.version for entry in model.opset_import if is_default_domain(entry.domain)), None)


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


is_compatible = OnnxTrainBackend.is_compatible
prepare = OnnxTrainBackend.prepare
run_model = OnnxTrainBackend.run_model
run_node = OnnxTrainBackend.run_node
supports_device = OnnxTrainBackend.supports_device
