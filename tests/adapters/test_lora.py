"""LoRA training: values of steps, initial outputs, unchanged base weights."""

import copy
import pickle

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain import Lora
from onnxtrain.errors import OptionError
from sentences import raises_sentence
from zoo.decoder import batch, decoder, parsed

LOSS = "softmax_cross_entropy"


def trainer(model, *, rate=0.3, train=None, **settings):
    lora = Lora(**{"rank": 4, "alpha": 8, **settings})
    return onnxtrain.Trainer(model, loss=LOSS, optimizer=onnxtrain.SGD(rate), lora=lora, train=train)


def run(model, x):
    data = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(data).run(None, {"input_ids": x})[0]


def weights(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_the_adapted_model_begins_as_the_model_is_and_learns(packed, dora):
    model, (x, y) = decoder(packed=packed), batch()
    learner = trainer(model, dora=dora)
    np.testing.assert_allclose(learner.predict(x), run(model, x), atol=5e-6)
    losses = [learner.train_step(x, y) for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0]
    names = {f"model.layers.{i}.self_attn.{p}_proj.lora_{m}.weight" for i in (0, 1) for p in "qkvo" for m in "AB"}
    assert names == {name for name in learner.parameters if not name.endswith("magnitude_vector")}
    assert sum(name.endswith("magnitude_vector") for name in learner.parameters) == (8 if dora else 0)


def linear(kind):
    """y = x W + b of three features, four results; and W as [in, out]."""
    random = np.random.default_rng(3)
    w, b = random.standard_normal((3, 4)).astype(np.float32), random.standard_normal(4).astype(np.float32)
    text = {
        "MatMul": "y = MatMul(x, fc__weight)",
        "MatMul and Add": "h = MatMul(x, fc__weight) y = Add(h, fc__bias)",
        "Gemm": "y = Gemm<transB=1>(x, fc__weight, fc__bias)",
    }[kind]
    model = parsed(f"""g (float[n,3] x) => (float[n,4] y) {{ {text} }}""")
    model.graph.initializer.append(numpy_helper.from_array(w.T.copy() if kind == "Gemm" else w, "fc.weight"))
    if kind != "MatMul":
        model.graph.initializer.append(numpy_helper.from_array(b, "fc.bias"))
    return model, w, b if kind != "MatMul" else np.zeros(4, np.float32)


@pytest.mark.parametrize("kind", ["MatMul", "MatMul and Add", "Gemm"])
@pytest.mark.parametrize("dora", [False, True])
def test_a_step_is_that_of_the_formula(kind, dora):
    """The gradient by differences of the loss, with the norms of DoRA as they are before the step."""
    model, w, b = linear(kind)
    random = np.random.default_rng(4)
    x, target = random.standard_normal((6, 3)).astype(np.float32), random.standard_normal((6, 4)).astype(np.float32)
    lora = Lora(rank=2, alpha=3, targets="fc", dora=dora)
    learner = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.SGD(0.1), lora=lora)
    names = list(learner.parameters)
    for name in names:
        learner.parameters[name] = random.standard_normal(learner.parameters[name].shape).astype(np.float32)
    before = {name.removeprefix("fc.lora_"): np.array(learner.parameters[name], np.float64) for name in names}
    norm = np.linalg.norm(w + 1.5 * before["A.weight"] @ before["B.weight"], axis=0)

    def loss(values):
        whole = w + 1.5 * values["A.weight"] @ values["B.weight"]
        if dora:
            whole = whole * values["magnitude_vector"] / norm
        return np.mean((x @ whole + b - target) ** 2)

    assert learner.train_step(x, target) == pytest.approx(loss(before), rel=1e-5)
    for name, array in before.items():
        expected = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            sides = [copy.deepcopy(before) for _ in range(2)]
            for side, step in zip(sides, (1e-6, -1e-6), strict=True):
                side[name][index] += step
            expected[index] = (loss(sides[0]) - loss(sides[1])) / 2e-6
        got = (array - learner.parameters[f"fc.lora_{name}"]) / 0.1
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-5, err_msg=name)


