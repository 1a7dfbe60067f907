"""Packed rows in models whose mask has two axes: documents are kept apart in the working copy."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.data import pack
from onnxtrain.errors import DataError
from sentences import raises_sentence
from working_copy.packed_rows import LENGTH, check_packing, documents, mixed_loss
from zoo import language_model as zoo

ATTENTION = """
    q = MatMul(x, w)  qk = Unsqueeze(q, one)  kt = Transpose<perm = [0, 1, 3, 2]>(qk)  scores = MatMul(qk, kt)
    s = Shape(i)  t = Gather(s, last)  zero = Constant<value_int = 0>()  step = Constant<value_int = 1>()
    r = Range(zero, t, step)  rows = Unsqueeze(r, one)  causal = LessOrEqual(r, rows)
    real = Cast<to = 9>(attention_mask)  keys = Unsqueeze(real, middle)  seen = And(causal, keys)
    masked = Where(seen, scores, low)  p = Softmax<axis = -1>(masked)  mixed = MatMul(p, qk)
    y = Squeeze(mixed, one)  z = Add(x, y)  logits = MatMul(z, head)
"""

LEARNED = "e = Gather(words, i)  c = Shape(i)  l = Gather(c, last)  b = Constant<value_int = 2>()  \
k = Constant<value_int = 1>()  n = Add(l, b)  f = Range(b, n, k)  at = Gather(places, f)  x = Add(e, at)"
"""Embeddings with learned positions, which begin at row 2 of their table."""


def attention_model(embedding=LEARNED, attention=ATTENTION, mask="int64[N, T] attention_mask", words=40):
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> f (int64[N, T] i, {mask}) => (float[N, T, {words}] logits)
        <int64 last = {{1}}, int64[1] one = {{1}}, int64[2] middle = {{1, 2}}, float low = {{-1e30}}> {{
            {embedding} {attention} }}"""
    )
    rng = np.random.default_rng(0)
    shapes = {"words": (words, 8), "places": (32, 8), "w": (8, 8), "head": (8, words)}
    model.graph.initializer.extend(
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name) for name, shape in shapes.items()
    )
    model.graph.input[0].name = "input_ids"
    for node in model.graph.node:
        node.input[:] = ["input_ids" if name == "i" else name for name in node.input]
    return model


@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=pytest.mark.thorough)])
def test_models_of_the_builder(bits):
    """GroupQueryAttention reads the lengths of rows; documents get a bias and positions of their own."""
    check_packing(zoo.language_model(bits=bits), zoo.WORDS)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "next_token(chunk=5)"},
        {"recompute": "layers"},
        {"lora": onnxtrain.Lora(rank=2, targets="*embed_tokens")},
    ],
    ids=["chunk", "recompute", "lora"],
)
@pytest.mark.thorough
def test_options_beside_packing(options):
    check_packing(zoo.language_model(), zoo.WORDS, **options)


def test_tables_of_distances_stay():
    """As in T5: a bias of the scores by the distance of two tokens, which is the same within a document."""
    biased = "a = Sub(r, rows)  d = Abs(a)  heads = Gather(places, d)  near = ReduceMean<keepdims = 0>(heads, two)"
    masked = "masked = Where(seen, near_scores, low)"
    added = f"{biased}  near_scores = Add(scores, near)  {masked}"
    attention = ATTENTION.replace("masked = Where(seen, scores, low)", added)
    check_packing(attention_model("two = Constant<value_ints = [2]>()  x = Gather(words, i)", attention), 40)


def test_attention_in_standard_operators():
    """Learned positions begin again with each document, at the row where the model's begin."""
    check_packing(attention_model(), 40)


POSITIONED = "e = Gather(words, i)  at = Gather(places, position_ids)  x = Add(e, at)"

CAUSAL = (
    ATTENTION.replace("real = Cast<to = 9>(attention_mask)  keys = Unsqueeze(real, middle)", "")
    .replace("seen = And(causal, keys)", "")
    .replace("Where(seen, scores, low)", "Where(causal, scores, low)")
)


def positioned_model(attention=CAUSAL, embedding=POSITIONED, mask="int64[N, T] position_ids"):
    """Attention is causal in the graph, which reads positions, but no mask."""
    return attention_model(embedding, attention, mask)


def test_positions_keep_documents_apart():
    check_packing(positioned_model(), 40)


def test_a_model_of_tokens_alone_is_refused():
    """No input could say where a document begins."""
    model = attention_model("x = Gather(words, i)", CAUSAL, "int64[N, T] unused")
    del model.graph.input[1]
    trainer = onnxtrain.Trainer(model, loss="next_token")
    for call in (trainer.fit, trainer.evaluate):
        with raises_sentence("packed_without_positions", what="input_ids"):
            call(pack([[3, 4, 5], [6, 7]], 8))
    assert trainer.evaluate((np.array([[3, 4, 5]]), np.array([[3, 4, 5]])))["loss"] > 0


@pytest.mark.parametrize(
    "model", [zoo.language_model, attention_model, positioned_model], ids=["builder", "standard", "positions"]
)
def test_documents_that_are_not_kept_apart_have_another_loss(model, monkeypatch):
    """The comparison fails without the change of the working copy."""
    right = check_packing(model(), 40)[0]
    assert abs(mixed_loss(model(), 40, monkeypatch) - right) > 1e-3 * right


