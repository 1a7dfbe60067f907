"""Patterns match module names even where an exporter has merged their tensors."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import TrainingHint
from sentences import warns_sentence

NAMES = [f"blocks.{block}.norm.{word}" for block in range(3) for word in ("weight", "bias")]


def _model(*, newer: bool) -> onnx.ModelProto:
    """Build three normalization blocks with untrained scales and biases merged by an exporter, and a head."""
    make = onnx.helper.make_node
    nodes = []
    for block in range(3):
        before, after = ("x", "a", "b")[block], ("a", "b", "c")[block]
        name = f"norm_{block}" if newer else f"/blocks.{block}/norm/LayerNormalization"
        inputs = [before, "blocks.0.norm.weight", "blocks.0.norm.bias"]
        node = make("LayerNormalization", inputs, [after], name=name)
        if newer:
            entry = node.metadata_props.add()
            entry.key = "pkg.torch.onnx.name_scopes"
            entry.value = repr(["", "blocks", f"blocks.{block}", f"blocks.{block}.norm", "layer_norm"])
        nodes.append(node)
    nodes.append(make("MatMul", ["c", "head.weight"], ["y"], name="/head/MatMul"))
    weights = {
        "blocks.0.norm.weight": np.ones(4, np.float32),
        "blocks.0.norm.bias": np.zeros(4, np.float32),
        "head.weight": np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32),
    }
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 4])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", 2])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 18)])


def _trainer(model: onnx.ModelProto, **options: object) -> onnxtrain.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingHint)
        return onnxtrain.Trainer(model, loss="mean_squared_error", **options)


@pytest.mark.parametrize("newer", [True, False])
def test_a_copy_is_named_after_its_module(newer: bool) -> None:
    model = _model(newer=newer)
    assert set(_trainer(model, untie=True).parameters) == {*NAMES, "head.weight"}
    kept = _trainer(model, untie=True, freeze="*.bias").parameters
    assert set(kept) == {name for name in (*NAMES, "head.weight") if not name.endswith("bias")}
    one = _trainer(model, untie=True, freeze="blocks.0.*").parameters
    assert set(one) == {name for name in (*NAMES, "head.weight") if not name.startswith("blocks.0.")}


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("blocks.0.*", "blocks.0.norm.weight"),
        ("blocks.1.*", "blocks.1.norm.weight"),
        ("*.2.norm.bias", "blocks.2.norm.bias"),
    ],
)
def test_a_pattern_of_some_modules_of_a_merged_tensor_gets_a_hint(pattern: str, name: str, newer: bool) -> None:
    with warns_sentence("pattern_matches_shared", option="freeze", name=name):
        trainer = onnxtrain.Trainer(_model(newer=newer), loss="mean_squared_error", freeze=pattern)
    assert "blocks.0.norm.bias" not in trainer.parameters


def test_a_pattern_of_all_modules_of_a_merged_tensor_gets_no_hint() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onnxtrain.Trainer(_model(newer=True), loss="mean_squared_error", freeze="*.norm.*")
    assert not [warning for warning in caught if "but the file holds it" in str(warning.message)]


def test_a_copy_of_an_unknown_module_has_its_number_before_its_last_word() -> None:
    model = _model(newer=False)
    for node in model.graph.node:
        node.name = ""
    trainer = _trainer(model, untie=True, freeze="*.bias")
    assert set(trainer.parameters) == {
        "head.weight",
        "blocks.0.norm.weight",
        "blocks.0.norm_2.weight",
        "blocks.0.norm_3.weight",
    }
