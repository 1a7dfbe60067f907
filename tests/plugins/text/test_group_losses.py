"""Losses on groups of rows: their formulas in NumPy with gradients, their batches, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import onnxtrain
from distributed.threads import in_threads
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import DPO, LOSSES, MultipleNegatives, Reward
from onnxtrain.losses.groups import GroupLoss
from sentences import raises_sentence

RANDOM = np.random.default_rng(0)
N, T, V, F = 4, 5, 6, 3
IDS = RANDOM.integers(0, V, (N, 2, T))
STARTS = np.array([[2, 2], [1, 1], [3, 3], [2, 2]])[:, :, None]
ENDS = np.array([[5, 4], [3, 5], [5, 5], [4, 5]])[:, :, None]
LABELS = np.where((np.arange(T) >= STARTS) & (np.arange(T) < ENDS), IDS, -100)
WHOLE = np.where(np.arange(T) < ENDS[:, 0], IDS[:, 0], -100)
MASK = (np.arange(T) < ENDS).astype(np.int64)
REFERENCE = RANDOM.normal(size=(N, 2)).astype(np.float32) - 4
DESIRABLE = np.array([[1], [0], [0], [1]], np.float32)
FEATURES = RANDOM.normal(size=(N, 3, F)).astype(np.float32)
RELEVANCE = np.array([[1, 0, 0], [0, 2, 1], [0, 1, -1], [3, 3, 0]], np.float32)
WEIGHTS = np.array([1, 0, 2, 0.5], np.float32)

Data = tuple[dict[str, np.ndarray], np.ndarray]


def language_model() -> onnx.ModelProto:
    words = ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(size=V * V))
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (int64[n, t] input_ids) => (float[n, t, {V}] logits) <float[{V}, {V}] w = {{{words}}}>
        {{ logits = Gather(w, input_ids) }}""")


def scorer(columns: int = 1) -> onnx.ModelProto:
    values = ", ".join(f"{value:.3f}" for value in np.random.default_rng(2).normal(size=F * columns))
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, {F}] x) => (float[n, {columns}] y) <float[{F}, {columns}] w = {{{values}}}>
        {{ y = MatMul(x, w) }}""")


def log_softmax(x: np.ndarray) -> np.ndarray:
    top = x - x.max(-1, keepdims=True)
    return top - np.log(np.exp(top).sum(-1, keepdims=True))


def answers(w: np.ndarray, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Log-probabilities [..., T - 1] of labels by the token before; 0 where ignored."""
    table = log_softmax(w)
    counted = labels[..., 1:] != -100
    return np.where(counted, table[ids[..., :-1], np.where(counted, labels[..., 1:], 0)], 0)


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.log1p(np.exp(-x))


def dpo(w, weights, beta=0.1):
    ratio = answers(w, IDS, LABELS).sum(-1) - REFERENCE
    return (weights * -log_sigmoid(beta * (ratio[:, 0] - ratio[:, 1]))).mean()


def orpo(w, weights, beta=0.1):
    counts = (LABELS[..., 1:] != -100).sum(-1)
    a, b = (answers(w, IDS, LABELS).sum(-1) / counts).T
    odds = (a - b) - (np.log1p(-np.exp(a)) - np.log1p(-np.exp(b)))
    likelihood = -answers(w, IDS[:, 0], WHOLE).sum(-1)
    return (weights * likelihood).sum() / (WHOLE[:, 1:] != -100).sum() - beta * (weights * log_sigmoid(odds)).mean()


def kto(w, weights, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, at=None):
    ratio = answers(w, IDS, LABELS).sum(-1) - REFERENCE
    fixed = ratio if at is None else answers(at, IDS, LABELS).sum(-1) - REFERENCE  # the divergence has no gradient
    divergence = max(0.0, fixed[:, 1].mean())
    yes = DESIRABLE[:, 0]
    value = 1 / (1 + np.exp(-beta * (2 * yes - 1) * (ratio[:, 0] - divergence)))
    return (weights * (yes * desirable_weight + (1 - yes) * undesirable_weight) * (1 - value)).mean()


