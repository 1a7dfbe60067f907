"""A fixed batch becomes dynamic: constants that hold the size change beside batch axes, and both models agree."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from sentences import raises_sentence

RANDOM = np.random.default_rng(0)


def parsed(body, opset=18):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{body}')


def weights(model, **arrays):
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items())
    return model


def attention(batch, *, tokens=5, heads=2, width=8):
    """Return attention with fixed sizes: heads split and merged by Reshape, batch and heads as one axis."""
    model = parsed(f"""f (float[{batch}, {tokens}, {width}] x) => (float[{batch}, {tokens}, {width}] y)
      <int64[4] split = {{{batch}, {tokens}, {heads}, {width // heads}}},
       int64[3] bmm = {{{batch * heads}, {tokens}, {width // heads}}},
       int64[4] back = {{{batch}, {heads}, {tokens}, {width // heads}}},
       int64[3] joined = {{{batch}, {tokens}, {width}}}> {{
        q = MatMul(x, wq)  qs = Reshape(q, split)  qt = Transpose <perm = [0, 2, 1, 3]> (qs)  qb = Reshape(qt, bmm)
        k = MatMul(x, wk)  ks = Reshape(k, split)  kt = Transpose <perm = [0, 2, 3, 1]> (ks)
        v = MatMul(x, wv)  vs = Reshape(v, split)  vt = Transpose <perm = [0, 2, 1, 3]> (vs)
        q4 = Reshape(qb, back)
        scores = MatMul(q4, kt)  p = Softmax <axis = -1> (scores)  mixed = MatMul(p, vt)
        order = Transpose <perm = [0, 2, 1, 3]> (mixed)
        y = Reshape(order, joined) }}""")
    return weights(model, **{name: RANDOM.normal(size=(width, width)) / 3 for name in ("wq", "wk", "wv")})


def vision(batch):
    """Return patches, a class token that is a constant for each example, positions, a flattened head."""
    model = parsed(f"""f (float[{batch}, 3, 8, 8] x) => (float[{batch}, 4] y)
      <int64[3] flat = {{{batch}, 6, 4}}, int64[2] head = {{{batch}, -1}}> {{
        p = Conv <kernel_shape = [4, 4], strides = [4, 4]> (x, patch)
        f = Reshape(p, flat)  t = Transpose <perm = [0, 2, 1]> (f)
        c = Concat <axis = 1> (token, t)
        s = Add(c, positions)
        h = Reshape(s, head)
        y = MatMul(h, out) }}""")
    token = np.repeat(RANDOM.normal(size=(1, 1, 6)), batch, 0)
    positions = np.repeat(RANDOM.normal(size=(1, 5, 6)), batch, 0)
    return weights(
        model, patch=RANDOM.normal(size=(6, 3, 4, 4)), token=token, positions=positions, out=RANDOM.normal(size=(30, 4))
    )


def recurrent(batch):
    """Return a time-major layer, with first states that are constants for each example."""
    model = parsed(f"""f (float[{batch}, 7, 3] x) => (float[{batch}, 2] y)
      <int64[3] rows = {{7, {batch}, 4}}, int64[2] last = {{{batch}, 4}}> {{
        t = Transpose <perm = [1, 0, 2]> (x)
        s, h, c = LSTM <hidden_size = 4> (t, w, r, b, , h0, c0)
        q = Squeeze(s, one)
        z = Reshape(q, rows)
        g = Gather <axis = 0> (z, end)
        l = Reshape(g, last)
        y = MatMul(l, out) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(-1), "end"))
    states = {name: np.repeat(RANDOM.normal(size=(1, 1, 4)), batch, 1) for name in ("h0", "c0")}
    shapes = {"w": (1, 16, 3), "r": (1, 16, 4), "b": (1, 32), "out": (4, 2)}
    return weights(model, **states, **{name: RANDOM.normal(size=shape) for name, shape in shapes.items()})


def upsampling(batch):
    return parsed(f"""f (float[{batch}, 2, 3, 3] x) => (float[{batch}, 2, 6, 6] y)
      <int64[4] sizes = {{{batch}, 2, 6, 6}}> {{ y = Resize <mode = "nearest"> (x, , , sizes) }}""")


def expanded(batch):
    return parsed(f"""f (float[{batch}, 1, 3] x) => (float[{batch}, 4, 3] y)
      <int64[3] shape = {{{batch}, 4, 3}}> {{ y = Expand(x, shape) }}""")


def two_inputs(batch):
    model = parsed(f"""f (int64[{batch}, 4] ids, bool[{batch}, 4] mask)
      => (float[{batch}, 4, 3] y, float[{batch}] total)
      <int64[3] shape = {{{batch}, 4, 1}}> {{
        e = Gather(table, ids)
        m = Cast <to = 1> (mask)
        r = Reshape(m, shape)
        y = Mul(e, r)
        total = ReduceSum <keepdims = 0> (y, axes) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2]), "axes"))
    return weights(model, table=RANDOM.normal(size=(10, 3)))


def joined(batch):
    """Return a model that merges time and batch into one axis, and splits them again."""
    return weights(
        parsed(f"""f (float[{batch}, 5, 3] x) => (float[{batch}, 5, 2] y)
          <int64[2] one = {{{5 * batch}, 3}}, int64[3] two = {{5, {batch}, 2}}> {{
            t = Transpose <perm = [1, 0, 2]> (x)
            a = Reshape(t, one)
            b = MatMul(a, w)
            c = Reshape(b, two)
            y = Transpose <perm = [1, 0, 2]> (c) }}"""),
        w=RANDOM.normal(size=(3, 2)),
    )


def free_length(batch):
    """Return a model with a dynamic length that flattens with -1."""
    return parsed(f"""f (float[{batch}, length, 3] x) => (float[{batch}, flat] y)
      <int64[2] shape = {{{batch}, -1}}> {{ y = Reshape(x, shape) }}""")


def flattened(batch):
    """Return a model that flattens images into rows, and appends other features."""
    return weights(
        parsed(f"""f (float[{batch}, 3, 4, 4] x, float[{batch}, 2] z) => (float[{batch}, 4] y) {{
            m = GlobalAveragePool(x)
            f = Flatten(m)
            j = Concat <axis = 1> (f, z)
            y = MatMul(j, w) }}"""),
        w=RANDOM.normal(size=(5, 4)),
    )


CASES = [attention, vision, recurrent, upsampling, expanded, two_inputs, joined, free_length, flattened]


def run(model, feeds):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)


def feeds_of(model, examples):
    found = {}
    for info in model.graph.input:
        kind = info.type.tensor_type
        shape = [examples, *(dim.dim_value or 6 for dim in kind.shape.dim[1:])]
        found[info.name] = (
            RANDOM.normal(size=shape).astype(np.float32)
            if kind.elem_type == onnx.TensorProto.FLOAT
            else RANDOM.integers(0, 2, shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        )
    return found


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_example_gives_what_it_gave(case, batch):
    fixed = case(batch)
    original = fixed.SerializeToString()
    free = onnxtrain.dynamic_batch(fixed)
    assert fixed.SerializeToString() == original
    for info in (*free.graph.input, *free.graph.output):
        assert info.type.tensor_type.shape.dim[0].dim_param == "batch"
    examples = 6
    feeds = feeds_of(fixed, examples)
    expected = [
        run(fixed, {name: array[start : start + batch] for name, array in feeds.items()})
        for start in range(0, examples, batch)
    ]
    for found, *parts in zip(run(free, feeds), *expected, strict=True):
        np.testing.assert_allclose(found, np.concatenate(parts), rtol=1e-4, atol=1e-5)
    for found in run(free, {name: array[:1] for name, array in feeds.items()}):
        assert len(found) == 1


def test_a_free_batch_stays():
    model = parsed("f (float[n, 2] x) => (float[n, 2] y) { y = Relu(x) }")
    free = onnxtrain.dynamic_batch(model)
    assert free.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"


def test_a_symbol_that_is_taken_is_not_taken_again():
    model = parsed("f (float[1, batch] x) => (float[1, batch] y) { y = Relu(x) }")
    free = onnxtrain.dynamic_batch(model)
    assert [dim.dim_param for dim in free.graph.input[0].type.tensor_type.shape.dim] == ["batch_size", "batch"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "f (float[1, 4] x) => (float[1, 4] y) <int64[1] zero = {0}> { m = ReduceMean(x, zero)  y = Sub(x, m) }",
            r"its output 'y' then differs for the same examples \(shapes \(1, 4\) and \(3, 4\)\)",
        ),
        (
            "f (float[1, 4] x) => (float[1, 4] y) <int64[1] zero = {0}, float[3, 4] w = {1,2,3,4,5,6,7,8,9,0,1,2}> "
            "{ s = Squeeze(x, zero)  y2 = MatMul(w, s)  y = Add(x, y2) }",
            "ONNX Runtime cannot (run|load) it",
        ),
    ],
    ids=["examples are mixed", "the axis is gone"],
)
def test_what_cannot_be_freed_is_refused(body, reason):
    model = parsed(
        body.replace("y2 = MatMul(w, s)  y = Add(x, y2)", "y2 = MatMul(w, s)  y3 = ReduceMax(y2)  y = Add(x, y3)")
    )
    with raises_sentence("batch_cannot_be_freed") as caught:
        onnxtrain.dynamic_batch(model)
    assert re.match(reason, caught.value.got)


@pytest.mark.parametrize("case", [attention, vision, recurrent], ids=lambda case: case.__name__)
def test_a_trainer_takes_other_batches_and_saves_the_file_with_new_weights_only(case, tmp_path):
    fixed = case(1)
    onnx.save(fixed, tmp_path / "model.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="mse", optimizer="sgd(lr=0.01)", dynamic_batch=True)
    reference = onnxtrain.Trainer(onnxtrain.dynamic_batch(fixed), loss="mse", optimizer="sgd(lr=0.01)")
    x = feeds_of(fixed, 5)["x"]
    y = RANDOM.normal(size=(5, *run(fixed, {"x": x[:1]})[0].shape[1:])).astype(np.float32)
    assert trainer.objective.fixed_batch is None
    assert trainer.train_step(x, y) == pytest.approx(reference.train_step(x, y), rel=1e-6)
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    assert saved.graph.input == fixed.graph.input
    assert saved.graph.node == fixed.graph.node
    found = run(saved, {"x": x[:1]})[0]
    np.testing.assert_allclose(found, np.asarray(trainer.predict(x))[:1], rtol=1e-4, atol=1e-5)
    changed = [t.name for t, o in zip(saved.graph.initializer, fixed.graph.initializer, strict=True) if t != o]
    assert set(changed) == set(trainer.parameters)


def test_the_step_is_that_of_padded_examples():
    """Compare a step on three examples with one padded to a fixed batch of four."""
    fixed = attention(4)
    x, y = feeds_of(fixed, 3)["x"], RANDOM.normal(size=(3, 5, 8)).astype(np.float32)
    weights = []
    for free in (False, True):
        trainer = onnxtrain.Trainer(fixed, loss="mse", optimizer="sgd(lr=0.1)", dynamic_batch=free)
        trainer.train_step(x, y)
        weights.append(trainer.get_weights(flat=True))
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [None, "?"])
def test_axes_of_no_name_are_free(size):
    """Use axes without a name, or all with a question mark, as exporters write them: they need not be equal."""
    model = parsed(
        "f (float[a, b, 3] x) => (float[a, b, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"
    )
    for info in (*model.graph.input, *model.graph.output):
        for dim in list(info.type.tensor_type.shape.dim)[:2]:
            dim.Clear()
            if size:
                dim.dim_param = size
    trainer = onnxtrain.Trainer(model, loss="mse")
    assert np.isfinite(trainer.train_step(np.ones((5, 4, 3), np.float32), np.ones((5, 4, 2), np.float32)))
    assert np.isfinite(trainer.train_step(np.ones((2, 7, 3), np.float32), np.ones((2, 7, 2), np.float32)))
