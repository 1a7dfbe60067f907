"""Ranking losses against sentence-transformers: the same embeddings and scores give the same losses and gradients."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import losses

torch = pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

N, F = 6, 5
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(N, 4, F)).astype(np.float32)
RELEVANCE = np.array([[3, 0, 1, -1], [0, 1, -1, -1], [1, 1, 0, 2]] * 2, np.float32)


def stepped(loss, targets, columns):
    """The loss of our model y = x w, and the gradient of w, from a step of SGD."""
    w = np.random.default_rng(1).normal(size=(F, columns)).astype(np.float32)
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, {F}] x) => (float[n, {columns}] y) {{ y = MatMul(x, w) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    trainer = onnxtrain.Trainer(model, loss=loss, optimizer=onnxtrain.SGD(1.0))
    found = trainer.train_step(ROWS, targets)
    return found, w - trainer.get_weights()["w"], torch.tensor(w, requires_grad=True)


def compare(found, gradient, expected, w):
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, w.grad.numpy(), atol=1e-5)


class Scorer(torch.nn.Module):
    """A cross-encoder of rows that are given as they are."""

    device = torch.device("cpu")

    def __init__(self, w):
        super().__init__()
        self.w = w
        self.num_labels = 1

    def preprocess(self, pairs, **options):
        return {"rows": torch.stack([torch.tensor(document) for _, document in pairs])}

    def forward(self, tokens):
        return {"scores": tokens["rows"] @ self.w}


@pytest.mark.parametrize("scale", [20.0, 3.0])
def test_multiple_negatives(scale):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    found, gradient, w = stepped(losses.MultipleNegatives(scale=scale), np.arange(N), 3)
    peer = MultipleNegativesRankingLoss(None, scale=scale)
    columns = [torch.tensor(ROWS[:, index]) @ w for index in range(4)]
    compare(found, gradient, peer.compute_loss_from_embeddings(columns, None), w)


@pytest.mark.parametrize("name", ["ListNetLoss", "RankNetLoss"])
def test_rerankers(name):
    from sentence_transformers.cross_encoder import losses as peers

    loss = losses.ListNet() if name == "ListNetLoss" else losses.RankNet()
    found, gradient, w = stepped(loss, RELEVANCE, 1)
    options = {} if name == "ListNetLoss" else {"reduction_log": "natural"}
    peer = getattr(peers, name)(Scorer(w), **options)
    documents = [
        [row for row, label in zip(rows, labels, strict=True) if label >= 0]
        for rows, labels in zip(ROWS, RELEVANCE, strict=True)
    ]
    labels = [torch.tensor(row[row >= 0]) for row in RELEVANCE]
    compare(found, gradient, peer([["q"] * N, documents], labels), w)