MARGIN = np.array([0.0, 0.5, 1.0, 0.0], np.float32)


def reward(w, weights, center=0.0):
    chosen, rejected = (FEATURES[:, :2] @ w)[..., 0].T
    return (weights * (-log_sigmoid(chosen - rejected - MARGIN) + center * (chosen + rejected) ** 2)).mean()


QUERIES = np.array([0, 1, 2, 1])
"""The second and the last example have the same query."""


def multiple_negatives(w, weights, scale=20.0, pooling=None):
    z = FEATURES @ w
    z = z / np.linalg.norm(z, axis=-1, keepdims=True)
    documents = np.concatenate([z[:, 1], z[:, 2]])
    similarity = scale * z[:, 0] @ documents.T
    same = (QUERIES[:, None] == QUERIES) & ~np.eye(N, dtype=bool)
    log_p = log_softmax(np.where(np.tile(same, 2), -1e9, similarity))
    return (weights * -np.diagonal(log_p[:, :N])).mean()


def listnet(w, weights):
    absent = np.where(RELEVANCE < 0, 1e9, 0)
    wanted = np.exp(log_softmax(RELEVANCE - absent))
    return (weights * -(wanted * log_softmax((FEATURES @ w)[..., 0] - absent)).sum(-1)).mean()


def ranknet(w, weights):
    s, total, count = (FEATURES @ w)[..., 0], 0.0, 0
    for query in range(N):
        for a in range(3):
            for b in range(3):
                if RELEVANCE[query, a] > RELEVANCE[query, b] >= 0:
                    total += weights[query] * -log_sigmoid(s[query, a] - s[query, b])
                    count += 1
    return total / count


SAMPLED = (LABELS[:, 0, 1:] != -100).astype(np.float32)
ADVANTAGES = np.array([[1.5], [-0.7], [0.4], [-1.2]], np.float32) * SAMPLED
OLD = np.where(np.arange(N)[:, None] == 3, 1, RANDOM.normal(size=(N, T - 1)) / 2 - 2).astype(np.float32)
"""The log-probabilities of the last answer are those of the step itself."""
BEFORE = (RANDOM.normal(size=(N, T - 1)) / 2 - 2).astype(np.float32)


def grpo(w, weights, beta=0.0, epsilon=0.2, temperature=1.0, loss_type="dapo", at=None):
    p, fixed = (answers(each / temperature, IDS[:, 0], LABELS[:, 0]) for each in (w, w if at is None else at))
    ratio = np.exp(p - np.where(OLD > 0, fixed, OLD))
    terms = -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 1 - epsilon, 1 + epsilon) * ADVANTAGES)
    terms = (terms + beta * (np.exp(BEFORE - p) - (BEFORE - p) - 1)) * SAMPLED
    if loss_type == "grpo":
        return (weights * terms.sum(1) / SAMPLED.sum(1)).mean()
    return (weights * terms.sum(1)).sum() / SAMPLED.sum()


TOKENS = {"input_ids": IDS, "labels": LABELS}
COUNTS = np.concatenate([(LABELS[..., 1:] != -100).sum(-1), (WHOLE[:, 1:] != -100).sum(-1)[:, None]], axis=1).astype(
    np.float32
)

