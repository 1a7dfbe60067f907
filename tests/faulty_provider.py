"""An execution provider with errors: the CPU's, which runs another graph than the given one."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain.errors import StepError
from onnxtrain.plugins.provider_check import provider_check
from onnxtrain.runtime.options import RuntimeOptions


def add_faulty_provider(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], set[str]]:
    """Let there be a provider "faulty" for :func:`onnxtrain.plugins.provider_check.provider_check.check_provider`.

    Returns:
        The operators that it takes for others, and those that it refuses; both empty at first.
    """
    available = ["FaultyExecutionProvider", *onnxruntime.get_available_providers()]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    create, mistaken, refused = provider_check.create_session, dict[str, str](), set[str]()

    def create_faulty(model: ir.Model, options: RuntimeOptions):
        if options.providers[0] != "faulty":
            return create(model, options)
        for node in model.graph:
            if node.op_type in refused:
                raise StepError(f"no kernel for {node.op_type}")
            node.op_type = mistaken.get(node.op_type, node.op_type)
        return create(model, RuntimeOptions(threads=1, kernels=False))

    monkeypatch.setattr(provider_check, "create_session", create_faulty)
    return mistaken, refused
