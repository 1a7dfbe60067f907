"""Models of onnxruntime-genai's builder: full training, and frozen low-bit weights."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from zoo.language_model import GROUPS, LAYERS, SIZE, WORDS, language_model

pytestmark = pytest.mark.thorough  # it takes seconds

IDS = np.random.default_rng(1).integers(0, WORDS, (3, 7))
MASK = np.ones_like(IDS)
PADDED = np.array([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]])
TARGETS = np.random.default_rng(2).integers(0, WORDS, (3, 7))
FEEDS = {"input_ids": IDS, "attention_mask": PADDED}


def trainer(model, **options):
    return onnxtrain.Trainer(model, loss="softmax_cross_entropy", output="logits", **options)


def loss_of_the_runtime(model, mask):
    """Return the loss of ONNX Runtime's logits, with empty KV caches."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    empty = np.zeros((3, GROUPS, 0, SIZE), np.float32)
    caches = {f"past_key_values.{n}.{part}": empty for n in range(LAYERS) for part in ("key", "value")}
    logits = session.run(["logits"], {"input_ids": IDS, "attention_mask": mask} | caches)[0].astype(np.float64)
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(probability, TARGETS[..., None], -1)).mean()


def exact(model):
    """Return a model whose matmuls with low-bit weights do not round their inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    return copy


@pytest.mark.parametrize("mask", [MASK, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kernels", [False, None])
def test_the_loss_equals_the_runtimes_and_falls(kernels, bits, mask):
    model = language_model(bits=bits)
    made = trainer(model, optimizer="adam(lr=1e-2)", runtime=onnxtrain.RuntimeOptions(kernels=kernels))
    assert [spec.name for spec in made.objective.inputs] == ["input_ids", "attention_mask"]
    feeds = {"input_ids": IDS, "attention_mask": mask}
    losses = [made.train_step(feeds, TARGETS) for _ in range(10)]
    assert losses[0] == pytest.approx(loss_of_the_runtime(exact(model), mask), rel=1e-5)
    assert losses[-1] < losses[0] - 0.3
    products = sum("MatMul" in name for name in made.parameters)
    assert products == (4 * LAYERS + LAYERS + 1 if bits is None else 0)
    assert {"model.embed_tokens.weight", "model.layers.1.post_attention_layernorm.weight"} <= set(made.parameters)
    assert not {"cos_cache", "sin_cache"} & set(made.parameters)


def test_gradients_equal_finite_differences():
    model = language_model()
    names = ["model.layers.0.attn.qkv_proj.MatMul.weight", "model.layers.1.mlp.down_proj.MatMul.weight"]
    rng = np.random.default_rng(3)
    made = trainer(model, optimizer="sgd(lr=1.0)", train=names)
    before = {name: made.parameters[name].copy() for name in names}
    made.train_step(FEEDS, TARGETS)
    gradients = {name: before[name].astype(np.float64) - made.parameters[name] for name in names}
    directions = {name: rng.normal(size=array.shape) for name, array in before.items()}

    def moved(h):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        for tensor in copy.graph.initializer:
            if tensor.name in names:
                array = before[tensor.name] + h * directions[tensor.name]
                tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))
        return loss_of_the_runtime(copy, PADDED)

    h = 1e-3
    measured = (moved(h) - moved(-h)) / (2 * h)
    expected = sum(float(np.sum(gradients[name] * directions[name])) for name in names)
    assert measured == pytest.approx(expected, rel=2e-3)


def test_layers_are_recomputed():
    plain, again = (trainer(language_model(), optimizer="sgd(lr=0.1)", recompute=way) for way in ((), "layers"))
    for _ in range(3):
        assert again.train_step(FEEDS, TARGETS) == pytest.approx(plain.train_step(FEEDS, TARGETS), rel=1e-6)


def test_packed_weights_caches_and_nodes_are_saved_unchanged(tmp_path):
    model = language_model(bits=4)
    made = trainer(model, optimizer="adam(lr=1e-2)")
    made.train_step(FEEDS, TARGETS)
    made.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    for before, after in zip(model.graph.initializer, saved.graph.initializer, strict=True):
        changed = before.SerializeToString() != after.SerializeToString()
        assert changed == (before.name in made.parameters), before.name
    for field in ("node", "input", "output"):
        assert list(getattr(saved.graph, field)) == list(getattr(model.graph, field))


@pytest.mark.parametrize(("dtype", "bits"), [("float16", None), ("bfloat16", None), ("float16", 4), ("bfloat16", 4)])
def test_half_precision_is_trained_in_float32_and_saved_in_half_precision(dtype, bits, tmp_path):
    model = language_model(dtype, bits)
    made = trainer(model, optimizer="adam(lr=1e-2)", freeze="model.embed_tokens.weight")
    losses = [made.train_step(FEEDS, TARGETS) for _ in range(10)]
    if bits is None:
        assert losses[0] == pytest.approx(loss_of_the_runtime(language_model(), PADDED), rel=1e-2)
    assert losses[-1] < losses[0] - 0.05
    assert {array.dtype for array in made.parameters.values()} == {np.dtype(np.float32)}
    made.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    for before, after in zip(model.graph.initializer, saved.graph.initializer, strict=True):
        assert after.data_type == before.data_type
        if before.name in made.parameters:
            kept = made.parameters[before.name].astype(numpy_helper.to_array(before).dtype)
            np.testing.assert_array_equal(numpy_helper.to_array(after), kept)
        else:
            assert before.SerializeToString() == after.SerializeToString()
    for field in ("node", "input", "output"):
        assert list(getattr(saved.graph, field)) == list(getattr(model.graph, field))
    again = trainer(tmp_path / "tuned.onnx", optimizer="adam(lr=1e-2)")
    assert again.evaluate((FEEDS, TARGETS))["loss"] == pytest.approx(made.evaluate((FEEDS, TARGETS))["loss"], rel=1e-2)


def test_predictions_need_no_kv_caches():
    found = onnxtrain.predict(language_model(), FEEDS)
    assert found["logits"].shape == (3, 7, WORDS)
    assert found["present.0.key"].shape == (3, GROUPS, 7, SIZE)
