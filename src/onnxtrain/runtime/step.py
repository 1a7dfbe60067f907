"""Run a step graph: one onnxruntime session, its states bound as inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import DataError, StepError
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.runtime.inplace import in_place_states
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training_info.lower import StepGraph


class StepSession:
    """One entry of a training model, ready to run.

    Args:
        step: The lowered entry.
        states: The states' buffers, shared between the sessions of one training.
        options: Threads, providers, memory.
        kernels: Whether the graph holds nodes with native kernels.
    """

    def __init__(self, step: StepGraph, states: StateBuffers, options: RuntimeOptions, *, kernels: bool) -> None:
        self.step = step
        self._states = states
        graph = step.model.graph
        written = {name: new for name, new in step.states.items() if new is not None}
        in_place = in_place_states(graph, step.states)
        self.second_buffers = tuple(name for name in written if name not in in_place)
        for name in self.second_buffers:
            states.give_second_buffer(name)
        self._session = create_session(step.model, options, kernels=kernels)
        self._inputs = {str(value.name): _dtype(value) for value in graph.inputs if value.name in step.feeds}
        self._read = [str(value.name) for value in graph.inputs if value.name not in self._inputs]
        self._written = written
        self._bindings: dict[tuple[int, ...], Any] = {}
        # onnxruntime keeps what it allocated for an output, which does not fit the next batch size.
        shapes = {value.name: dimensions(value) for value in graph.outputs}
        self._varying = [name for name in step.results if not _is_static(shapes[name])]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Do the step; returns the outputs that are not states.

        Raises:
            DataError: An input is missing.
            StepError: onnxruntime failed; the message names the node and the rule that wrote it.
        """
        states = self._states
        key = tuple(map(states.turn, states.doubled))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind_states()
        for name, dtype in self._inputs.items():
            try:
                array = np.asarray(feeds[name], dtype=dtype, order="C")
            except KeyError:
                raise DataError(f"The step needs the input {name!r}; got {', '.join(feeds) or 'nothing'}.") from None
            binding.bind_cpu_input(name, array)
        for name in self._varying:
            binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise StepError(_explain(error)) from error
        states.swap(self.second_buffers)
        if not self.step.results:
            return {}
        outputs = binding.get_outputs_as_ortvaluevector()
        return {name: np.array(outputs[index].numpy()) for index, name in enumerate(self.step.results)}

    def _bind_states(self) -> Any:
        binding = self._session.io_binding()
        states = self._states
        for name in self.step.results:
            binding.bind_output(name, "cpu")
        for name in self._read:
            buffer = states[name]
            binding.bind_input(name, "cpu", 0, buffer.dtype, list(buffer.shape), buffer.ctypes.data)
        for name, new_name in self._written.items():
            turn = states.turn(name) + (name in self.second_buffers)
            buffer = states.buffer(name, turn)
            binding.bind_output(new_name, "cpu", 0, buffer.dtype, list(buffer.shape), buffer.ctypes.data)
        return binding


def create_session(model: ir.Model, options: RuntimeOptions, *, kernels: bool = False) -> Any:
    """An onnxruntime session for a working graph.

    Raises:
        StepError: onnxruntime refuses the graph.
    """
    import onnxruntime

    refuse_what_crashes(model.graph)
    settings, providers = options.session_options(kernels=kernels), options.provider_list()
    keep_alive = _pass_large_tensors(model, settings)
    try:
        proto = ir.to_proto(model)
        # Without this onnxruntime removes a Dropout whose mask nobody reads, also in training mode.
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(),
            settings,
            providers,
            disabled_optimizers=["EliminateDropout"],
        )
    except (RuntimeError, ValueError) as error:
        raise StepError(_explain(error)) from error
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            raise StepError(_explain(error)) from error
        raise
    finally:
        for value, tensor in keep_alive:
            value.const_value = tensor
    session._onnxtrain_tensors = keep_alive  # onnxruntime reads their memory as long as the session lives
    return session


def refuse_what_crashes(graph: ir.Graph) -> None:
    """Refuse nodes on which onnxruntime does not fail but takes the process with it.

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


_LARGE = 1 << 20


def _pass_large_tensors(model: ir.Model, settings: Any) -> list[tuple[ir.Value, Any]]:
    """Hand large frozen tensors over by address instead of inside the model's bytes (2 GiB at most).

    In the model they become external data that is never read.
    """
    import onnxruntime

    passed: list[tuple[ir.Value, Any]] = []
    names, values = [], []
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _LARGE or tensor.dtype == ir.DataType.STRING:
            continue
        array = np.ascontiguousarray(tensor.numpy())
        if array.dtype.kind not in "fiub":
            continue
        names.append(name)
        values.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
        stub = ir.ExternalTensor(
            "onnxtrain", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(array.shape), name=name, base_dir=""
        )
        passed.append((value, tensor))
        value.const_value = stub
    if names:
        settings.add_external_initializers(names, values)
        settings._onnxtrain_values = values
    return passed


def _is_static(shape: tuple[Dimension, ...] | None) -> bool:
    return shape is not None and all(isinstance(size, int) for size in shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    assert value.dtype is not None
    return value.dtype.numpy()


def _explain(error: Exception) -> str:
    """One sentence out of an onnxruntime exception: the node and its operator, then the reason."""
    text = " ".join(str(error).split())
    found = re.search(r"running (\w+) node\. Name:'([^']*)'(?: Status Message:)? ?(.*)", text)
    if found:
        operator, name, reason = found.groups()
        return f"ONNX Runtime failed in the {operator} node {name!r}: {reason or text}"
    return f"ONNX Runtime refused the graph or a step: {text}"
