"""Preference losses that compute the log-probabilities of answers in chunks of tokens."""

import sys

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from losses.test_chunks import HEADS, K, V, check_memory_falls, model
from onnxtrain.losses import DPO, KTO, LOSSES, ORPO
from onnxtrain.losses.groups import GroupLoss
from plugins.text.test_group_losses import COUNTS, DESIRABLE, REFERENCE, N, T
from sentences import raises_sentence

RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2, T, K))
IDS = RNG.integers(0, V, (N, 2, T))
STARTS = np.array([[2, 2], [1, 1], [3, 3], [2, 2]])[:, :, None]
ENDS = np.array([[5, 4], [3, 5], [5, 5], [4, 5]])[:, :, None]
LABELS = np.where((np.arange(T) >= STARTS) & (np.arange(T) < ENDS), IDS, -100)
WHOLE = np.where(np.arange(T) < ENDS[:, 0], IDS[:, 0], -100)
JUDGED = np.concatenate([REFERENCE, DESIRABLE], axis=1)

DATA = {
    "dpo": ({"labels": LABELS}, REFERENCE),
    "orpo": ({"labels": LABELS, "chosen_labels": WHOLE}, COUNTS),
    "kto": ({"labels": LABELS}, JUDGED),
    "grpo": ({"labels": LABELS[:, :1]}, np.stack([np.pad(LABELS[:, 0, 1:] != -100, ((0, 0), (0, 1)))] * 4, 1) - 0.5),
}


def trained(given, name, chunk, weights=None, dtype=np.float32, **options):
    """Return the losses of two steps, the metrics and the predictions after them, and the parameters."""
    inputs, targets = DATA[name]
    inputs = {"x": X[:, : LOSSES[name].rows].astype(dtype), **inputs}
    trainer = onnxtrain.Trainer(given, loss=LOSSES[name](chunk=chunk), optimizer="sgd(lr=0.5)", **options)
    losses = [trainer.train_step(inputs, targets, weights) for _ in range(2)]
    found = trainer.evaluate(inputs, targets, batch_size=3)
    return [losses, [*found.values()], trainer.predict(inputs), *map(np.array, trainer.parameters.values())]


def assert_same(one, other, **tolerance):
    assert len(one) == len(other) > 1
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def test_losses_of_log_probabilities_have_chunks():
    with_chunk = {name for name, loss in LOSSES.items() if issubclass(loss, GroupLoss) and hasattr(loss, "chunk")}
    assert with_chunk == set(DATA)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("name", DATA)
def test_steps_are_those_of_all_logits_at_once(name, chunk):
    whole, chunks = (trained(model("bias", np.float64), name, size, dtype=np.float64) for size in (None, chunk))
    assert_same(chunks, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_heads_of_all_kinds(head):
    whole, chunks = (trained(model(head), "dpo", size, np.array([1, 0, 2, 0.5])) for size in (None, 4))
    assert_same(chunks, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"lora": onnxtrain.Lora(rank=2, targets="*")}], ids=str)
def test_micro_batches_and_adapters(options):
    whole, chunks = (trained(model("product"), "dpo", size, seed=3, **options) for size in (None, 4))
    assert_same(chunks, whole, rtol=1e-5, atol=1e-6)


def test_the_step_holds_no_logits():
    made = onnxtrain.training_model(model("product"), loss="dpo(chunk=4)", optimizer="sgd(lr=0.5)")
    step = onnxtrain.lower(made)
    assert [node.op_type for node in step.graph.node].count("Scan") == 2
    assert not [node for node in step.graph.node if "logits" in node.output]


@pytest.mark.thorough  # tests/losses/test_chunks.py does the same for a loss by tokens
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_falls():
    """All logits take 41 MB: three times as much without chunks, and little for 64 tokens at a time."""
    inputs = '{"x": np.ones((2, 2, 128, 16), np.float32), "labels": np.zeros((2, 2, 128), np.int64)}'
    check_memory_falls("dpo", f"{inputs}, np.zeros((2, 2), np.float32)")


@pytest.mark.parametrize("make", [DPO, ORPO, KTO])
def test_a_chunk_has_a_row(make):
    with raises_sentence("chunk_option", what="chunk", got=0):
        make(chunk=0)


def test_logits_of_no_linear_layer_are_refused():
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> f (int64[b, s] ids) => (float[b, s, {V}] logits)
        {{ logits = Gather(table, ids) }}"""
    )
    made.graph.initializer.append(numpy_helper.from_array(np.zeros((V, V), np.float32), "table"))
    with raises_sentence("chunk_of_other_logits", got="Gather", loss="dpo", chunk=4, operands="'table'"):
        onnxtrain.Trainer(made, loss="dpo(chunk=4)")
