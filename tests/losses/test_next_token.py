"""The next-token loss: logits at a position are for the next token."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.losses import NextToken
from sentences import raises_sentence

WORDS = 11
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, WORDS, (4, 6))
LABELS = np.where(np.arange(6) < np.array([[6], [4], [2], [6]]), IDS, -100)


def model():
    """Return a model whose logits depend on the token itself."""
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> f (int64[b, s] ids) => (float[b, s, {WORDS}] logits)
        {{ logits = Gather(table, ids) }}"""
    )
    table = RNG.normal(size=(WORDS, WORDS)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(table, "table"))
    return made, table


def expected(table, labels):
    logits = table[IDS][:, :-1].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    later = labels[:, 1:]
    terms = -np.take_along_axis(log_p, np.maximum(later, 0)[..., None], -1)[..., 0]
    return terms[later != -100], logits.argmax(-1)[later != -100] == later[later != -100]


@pytest.mark.parametrize("labels", [IDS, LABELS], ids=["all", "ignored"])
@pytest.mark.parametrize("kernels", [False, None])
def test_loss_and_metrics(labels, kernels):
    given, table = model()
    options = onnxtrain.RuntimeOptions(kernels=kernels)
    made = onnxtrain.Trainer(given, loss="next_token", optimizer="sgd(lr=0.5)", runtime=options)
    terms, right = expected(table, labels)
    found = made.evaluate((IDS, labels), metrics=["perplexity", "accuracy"])
    assert found["loss"] == pytest.approx(terms.mean(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(terms.mean()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(right.mean())
    losses = [made.train_step(IDS, labels) for _ in range(20)]
    assert losses[0] == pytest.approx(terms.mean(), rel=1e-5)
    assert losses[-1] < losses[0] - 0.3


def test_micro_batches_match_the_batch():
    given, _ = model()
    whole, split = (
        onnxtrain.Trainer(given, loss="next_token", optimizer="sgd(lr=0.5)", accumulate=count) for count in (1, 4)
    )
    assert split.train_step(IDS, LABELS) == pytest.approx(whole.train_step(IDS, LABELS), rel=1e-6)
    np.testing.assert_allclose(split.parameters["table"], whole.parameters["table"], rtol=1e-5, atol=1e-6)


def test_predictions_without_a_sequence_axis_are_refused():
    with raises_sentence("next_token_logits", what="logits", got=("N", 3)):
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="next_token")
    with pytest.raises(OptionError, match="next_token needs an ignore_index"):
        NextToken(ignore_index=None)
