"""Settings of single layers, initial values from singular values, and rates of A and B."""

import json
import math

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxtrain
from adapters.test_quantized_bases import BASES, INPUTS, OUTPUTS, data, run, with_weights
from onnxtrain import Lora
from onnxtrain.adapters import convert_adapter, describe_adapter
from onnxtrain.adapters.initial import principal
from onnxtrain.errors import ModelError, OptionError
from sentences import raises_sentence
from zoo.decoder import batch, decoder, parsed

PATTERNS = {
    "rank_pattern": {"*.0.*.q_proj": 2, "q_proj": 3, "*.o_proj": 6},
    "alpha_pattern": {"{k,v}_proj": 5.0, "o_proj": 12},
}


def trainer(model, *, rate=0.3, **settings):
    lora = Lora(**{"rank": 4, "alpha": 8, **settings})
    return onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.SGD(rate), lora=lora)


def tuned(model, tmp_path, **settings):
    """A trainer after five steps, whose loss has fallen, and its adapter in both formats."""
    learner = trainer(model, **settings)
    losses = [learner.train_step(*batch()) for _ in range(5)]
    assert losses[-1] < losses[0]
    learner.save(tmp_path / "tuned.onnx_adapter")
    learner.save(tmp_path / "tuned")
    return learner


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_layers_have_the_ranks_and_alphas_of_the_first_pattern_that_matches(tmp_path, packed, rslora):
    model = decoder(packed=packed)
    learner = tuned(model, tmp_path, **PATTERNS, rslora=rslora)
    ranks = {("0", "q"): 2, ("1", "q"): 3, ("0", "o"): 6, ("1", "o"): 6}
    alphas = {"q": 8, "k": 5, "v": 5, "o": 12}
    for path in (tmp_path / "tuned.onnx_adapter", tmp_path / "tuned"):
        for row in describe_adapter(path)["layers"]:
            index, part = row["name"].split(".")[2], row["name"].split(".")[-1][0]
            rank = ranks.get((index, part), 4)
            assert row["rank"] == rank
            assert row["scale"] == pytest.approx(alphas[part] / (math.sqrt(rank) if rslora else rank))
    manifest = json.loads((tmp_path / "tuned.onnx_adapter.json").read_text())
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    path = "model.layers.{}.self_attn.{}_proj"
    expected = {path.format(index, part): rank for (index, part), rank in ranks.items()}
    assert manifest["rank_pattern"] == config["rank_pattern"] == expected
    expected = {path.format(i, part): alpha for i in (0, 1) for part, alpha in alphas.items() if alpha != 8}
    assert manifest["alpha_pattern"] == config["alpha_pattern"] == expected
    again = trainer(model, adapter=tmp_path / "tuned")
    np.testing.assert_allclose(again.predict(batch()[0]), learner.predict(batch()[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"up_proj": 2}}, r"lora_rank_pattern='up_proj' matches no layer that gets an adapter; the"),
        ({"alpha_pattern": {"*.2.*": 2}}, r"lora_alpha_pattern='\*.2.\*' matches no layer that gets an adapter"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern of Lora for 'q_proj' is 0; it must be an integer of at"),
        ({"rank_pattern": {"q_proj": 2.5}}, r"rank_pattern of Lora for 'q_proj' is 2.5; it must be an integer"),
        ({"alpha_pattern": {"q_proj": -1}}, r"alpha_pattern of Lora for 'q_proj' is -1; it must be a number above 0"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern of Lora is \['q_proj'\]; it maps patterns"),
        ({"rank_pattern": {"q_proj": 1}, "adapter": "a"}, r"rank_pattern of Lora is given, but the adapter 'a'"),
        ({"lr_ratio": 0}, r"lr_ratio of Lora is 0; it must be a number above 0"),
        ({"init": "loftq"}, r'init="loftq" of Lora needs the weights before quantization; give the float model'),
        ({"original": "a.onnx"}, r'original of Lora is for init="loftq", but init is \'kaiming\''),
        ({"init": "svd"}, r"init of Lora is 'svd'; it is 'kaiming' or 'gaussian' or 'pissa' or 'loftq'"),
        ({"init": "pissa", "rank": 17}, r"rank is 17, but the weight of '.*' has only 16 singular values"),
    ],
)
def test_settings_that_fit_nothing(settings, message):
    with pytest.raises(OptionError, match=message):
        trainer(decoder(), **settings)


