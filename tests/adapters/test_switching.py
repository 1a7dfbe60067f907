"""One model with slots for several adapters, and predicting with an adapter beside the model's file."""

import numpy as np
import pytest

import onnxtrain
from adapters.test_adapter_files import run, session, trained
from adapters.test_half_bases import base
from adapters.test_half_bases import data as rows
from adapters.test_heads import outputs
from adapters.test_heads import trained as with_head
from onnxtrain import Lora
from onnxtrain.adapters import add_slots, merge_adapter
from onnxtrain.errors import ModelError
from sentences import raises_sentence
from zoo.decoder import batch, decoder

KINDS = {
    "low": {"rank": 1, "targets": "*.q_proj"},
    "high": {"rank": 5, "targets": "*.{k,o}_proj"},
    "magnitudes": {"rank": 2, "targets": "*.{q,down}_proj", "dora": True},
    "embeddings": {"rank": 2, "targets": ["embed_tokens", "up_proj"]},
}
"""Adapters of one model that differ in layers, ranks and kinds."""


def merged(model, adapter, path, x):
    merge_adapter(model, adapter, path)
    return onnxtrain.predict(path, x)


@pytest.mark.parametrize("packed", [False, True])
def test_a_session_switches_between_adapters_of_different_layers_ranks_and_kinds(tmp_path, packed):
    model, (x, _) = decoder(packed=packed), batch()
    paths = [tmp_path / f"{name}.onnx_adapter" for name in KINDS]
    for path, settings in zip(paths, KINDS.values(), strict=True):
        trained(model, **settings).save(path)
    names = add_slots(model, tmp_path / "slots.onnx", adapter=paths)
    assert len(names) == len(set(names)) == 11  # of two layers each q, k, o, up, down, and the embedding
    opened = session(tmp_path / "slots.onnx")
    plain = session(model).run(None, {"input_ids": x})[0]
    found = []
    for path in [*paths, *reversed(paths)]:
        found.append(run(opened, x, path))
        expected = merged(model, path, tmp_path / "merged.onnx", x)
        np.testing.assert_allclose(found[-1], expected, atol=1e-5)
        np.testing.assert_allclose(run(opened, x), plain, atol=1e-6)
    for index, one in enumerate(found[: len(paths)]):
        assert all(np.abs(one - other).max() > 1e-3 for other in [plain, *found[:index]])


def test_heads_that_were_trained_beside_adapters_are_switched_too(tmp_path):
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    x = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    first, second = tmp_path / "first.onnx_adapter", tmp_path / "second.onnx_adapter"
    with_head(model, train="layer3.bias").save(first)
    with_head(model, train="layer3.weight", targets=("layer1",)).save(second)
    add_slots(model, tmp_path / "slots.onnx", adapter=[first, second])
    for path in (first, second, first):
        found = outputs(tmp_path / "slots.onnx", x, path)
        np.testing.assert_allclose(found, merged(model, path, tmp_path / "merged.onnx", x), atol=1e-5)
    np.testing.assert_allclose(outputs(tmp_path / "slots.onnx", x), onnxtrain.predict(model, x), atol=1e-6)


def test_adapters_without_common_slots_are_refused(tmp_path):
    model = decoder(packed=True)
    trained(model, targets="*.q_proj").save(tmp_path / "part.onnx_adapter")
    with raises_sentence("no_adapters"):
        add_slots(model, tmp_path / "slots.onnx", adapter=[])
    other = decoder(seed=5)
    trained(other, targets="*.down_proj").save(tmp_path / "other.onnx_adapter")
    with pytest.raises(ModelError, match=r"other.onnx_adapter"):
        add_slots(
            model, tmp_path / "slots.onnx", adapter=[tmp_path / "part.onnx_adapter", tmp_path / "other.onnx_adapter"]
        )
    assert not (tmp_path / "slots.onnx").exists()


@pytest.mark.parametrize("name", KINDS)
def test_predictions_and_measures_are_those_of_the_merged_model(tmp_path, name):
    model, (x, y) = decoder(), batch()
    learner = trained(model, **KINDS[name])
    learner.save(tmp_path / "tuned.onnx_adapter")
    learner.save(tmp_path / "peft")
    expected = merged(model, tmp_path / "tuned.onnx_adapter", tmp_path / "merged.onnx", x)
    loss = onnxtrain.evaluate(tmp_path / "merged.onnx", (x, y), loss="softmax_cross_entropy")["loss"]
    for adapter in (tmp_path / "tuned.onnx_adapter", tmp_path / "peft"):
        lora = Lora(adapter=adapter)
        np.testing.assert_allclose(onnxtrain.predict(model, x, lora=lora), expected, atol=1e-5)
        found = onnxtrain.evaluate(model, (x, y), loss="softmax_cross_entropy", lora=lora)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert np.abs(onnxtrain.predict(model, x) - expected).max() > 1e-3


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_predictions_of_16_bits_with_a_head(tmp_path, kind):
    x, y = rows()
    model = base(kind)
    learner = onnxtrain.Trainer(
        model,
        loss="mean_squared_error",
        optimizer=onnxtrain.SGD(0.1),
        lora=Lora(rank=3, targets=["q_proj"]),
        train="v_proj.weight",
    )
    before = learner.predict(x)
    for _ in range(10):
        learner.train_step(x, y)
    learner.save(tmp_path / "tuned.onnx_adapter")
    expected, lora = learner.predict(x), Lora(adapter=tmp_path / "tuned.onnx_adapter")
    found = onnxtrain.predict(model, x, lora=lora)
    assert found.dtype.name == kind  # the type of the model's output, as without an adapter
    near = {"rtol": 2**-6 if kind == "bfloat16" else 2**-9, "atol": 1e-2}
    np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), **near)
    assert np.abs(found.astype(np.float32) - before.astype(np.float32)).max() > 0.05
    measured = onnxtrain.evaluate(model, (x, y), loss="mean_squared_error", lora=lora)
    assert measured["loss"] == pytest.approx(learner.evaluate((x, y))["loss"], rel=2e-2)


def test_an_adapter_that_was_not_trained_is_no_adapter_to_use(tmp_path):
    model, (x, y) = decoder(), batch()
    for call in (
        lambda: onnxtrain.predict(model, x, lora=Lora(rank=2)),
        lambda: onnxtrain.evaluate(model, (x, y), loss="softmax_cross_entropy", lora=Lora(rank=2)),
    ):
        with raises_sentence("lora_without_adapter", what="lora"):
            call()