CASES: dict[str, tuple[Callable[[], onnx.ModelProto], Data, Callable[..., Any], list[dict[str, Any]]]] = {
    "dpo": (language_model, (TOKENS, REFERENCE), dpo, [{"beta": 0.7}]),
    "orpo": (language_model, ({**TOKENS, "chosen_labels": WHOLE}, COUNTS), orpo, [{"beta": 0.7}]),
    "kto": (
        language_model,
        (TOKENS, np.concatenate([REFERENCE, DESIRABLE], axis=1)),
        kto,
        [{"beta": 0.7}, {"desirable_weight": 2.0}, {"undesirable_weight": 0.3}],
    ),
    "reward": (scorer, ({"x": FEATURES[:, :2]}, MARGIN), reward, [{"center": 0.1}]),
    "multiple_negatives": (lambda: scorer(2), ({"x": FEATURES}, QUERIES), multiple_negatives, [{"scale": 3.0}]),
    "grpo": (
        language_model,
        (
            {"input_ids": IDS[:, :1], "labels": LABELS[:, :1]},
            np.pad(np.stack([SAMPLED, ADVANTAGES, OLD, BEFORE], 1), ((0, 0), (0, 0), (0, 1))),
        ),
        grpo,
        [{"beta": 0.7}, {"epsilon": 0.6}, {"temperature": 0.5}, {"loss_type": "grpo"}],
    ),
    "listnet": (scorer, ({"x": FEATURES}, RELEVANCE), listnet, []),
    "ranknet": (scorer, ({"x": FEATURES}, RELEVANCE), ranknet, []),
}
GROUPS = [name for name, loss in LOSSES.items() if issubclass(loss, GroupLoss)]
NOT_TRIED = {"weight", "reduction", "pooling", "chunk"}
"""Those of all losses are in the tests by batch; pooling is below, chunk in test_preference_chunks.py."""


def options_of(name: str) -> list[dict[str, Any]]:
    return [{}, *CASES[name][3]]


def test_every_loss_and_option_has_its_formula():
    import dataclasses

    assert set(CASES) == set(GROUPS)
    for name in GROUPS:
        tried = {option for options in CASES[name][3] for option in options}
        assert tried == {field.name for field in dataclasses.fields(LOSSES[name])} - NOT_TRIED


@pytest.mark.parametrize("weighted", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("name", "options"), [(name, each) for name in GROUPS for each in options_of(name)])
def test_loss_and_gradient_are_the_formulas(name, options, weighted):
    make, (inputs, targets), formula, _ = CASES[name]
    trainer = onnxtrain.Trainer(make(), loss=LOSSES[name](**options), optimizer=onnxtrain.SGD(1.0))
    (w,) = trainer.get_weights().values()
    w, weights = w.astype(np.float64), WEIGHTS if weighted else np.ones(N)
    found = trainer.train_step(inputs, targets, WEIGHTS if weighted else None)
    expected = formula(w, weights, **options)
    assert found == pytest.approx(expected, rel=1e-5)
    more = {"at": w} if name in ("kto", "grpo") else {}
    gradient = np.zeros_like(w)
    for index in np.ndindex(*w.shape):
        moved = np.zeros_like(w)
        moved[index] = 1e-5
        gradient[index] = (
            formula(w + moved, weights, **options, **more) - formula(w - moved, weights, **options, **more)
        ) / 2e-5
    (after,) = trainer.get_weights().values()
    np.testing.assert_allclose(w - after, gradient, atol=2e-5, rtol=1e-3)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("name", GROUPS)
def test_the_whole_is_the_weighted_sum_of_its_batches(name):
    make, (inputs, targets), _, _ = CASES[name]
    trainer = onnxtrain.Trainer(make(), loss=name)
    found = [trainer.evaluate(inputs, targets, batch_size=size)["loss"] for size in (4, 3, 1)]
    alike = np.allclose(found, found[0], rtol=1e-5)
    assert alike != LOSSES[name].compares_examples


