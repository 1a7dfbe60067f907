"""Compare the training of packed rows with that of unpacked ones."""

from __future__ import annotations

import numpy as np

import onnxtrain
from onnxtrain.data import pack

LENGTH = 14


def documents(words):
    """Texts of two to nine tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, words, size) for size in (5, 7, 3, 9, 4, 2, 6)]


def unpacked(texts):
    """A row for each document, padded on the right."""
    length = max(map(len, texts))
    ids, labels = np.zeros((len(texts), length), int), np.full((len(texts), length), -100)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = labels[row, : len(text)] = text
    positions = np.tile(np.arange(length), (len(texts), 1))
    return {"input_ids": ids, "attention_mask": (labels >= 0).astype(int), "position_ids": positions, "labels": labels}


def check_packing(model, words, *, rtol=2e-6, atol=1e-6, **options):
    """Train two steps on packed and on unpacked documents: losses, gradients and evaluations agree."""
    settings = {"loss": "next_token", "output": "logits", "optimizer": "sgd(lr=0.1)", **options}
    plain, packed = onnxtrain.Trainer(model, **settings), onnxtrain.Trainer(model, **settings)
    texts = documents(words)
    inputs = {each.name for each in onnxtrain.inspect(model).inputs}
    apart = {name: array for name, array in unpacked(texts).items() if name in inputs or name == "labels"}
    rows = pack(texts, LENGTH)
    assert len(rows) < len(texts)
    fit = {"epochs": 2, "progress": False, "shuffle": False}
    losses = [
        [row["loss"] for row in trainer.fit(data, batch_size=size, **fit).rows]
        for trainer, data, size in ((plain, apart, len(texts)), (packed, rows, len(rows)))
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=rtol)
    assert losses[0][1] < losses[0][0]
    assert plain.parameters
    for name, value in plain.parameters.items():  # of SGD: after the gradients of two steps
        np.testing.assert_allclose(packed.parameters[name], value, rtol=0, atol=atol, err_msg=name)
    wanted = plain.evaluate(apart)["loss"]
    for data in (rows, apart):  # the same trainer takes unpacked rows, too
        assert abs(packed.evaluate(data)["loss"] - wanted) < rtol * wanted
    return losses[0]


def mixed_loss(model, words, monkeypatch, **options):
    """Return the first loss of packed rows whose documents are not kept apart."""
    monkeypatch.setattr("onnxtrain.training.objective.numbers_documents", lambda graph: False)
    monkeypatch.setattr("onnxtrain.data.packing._form", lambda spec: lambda mask: mask[:, 0].any(1).astype(np.int64))
    rows = pack(documents(words), LENGTH)
    trainer = onnxtrain.Trainer(model, loss="next_token", output="logits", optimizer="sgd(lr=0.1)", **options)
    return trainer.fit(rows, epochs=1, batch_size=len(rows), progress=False, shuffle=False).rows[0]["loss"]