def test_the_saved_model_is_that_of_the_file(tmp_path):
    """Packing changes the working copy alone."""
    onnx.save(zoo.language_model(), tmp_path / "model.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="next_token", output="logits")
    trainer.fit(pack([[3, 4, 5], [6, 7]], 8), epochs=1, progress=False)
    trainer.save(tmp_path / "saved.onnx")
    before, after = (onnx.load(tmp_path / name).graph for name in ("model.onnx", "saved.onnx"))
    assert list(before.node) == list(after.node)
    assert list(before.input) == list(after.input)


def test_a_copy_of_a_trainer_takes_packed_rows():
    """After the first packed rows, in a copy, and in one from another process."""
    rows = pack(documents(zoo.WORDS), LENGTH)
    own = onnxtrain.Trainer(zoo.language_model(), loss="next_token", output="logits")
    own.fit(rows, epochs=1, progress=False)
    wanted = own.evaluate(rows)["loss"]
    copies = pickle.loads(pickle.dumps(own)), copy.deepcopy(own)
    histories = [each.fit(rows, epochs=1, progress=False).rows[0]["loss"] for each in (own, *copies)]
    assert histories == [histories[0]] * 3
    assert histories[0] == pytest.approx(wanted, rel=1e-6)


def test_evaluate_takes_packed_rows():
    rows = pack([[3, 4, 5], [6, 7, 8, 9]], 8)
    alone = [
        onnxtrain.evaluate(zoo.language_model(), pack([one], 8), loss="next_token") for one in ([3, 4, 5], [6, 7, 8, 9])
    ]
    together = onnxtrain.evaluate(zoo.language_model(), rows, loss="next_token")
    assert together["loss"] == pytest.approx((2 * alone[0]["loss"] + 3 * alone[1]["loss"]) / 5, rel=1e-6)


THREE_AXES = """
    kt = Transpose<perm = [0, 2, 1]>(x)  scores = MatMul(x, kt)  real = Cast<to = 1>(attention_mask)
    keys = Unsqueeze(real, one)  masked = Mul(scores, keys)  p = Softmax<axis = -1>(masked)  z = MatMul(p, x)
    logits = MatMul(z, head)
"""

CONVOLUTION = """
    channels = Transpose<perm = [0, 2, 1]>(x)  mixed = Conv<kernel_shape = [1]>(channels, filter)
    y = Transpose<perm = [0, 2, 1]>(mixed)  real = Cast<to = 1>(attention_mask)  keys = Unsqueeze(real, two)
    z = Mul(y, keys)  logits = MatMul(z, head)
"""

ALONE = """
    real = Cast<to = 1>(attention_mask)  keys = Unsqueeze(real, two)  z = Mul(x, keys)  logits = MatMul(z, head)
"""

SLICED = """
    e = Gather(words, i)  c = Shape(i)  l = Gather(c, one)  zeros = Constant<value_ints = [0]>()
    at = Slice(places, zeros, l)  x = Add(e, at)
"""

COUNTED = """
    e = Gather(words, i)  real = Min(i, last)  k = CumSum(real, last)  at = Gather(places, k)  x = Add(e, at)
"""

WITHOUT_MASK = {"mask": "int64[N, T] position_ids", "embedding": POSITIONED}
MIXED = """
    channels = Transpose<perm = [0, 2, 1]>(x)  mixed = Conv<kernel_shape = [1]>(channels, filter)
    z = Transpose<perm = [0, 2, 1]>(mixed)  logits = MatMul(z, head)
"""

REFUSED = {
    "would flow into each other in this .* Conv; train": {**WITHOUT_MASK, "attention": MIXED},
    "has no attention with scores .*; train": {**WITHOUT_MASK, "attention": "logits = MatMul(x, head)"},
    r"need positions of integers \[batch, tokens\], .* 'position_ids' \(int64, 1 axes\)": {
        **WITHOUT_MASK,
        "mask": "int64[T] position_ids",
        "attention": CAUSAL,
    },
    r"need one mask of integers .* \(bool, 2 axes\)": {"mask": "bool[N, T] attention_mask"},
    "need one mask of integers .*'other_mask'": {"mask": "int64[N, T] attention_mask, int64[N, T] other_mask"},
    "would flow into each other in this model's Conv": {"attention": CONVOLUTION},
    "the model has no attention with scores": {"attention": ALONE},
    "the Softmax .* has scores of shape .* attention needs four axes": {"attention": THREE_AXES},
    "takes positions as the first rows of 'places'": {"embedding": SLICED},
    r"counts positions from the tokens \(input_ids\)": {
        "embedding": COUNTED,
        "attention": ATTENTION.replace("real =", "r2 =").replace("(real,", "(r2,"),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_cannot_keep_documents_apart(message):
    model = attention_model(**REFUSED[message])
    more = {"filter": np.ones((8, 8, 1), np.float32), "two": np.array([2])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in more.items())
    trainer = onnxtrain.Trainer(model, loss="next_token")
    with pytest.raises(DataError, match=message):
        trainer.fit(pack([[3, 4, 5], [6, 7]], 8), epochs=1, progress=False)