@pytest.mark.parametrize("name", [name for name in GROUPS if not LOSSES[name].compares_examples])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_make_the_step_of_the_whole_batch(name, reduction):
    make, (inputs, targets), _, _ = CASES[name]
    after = []
    for accumulate in (1, 2, 3):
        trainer = onnxtrain.Trainer(
            make(), loss=LOSSES[name](weight=0.5, reduction=reduction), optimizer="sgd(lr=0.5)", accumulate=accumulate
        )
        trainer.train_step(inputs, targets)
        after.append(trainer.get_weights(flat=True))
    np.testing.assert_allclose(after[1], after[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(after[2], after[0], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dpo", "ranknet"])
def test_ranks_make_the_step_of_the_whole_batch(name):
    make, (inputs, targets), _, _ = CASES[name]

    def trained(communicator=None):
        trainer = onnxtrain.Trainer(make(), loss=name, optimizer="sgd(lr=0.5)", threads=1, distributed=communicator)
        history = trainer.fit(inputs, targets, epochs=2, batch_size=N, shuffle=False, progress=False)
        return history.rows[-1]["loss"], trainer.get_weights(flat=True)

    alone = trained()
    for found in in_threads(2, trained):
        assert found[0] == pytest.approx(alone[0], rel=1e-5)
        np.testing.assert_allclose(found[1], alone[1], rtol=2e-5, atol=1e-6)


def test_dpo_moves_from_its_reference():
    """At the start both models are one: the loss is log 2, and its gradient is not zero."""
    trainer = onnxtrain.Trainer(language_model(), loss="dpo", optimizer="sgd(lr=1)")
    first = trainer.train_step(TOKENS, trainer.predict(TOKENS))
    assert first == pytest.approx(np.log(2), rel=1e-6)
    assert (
        np.abs(
            trainer.get_weights(flat=True) - onnxtrain.Trainer(language_model(), loss="dpo").get_weights(flat=True)
        ).max()
        > 1e-3
    )


def test_metrics_are_rewards_by_trls_names():
    trainer = onnxtrain.Trainer(language_model(), loss=DPO(beta=0.5))
    rewards = 0.5 * (trainer.predict(TOKENS) - REFERENCE)
    chosen, rejected = rewards.T
    found = trainer.evaluate(TOKENS, REFERENCE, batch_size=3)
    assert list(found) == ["loss", "rewards/accuracies", "rewards/margins"]
    assert found["rewards/accuracies"] == (chosen > rejected).mean()
    assert found["rewards/margins"] == pytest.approx((chosen - rejected).mean(), rel=1e-5)
    more = trainer.evaluate(TOKENS, REFERENCE, metrics="rewards/chosen, rewards/rejected")
    assert more["rewards/chosen"] == pytest.approx(chosen.mean(), rel=1e-5)
    assert more["rewards/rejected"] == pytest.approx(rejected.mean(), rel=1e-5)
    judged = np.concatenate([REFERENCE, DESIRABLE], axis=1)
    single = onnxtrain.Trainer(language_model(), loss="kto(beta=0.5)").evaluate(TOKENS, judged, batch_size=3)
    assert single["rewards/margins"] == pytest.approx(chosen[[0, 3]].mean() - chosen[[1, 2]].mean(), rel=1e-5)


def test_pooling():
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, t, {F}] x, int64[n, t] attention_mask) => (float[n, t, 2] y)
        <float[{F}, 2] w = {{1, 2, -1, 0.5, 0.3, 1}}> {{ y = MatMul(x, w) }}""")
    w = np.array([[1, 2], [-1, 0.5], [0.3, 1]])
    x = RANDOM.normal(size=(N, 2, T, F)).astype(np.float32)
    last = ENDS[..., 0] - 1
    by_token = x.astype(np.float64) @ w
    expected = {
        "mean": (by_token * MASK[..., None]).sum(2) / MASK.sum(2)[..., None],
        "cls": by_token[:, :, 0],
        "last": np.take_along_axis(by_token, last[:, :, None, None], axis=2)[:, :, 0],
    }
    for pooling, wanted in expected.items():
        trainer = onnxtrain.Trainer(model, loss=MultipleNegatives(pooling=pooling))
        found = trainer.predict({"x": x, "attention_mask": MASK})
        np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted, axis=-1, keepdims=True), rtol=1e-4, atol=1e-6)


def test_scores_by_token_count_at_the_last_one():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (int64[n, t] input_ids) => (float[n, t, 1] y) <float[6, 1] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}>
        { y = Gather(w, input_ids) }""")
    trainer = onnxtrain.Trainer(model, loss="reward")
    last = ENDS[..., 0] - 1
    found = trainer.predict({"input_ids": IDS, "last": last})
    np.testing.assert_allclose(found, 0.1 + 0.1 * np.take_along_axis(IDS, last[..., None], 2)[..., 0], rtol=1e-5)