def test_embeddings_have_adapters_too():
    model, (x, y) = decoder(), batch()
    learner = trainer(model, targets=["embed_tokens"])
    assert learner.parameters["model.embed_tokens.lora_A.weight"].shape == (13, 4)
    assert not learner.parameters["model.embed_tokens.lora_A.weight"].any()
    losses = [learner.train_step(x, y) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("window", "dora"), [(1, False), (3, False), (3, True)])
def test_a_convolution_with_its_adapter_is_one_with_the_merged_weight(window, dora, tmp_path):
    random = np.random.default_rng(0)
    pads = "[1,1,1,1]" if window == 3 else "[0,0,0,0]"
    model = parsed(f"""g (float[n,2,5,5] x) => (float[n,4] y) {{
            h = Conv<pads={pads}, strides=[2,2]>(x, conv__weight, conv__bias) p = GlobalAveragePool(h) y = Flatten(p)
        }}""")
    weight = random.standard_normal((4, 2, window, window)).astype(np.float32)
    for name, array in (("conv.weight", weight), ("conv.bias", np.arange(4, dtype=np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    x, y = random.standard_normal((6, 2, 5, 5)).astype(np.float32), np.arange(6) % 4
    learner = trainer(model, targets="conv", dora=dora)
    assert learner.parameters["conv.lora_A.weight"].shape == (4, 2, window, window)
    assert learner.parameters["conv.lora_B.weight"].shape == (4, 4, 1, 1)
    losses = [learner.train_step(x, y) for _ in range(5)]
    assert losses[-1] < losses[0]
    learner.save(tmp_path / "merged.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "merged.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], learner.predict(x), atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"packed": True, "targets": "*.{q,v}_proj"}])
def test_the_merged_model_computes_what_the_adapted_one_does(settings, tmp_path):
    settings = dict(settings)
    model, (x, y) = decoder(packed=settings.pop("packed", False)), batch()
    learner = trainer(model, **settings)
    for _ in range(3):
        learner.train_step(x, y)
    learner.save(tmp_path / "merged.onnx")
    expected = learner.predict(x)
    assert np.abs(run(model, x) - expected).max() > 0.1
    np.testing.assert_allclose(run(str(tmp_path / "merged.onnx"), x), expected, atol=1e-5)
    before, after = weights(model), weights(onnx.load(tmp_path / "merged.onnx"))
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {name for name in before if "_proj.weight" in name and "self_attn" in name} & changed
    assert len(changed) == (2 if "targets" in settings else 8)


def test_the_model_that_was_given_stays_as_it_is(tmp_path):
    path, (x, y) = tmp_path / "base.onnx", batch()
    onnx.save(decoder(), path)
    before = path.read_bytes()
    learner = trainer(path)
    learner.train_step(x, y)
    learner.save(tmp_path / "adapter.onnx_adapter")
    learner.save(tmp_path / "merged.onnx")
    assert path.read_bytes() == before


def test_train_names_what_is_trained_whole_beside_adapters():
    model, (x, y) = decoder(), batch()
    learner = trainer(model, targets="q_proj", train=["lm_head.weight", "model.norm.weight"])
    assert {name for name in learner.parameters if "lora" not in name} == {"lm_head.weight", "model.norm.weight"}
    before = np.array(learner.parameters["lm_head.weight"])
    learner.train_step(x, y)
    assert (learner.parameters["lm_head.weight"] != before).any()


def test_dropout_drops_in_training_only():
    model, (x, y) = decoder(), batch()
    first, second = trainer(model), trainer(model, dropout=0.5)
    for name in second.parameters:  # B of zeros would hide it
        second.parameters[name] = first.parameters[name] = np.full(first.parameters[name].shape, 0.1, np.float32)
    assert first.evaluate((x, y))["loss"] == second.evaluate((x, y))["loss"]
    assert first.train_step(x, y) != second.train_step(x, y)
    assert first.evaluate((x, y)) == pytest.approx(trainer_loss(model, first, x, y))


