"""Ranks with micro-batches, drawn at random: the bits of one process, whatever is sharded, overlapped or doubled."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from distributed.threads import in_threads, step_in_rank_order
from onnxtrain.distributed.compression import choose_compression
from onnxtrain.lowering import lower
from onnxtrain.training.executors import data_parallel

RANDOM = np.random.default_rng(0)


def graph(text: str, kind: str = "float", /, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Return a model whose floating type is ``kind``, with random initializers of these shapes."""
    dtype = {"float": np.float32, "double": np.float64, "float16": np.float16}[kind]
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g {text.replace("real", kind)}')
    for name, shape in shapes.items():
        values = np.asarray(0.5 * RANDOM.standard_normal(shape), dtype)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def mlp() -> onnx.ModelProto:
    return onnxtrain.examples.mlp((12, 33, 4), seed=3)


def deep(kind: str) -> onnx.ModelProto:
    return graph(
        """(real[N, 12] x) => (real[N, 4] y)
        { a = MatMul(x, v) b = Add(a, c) h = Tanh(b) d = Mul(h, scale) m = MatMul(d, w) y = Mul(m, scale) }""",
        kind,
        v=(12, 33),
        c=(33,),
        w=(33, 4),
        scale=(),
    )


SHARED_NORM = functools.partial(
    graph,
    """(float[N, 12] x) => (float[N, 4] y) { a = LayerNormalization<axis = -1>(x, s, b) t = MatMul(a, v)
    c = LayerNormalization<axis = -1>(t, s, b) d = MatMul(c, v) e = LayerNormalization<axis = -1>(d, s, b)
    y = MatMul(e, w) }""",
    s=(12,),
    b=(12,),
    v=(12, 12),
    w=(12, 4),
)
LSTM = functools.partial(
    graph,
    """(float[N, 3, 12] x) => (float[N, 4] y) <int64[1] axis = {0}> { t = Transpose<perm = [1, 0, 2]>(x)
    s, h = LSTM<hidden_size = 5>(t, w, r, b) l = Squeeze(h, axis) y = MatMul(l, head) }""",
    w=(1, 20, 12),
    r=(1, 20, 5),
    b=(1, 40),
    head=(5, 4),
)
VECTORS = RANDOM.normal(size=(24, 12))
TOKENS = RANDOM.integers(1, 100, (24, 5))
IMAGES = RANDOM.normal(size=(24, 3, 32, 32))
# Model, inputs, options.
KINDS = {
    "embedding": (onnxtrain.examples.small_transformer, [TOKENS, np.ones_like(TOKENS)], {}),
    "shared norm": (SHARED_NORM, VECTORS, {"train": "*"}),
    "lora": (mlp, VECTORS, {"lora": onnxtrain.Lora(rank=4, targets="*")}),
    "dora": (mlp, VECTORS, {"lora": onnxtrain.Lora(rank=4, targets="*", dora=True)}),
    "qat": (lambda: onnxtrain.quantize(mlp(), VECTORS.astype("f4")), VECTORS, {"qat": True}),
    "conv and norm": (onnxtrain.examples.small_resnet, IMAGES, {"batch_norm": "train"}),
    "lstm": (LSTM, RANDOM.normal(size=(24, 3, 12)), {}),
    **{kind: (functools.partial(deep, kind), VECTORS, {"train": "*"}) for kind in ("float", "float16", "double")},
}
OPTIMIZERS = ["sgd(lr=0.1)", "momentum(lr=0.1)", "adam(lr=0.01)", "adamw(lr=0.01, weight_decay=0.1)"]


def batch_of(kind: str, rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return the first rows of the inputs and labels."""
    given = KINDS[kind][1]
    dtype = {"float16": np.float16, "double": np.float64}.get(kind, np.float32)
    whole = given if isinstance(given, list) else [given.astype(dtype)]
    return tuple(array[:rows] for array in whole), np.arange(rows) * 7 % (2 if kind == "conv and norm" else 4)


@pytest.mark.sampled("draw")
@pytest.mark.parametrize("draw", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_micro_batches_have_the_bits_of_sums_in_rank_order(monkeypatch, kind, draw):
    rng = np.random.default_rng([draw, list(KINDS).index(kind)])
    make, _, options = KINDS[kind]
    model, ranks, accumulate = make(), int(rng.integers(2, 4)), int(rng.integers(1, 5))
    overlap, second_buffers = rng.random(2) < 0.5
    options = options | {
        "loss": "softmax_cross_entropy",
        "optimizer": str(rng.choice(OPTIMIZERS)),
        "clip_norm": [None, 0.1, 100.0][rng.integers(3)],
        "runtime": onnxtrain.RuntimeOptions(threads=1, kernels=None if kind == "qat" or rng.random() < 0.75 else False),
    }
    batches = [batch_of(kind, rows) for rows in (24, int(rng.integers(1, 24)), 7)]
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 1 << 10)
    if second_buffers:
        monkeypatch.setattr(lower, "in_place_states", lambda graph, states: set())

    def train(rank, shard):
        rank.overlap = bool(overlap)
        several = onnxtrain.Distributed(rank, shard_states=shard)
        trainer = onnxtrain.Trainer(model, accumulate=accumulate, distributed=several, **options)
        return [trainer.train_step(*batch) for batch in batches], trainer.get_weights()

    found = [*in_threads(ranks, lambda rank: train(rank, False)), *in_threads(ranks, lambda rank: train(rank, True))]
    alone = onnxtrain.Trainer(model, accumulate=max(2, accumulate), **options)
    if accumulate == 1:
        alone.executor._micro_rows = lambda rows: rows
    losses = [step_in_rank_order(alone, *batch, ranks) for batch in batches]
    about = f"{ranks=} {accumulate=} {overlap=} {second_buffers=} {options}"
    for number, (own_losses, weights) in enumerate(found):
        assert own_losses == losses, f"{number} {about}"
        for name, value in alone.get_weights().items():
            np.testing.assert_array_equal(weights[name], value, err_msg=f"{number} {name} {about}")


@pytest.mark.sampled("shard")
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(
    ("kind", "compress", "batch_norm"),
    [("lora", "float16", None), ("embedding", onnxtrain.distributed.TopK(0.1), None), ("conv and norm", None, "sync")],
)
def test_bits_do_not_depend_on_buffers_and_overlap(monkeypatch, kind, compress, batch_norm, shard):
    make, _, options = KINDS[kind]
    model = make()
    options = options | ({} if batch_norm is None else {"batch_norm": batch_norm})
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 1 << 10)
    found = []
    for overlap, second_buffers in ((False, False), (True, False), (True, True)):

        def train(rank, overlap=overlap):
            rank.overlap, rank.compress = overlap, choose_compression(compress)
            trainer = onnxtrain.Trainer(
                model,
                loss="softmax_cross_entropy",
                accumulate=3,
                threads=1,
                distributed=onnxtrain.Distributed(rank, shard_states=shard),
                **options,
            )
            return [trainer.train_step(*batch_of(kind, rows)) for rows in (24, 11, 7)], trainer.get_weights()

        with monkeypatch.context() as context:
            if second_buffers:
                context.setattr(lower, "in_place_states", lambda graph, states: set())
            found += in_threads(2, train)
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        for name, value in found[0][1].items():
            np.testing.assert_array_equal(weights[name], value, err_msg=name)