def test_a_fixed_batch_size_is_freed_on_request():
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[8, {F}] x) => (float[8, 1] y) <float[{F}, 1] w = {{1, 2, 3}}> {{ y = MatMul(x, w) }}""")
    with raises_sentence("rows_of_fixed_batch", got=8):
        onnxtrain.Trainer(model, loss="reward")
    trainer = onnxtrain.Trainer(model, loss="reward", dynamic_batch=True)
    assert trainer.train_step({"x": FEATURES[:, :2]}, MARGIN) > 0
    onnx.checker.check_model(trainer.model())


def test_the_saved_model_takes_single_rows(tmp_path):
    trainer = onnxtrain.Trainer(scorer(), loss="reward", optimizer="sgd(lr=0.1)")
    trainer.train_step({"x": FEATURES[:, :2]}, MARGIN)
    trainer.save(tmp_path / "m.onnx")
    assert onnxtrain.predict(tmp_path / "m.onnx", FEATURES[:, 0]).shape == (N, 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DPO(beta=0), OptionError, "beta is 0; dpo needs a finite number above 0"),
        (lambda: Reward(center=-1.0), OptionError, "center is -1.0; reward needs a finite number of at least 0"),
        (lambda: Reward(center="x"), OptionError, "center is 'x'; reward needs a finite number of at least 0"),
        (lambda: MultipleNegatives(pooling="max"), OptionError, "pooling is 'max'; multiple_negatives takes 'mean'"),
        (
            lambda: onnxtrain.Trainer(scorer(), loss="dpo"),
            OptionError,
            r"needs the logits \[batch, tokens, vocabulary\] of a language model",
        ),
        (
            lambda: onnxtrain.Trainer(scorer(2), loss="reward"),
            OptionError,
            "needs one score per row, but 'y' has shape .*replace_head",
        ),
        (
            lambda: onnxtrain.Trainer(language_model(), loss="multiple_negatives"),
            OptionError,
            "pooling='mean' needs a model with an attention_mask",
        ),
        (
            lambda: onnxtrain.Trainer(scorer(), loss={"y": "reward"}),
            OptionError,
            "The loss reward compares groups of rows, so that it cannot be one of several losses",
        ),
        (
            lambda: onnxtrain.Trainer(scorer(), loss="reward").train_step({"x": FEATURES[:, 0]}, MARGIN),
            DataError,
            r"'x' of the batch has rank 2 .*needs rank 3: \(batch, 2, 3\)",
        ),
        (
            lambda: onnxtrain.Trainer(scorer(), loss="mse").evaluate(
                FEATURES[:, 0], MARGIN[:, None], metrics="rewards/margins"
            ),
            OptionError,
            "The metric rewards/margins is for preferences, but the loss mean_squared_error has no rewards",
        ),
        (
            lambda: onnxtrain.Trainer(language_model(), loss="kto").evaluate(
                TOKENS, np.concatenate([REFERENCE, DESIRABLE], axis=1), metrics="rewards/accuracies"
            ),
            OptionError,
            "compares the answers of a pair, but the loss kto has single ones",
        ),
        *(
            (lambda y=y: onnxtrain.Trainer(scorer(), loss="ranknet").fit(FEATURES, y), DataError, message)
            for y, message in [
                (RELEVANCE[:, :1], "needs a relevance for each document, but an example has 3 documents and 1 target"),
                (RELEVANCE - 0.5, "the relevance -0.5 at example 0, but ranknet needs numbers"),
                (RELEVANCE * 0 - 1, "has no document at example 0: all relevances are -1"),
            ]
        ),
        (
            lambda: onnxtrain.Trainer(scorer(2), loss="multiple_negatives").train_step(FEATURES[:, :1], np.arange(N)),
            DataError,
            "needs a query and at least one document per example, but there is one row",
        ),
    ],
)  # fmt: skip
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