def trainer_loss(model, learner, x, y):
    other = trainer(model)
    other.set_weights(learner.get_weights())
    return other.evaluate((x, y))


def test_copies_and_pickles_go_on_alike():
    model, (x, y) = decoder(), batch()
    learner = trainer(model, dropout=0.1)
    learner.train_step(x, y)
    others = [copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))]
    expected = [learner.train_step(x, y) for _ in range(2)]
    for other in others:
        assert [other.train_step(x, y) for _ in range(2)] == expected


def test_a_training_is_resumed(tmp_path):
    model, data = decoder(), batch(rows=8)

    def course(epochs, folder, **more):
        learner = trainer(model)
        learner.fit(data, epochs=epochs, batch_size=4, checkpoint=folder, **more)
        return learner.get_weights(flat=True)

    whole = course(3, tmp_path / "a")
    course(1, tmp_path / "b")
    resumed = course(3, tmp_path / "b", resume=True)
    np.testing.assert_array_equal(whole, resumed)


def test_a_training_model_has_adapters(tmp_path):
    model, (x, y) = decoder(), batch()
    lora = Lora(rank=4, alpha=8, dora=True)
    rule = onnxtrain.SGD(0.3)
    path = tmp_path / "training.onnx"
    onnx.save(onnxtrain.training_model(model, loss=LOSS, optimizer=rule, lora=lora), path)
    session = onnxtrain.TrainingSession(path)
    learner = trainer(model, dora=True)
    for _ in range(3):
        found = session.step({"input_ids": x, "target": y, "learning_rate": np.float32(0.3)})
        assert float(found["loss"]) == pytest.approx(learner.train_step(x, y), abs=1e-6)


def test_rank_stabilized_scale_and_first_values():
    assert Lora(rank=4, alpha=8, rslora=True).scale == 4
    found = trainer(decoder(), init="gaussian", rank=2).parameters
    a = np.concatenate([array.ravel() for name, array in found.items() if "lora_A" in name])
    assert a.std() == pytest.approx(0.5, rel=0.2)
    uniform = trainer(decoder()).parameters
    a = np.concatenate([array.ravel() for name, array in uniform.items() if "lora_A" in name])
    assert 0.2 < np.abs(a).max() <= 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank of Lora is 0; it must be an integer of at least 1\."),
        ({"rank": True}, "rank of Lora is True"),
        ({"alpha": 0}, r"alpha of Lora is 0; it must be a number above 0\."),
        ({"alpha": "a"}, "alpha of Lora is 'a'"),
        ({"dropout": 1.0}, r"dropout of Lora is 1.0; it must be at least 0 and below 1\."),
        ({"init": "zeros"}, r"init of Lora is 'zeros'; it is 'kaiming' or 'gaussian' or 'pissa' or 'loftq'\."),
        ({"targets": []}, r"targets of Lora is \[\]; it must be a pattern, or a list of some\."),
        (
            {"targets": "nothing"},
            r"lora_targets='nothing' matches no layer .* the model has model.embed_tokens, .*adaptable",
        ),
        ({"targets": "embed_tokens", "dora": True}, "magnitudes of columns, but 'model.embed_tokens' is a Gather"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(OptionError, match=message):
        trainer(decoder(), **settings)


def test_other_values_are_not_settings():
    with raises_sentence("lora_without_settings", what="lora", got=8):
        onnxtrain.Trainer(decoder(), loss=LOSS, lora=8)


def test_a_weight_that_is_read_twice_cannot_take_an_adapter_in(tmp_path):
    model = parsed("""g (float[n,3] x) => (float[n,3] y) <float[3,3] fc__weight = {1,2,3,4,5,6,7,8,9}>
        { h = MatMul(x, fc__weight) y = MatMul(h, fc__weight) }""")
    lora = Lora(targets="fc")
    learner = onnxtrain.Trainer(model, loss="mean_squared_error", lora=lora)
    with pytest.raises(OptionError, match=r"'fc\.weight' of 'fc' is read 2 times"):
        learner.save(tmp_path / "merged.onnx")
    learner.save(tmp_path / "adapter.onnx_adapter")