def test_patterns_of_peft_are_regular_expressions(tmp_path):
    """The keys of a folder as PEFT reads them, and keys that it would not."""
    tuned(decoder(), tmp_path, rank_pattern={"*.1.*.q_proj": 2}, alpha_pattern={"v_proj": 4})
    path = tmp_path / "tuned" / "adapter_config.json"
    config = json.loads(path.read_text())
    before = describe_adapter(tmp_path / "tuned")
    for ranks in ({r"layers\.1\..*q_proj": 2}, {"^model.layers.1.self_attn.q_proj": 2, "q_proj": 4}):
        path.write_text(json.dumps(config | {"rank_pattern": ranks, "alpha_pattern": {".*(v)_proj": 4}}))
        assert describe_adapter(tmp_path / "tuned") == before
    for key, message in (("(", "which is no pattern: "), ("(a+)+", "which repeats a group; name the layers")):
        path.write_text(json.dumps(config | {"rank_pattern": {key: 2}}))
        with pytest.raises(ModelError, match=message):
            describe_adapter(tmp_path / "tuned")
    path.write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    with raises_sentence("peft_changed_base", what=tmp_path / "tuned/adapter_config.json", got="pissa"):
        describe_adapter(tmp_path / "tuned")


def test_a_name_that_ends_another_gets_a_pattern_for_itself(tmp_path):
    random = np.random.default_rng(0)
    model = parsed("g (float[n,4] x) => (float[n,4] y) { h = MatMul(x, block__fc__weight) y = MatMul(h, fc__weight) }")
    for name in ("block.fc.weight", "fc.weight"):
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal((4, 4), np.float32), name))
    lora = Lora(rank=2, targets="*", rank_pattern={"block.*": 2, "fc": 1})
    learner = onnxtrain.Trainer(model, loss="mean_squared_error", lora=lora)
    learner.save(tmp_path / "tuned")
    assert {row["name"]: row["rank"] for row in describe_adapter(tmp_path / "tuned")["layers"]} == {
        "block.fc": 2,
        "fc": 1,
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_pissa_begins_as_the_model_is_with_its_principal_part_in_the_adapter(tmp_path, packed, dora):
    """The first outputs, the first matrices, and the adapter of twice the rank for the unchanged model."""
    model, x = decoder(packed=packed), batch()[0]
    plain = onnxtrain.Trainer(model, loss="softmax_cross_entropy").predict(x)
    learner = trainer(model, init="pissa", dora=dora, dropout=0.1)
    np.testing.assert_allclose(learner.predict(x), plain, atol=1e-5)
    a, b = (learner.parameters[f"model.layers.1.self_attn.k_proj.lora_{side}.weight"] for side in "AB")
    name = f"model.layers.1.self_attn.{'qkv' if packed else 'k'}_proj.weight"
    w = numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == name))
    w = w[:, 16:32] if packed else w
    u, s, v = np.linalg.svd(w)
    np.testing.assert_allclose(2 * a @ b, (u[:, :4] * s[:4]) @ v[:4], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=1), rtol=1e-4)
    learner = tuned(model, tmp_path, init="pissa", dora=dora)
    expected = learner.predict(x)
    assert np.abs(expected - plain).max() > 0.01
    convert_adapter_back = tmp_path / "back.onnx_adapter"
    onnx.save(model, tmp_path / "model.onnx")
    convert_adapter(tmp_path / "model.onnx", tmp_path / "tuned", convert_adapter_back)
    for path in (tmp_path / "tuned.onnx_adapter", tmp_path / "tuned", convert_adapter_back):
        found = describe_adapter(path)
        assert (found["rank"], found["alpha"], found["layers"][0]["scale"]) == (8, 16, 2)
        np.testing.assert_allclose(trainer(model, rank=8, adapter=path).predict(x), expected, atol=1e-5)
    learner.save(tmp_path / "merged.onnx")
    merged = onnxtrain.Trainer(tmp_path / "merged.onnx", loss="softmax_cross_entropy").predict(x)
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_pissa_of_convolutions_and_embeddings():
    model = onnxtrain.examples.small_resnet()
    x = np.random.default_rng(0).standard_normal((2, 1, 28, 28)).astype(np.float32)
    x = x if model.graph.input[0].type.tensor_type.shape.dim[1].dim_value == 1 else np.repeat(x, 3, 1)
    plain = onnxtrain.Trainer(model, loss="cross_entropy")
    learner = onnxtrain.Trainer(model, loss="cross_entropy", lora=Lora(rank=2, init="pissa"))
    np.testing.assert_allclose(learner.predict(x), plain.predict(x), atol=1e-5)
    assert all(np.abs(value).max() > 1e-3 for value in learner.parameters.values())
    ids = batch()[0]
    learner = trainer(decoder(), init="pissa", targets="embed_tokens")
    np.testing.assert_allclose(learner.predict(ids), trainer(decoder()).predict(ids), atol=1e-5)


@pytest.mark.parametrize("kind", BASES)
def test_loftq_begins_nearer_to_the_original(kind, tmp_path):
    """The error of the weights is the singular values that the rank leaves."""
    model, dense = BASES[kind]()
    noise = np.random.default_rng(1).standard_normal(dense.shape).astype(np.float32)
    original = dense + 0.02 * noise
    plain = parsed(f"g (float[n,{INPUTS}] x) => (float[n,{OUTPUTS}] y) {{ h = Tanh(x) y = MatMul(h, fc__weight) }}")
    with_weights(plain, fc__weight=np.ascontiguousarray(original))
    onnx.save(plain, tmp_path / "float.onnx")
    lora = Lora(rank=3, alpha=6, targets="fc", init="loftq", original=tmp_path / "float.onnx")
    learner = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.SGD(0.1), lora=lora)
    a, b = (learner.parameters[f"fc.lora_{side}.weight"] for side in "AB")
    left = np.linalg.svd(0.02 * noise)[1][3:]
    assert np.linalg.norm(dense + 2 * a @ b - original) == pytest.approx(np.linalg.norm(left), rel=1e-3)
    x, _ = data()
    np.testing.assert_allclose(learner.predict(x) - run(model, x), np.tanh(x) @ (2 * a @ b), atol=1e-5)
    assert np.abs(learner.predict(x) - run(plain, x)).max() < np.abs(run(model, x) - run(plain, x)).max()


def test_loftq_needs_the_weights_before_quantization(tmp_path):
    model, _ = BASES["4 bits"]()
    onnx.save(decoder(), tmp_path / "other.onnx")
    lora = Lora(rank=2, targets="fc", init="loftq", original=tmp_path / "other.onnx")
    with raises_sentence("float_model_without_layer", what=tmp_path / "other.onnx", wanted="fc"):
        onnxtrain.Trainer(model, loss="mean_squared_error", lora=lora)
    lora = Lora(rank=2, init="loftq", original=tmp_path / "other.onnx")
    with raises_sentence("loftq_not_quantized", what="init", got="loftq"):
        onnxtrain.Trainer(decoder(), loss="softmax_cross_entropy", lora=lora)
    small = parsed(f"g (float[n,{INPUTS}] x) => (float[n,2] y) {{ y = MatMul(x, fc__weight) }}")
    onnx.save(with_weights(small, fc__weight=np.ones((INPUTS, 2), np.float32)), tmp_path / "small.onnx")
    lora = Lora(rank=2, targets="fc", init="loftq", original=tmp_path / "small.onnx")
    with raises_sentence("float_model_shape", what="fc", got=(40, 2), wanted=(40, 6)):
        onnxtrain.Trainer(model, loss="mean_squared_error", lora=lora)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_the_principal_part_is_the_best_approximation(shape):
    w = np.random.default_rng(0).standard_normal(shape)
    u, s, v = np.linalg.svd(w, full_matrices=False)
    for rank in (1, 3, 5):
        a, b = principal(w, rank, 0.5)
        np.testing.assert_allclose(0.5 * a @ b, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-10)
    a, b = principal(np.outer(np.arange(4), np.ones(3)), 2)  # of rank 1
    np.testing.assert_allclose(a @ b, np.outer(np.arange(4), np.ones(3)), atol=1e-10)
    assert np.isfinite(a).all()
    assert (np.abs(a).sum(0) + np.abs(b).sum(1) > 0.5).all()  # the second pair has one unit vector


def test_b_learns_faster_by_the_ratio():
    """A step of SGD moves B by the ratio more; the ratio multiplies the rates of groups."""
    model, (x, y) = decoder(), batch()
    groups = [onnxtrain.Group("*.0.*.q_proj.lora_B.weight", lr_scale=0.5)]

    def step(ratio, groups=(), **settings):
        lora = Lora(rank=4, lr_ratio=ratio, **settings)
        learner = onnxtrain.Trainer(
            model, loss="softmax_cross_entropy", optimizer=onnxtrain.SGD(0.1), lora=lora, groups=groups
        )
        before = {name: np.array(value) for name, value in learner.parameters.items()}
        learner.train_step(x, y)
        return {name: np.array(value) - before[name] for name, value in learner.parameters.items()}

    plain, moved, grouped = step(1, dora=True), step(16, dora=True), step(16, groups, dora=True)
    for name, change in plain.items():
        factor = 1 if "lora_A" in name else 16
        np.testing.assert_allclose(moved[name], factor * change, rtol=1e-4, atol=1e-6)
        factor *= 0.5 if name.endswith("0.self_attn.q_proj.lora_B.weight") else 1
        np.testing.assert_allclose(grouped[name], factor * change, rtol=1e-4, atol=1e-6)
    plain, moved = step(1, targets="embed_tokens"), step(16, targets="embed_tokens")
    for name, change in plain.items():
        np.testing.assert_array_equal(moved[name], change)
