"""Weighted sums of adapters, against their dense sums and against PEFT."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import Lora
from onnxtrain.adapters import add_slots, add_weighted, convert_adapter, describe_adapter, merge_adapter
from onnxtrain.adapters.files import element_types, read_adapter, write_file
from onnxtrain.errors import ModelError, OptionError
from sentences import raises_sentence
from zoo.decoder import decoder

COMBINATIONS = ["cat", "svd", "linear"]


def adapter(model, path, *, seed=0, **settings):
    """An adapter whose matrices are random."""
    lora = Lora(**{"rank": 3, "alpha": 6, **settings})
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", lora=lora)
    random = np.random.default_rng(seed)
    for name, value in trainer.parameters.items():
        trainer.parameters[name] = 0.3 * random.standard_normal(value.shape).astype(np.float32)
    trainer.save(path)
    return path


@pytest.fixture
def pair(tmp_path):
    onnx.save(decoder(), tmp_path / "model.onnx")
    first = adapter(tmp_path / "model.onnx", tmp_path / "a.onnx_adapter", targets=["q_proj", "embed_tokens"])
    second = adapter(tmp_path / "model.onnx", tmp_path / "b.onnx_adapter", seed=1, rslora=True, targets="{q,v}_proj")
    return tmp_path / "model.onnx", first, second


def deltas(path):
    return {name: entry.delta() for name, entry in read_adapter(path).entries.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [".onnx_adapter", ""])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_sum_is_exact_and_belongs_to_the_model(pair, tmp_path, form, with_model):
    model, *paths = pair
    if not form:
        for path in paths:
            convert_adapter(model, path, path.with_suffix(""))
        paths = [path.with_suffix("") for path in paths]
    add_weighted(list(zip(paths, (0.5, -2), strict=True)), tmp_path / f"sum{form}", model=model if with_model else None)
    first, second, found = map(deltas, (*paths, tmp_path / f"sum{form}"))
    assert found.keys() == first.keys() | second.keys()
    for name, delta in found.items():
        expected = 0.5 * first.get(name, 0) - 2 * second.get(name, 0)
        np.testing.assert_allclose(delta, expected, atol=1e-5)
    assert describe_adapter(tmp_path / f"sum{form}", model=model)["names_its_model"]
    with pytest.raises(ModelError, match="was made for another model"):
        describe_adapter(tmp_path / f"sum{form}", model=decoder(seed=3))


def test_svd_is_the_best_approximation_of_its_rank(pair, tmp_path):
    _, *paths = pair
    terms = list(zip(paths, (0.7, 0.4), strict=True))
    add_weighted(terms, tmp_path / "sum", combination="svd", rank=2, model=pair[0])
    add_weighted(terms, tmp_path / "whole", model=pair[0])
    whole = deltas(tmp_path / "whole")
    for name, delta in deltas(tmp_path / "sum").items():
        u, s, v = np.linalg.svd(whole[name])
        np.testing.assert_allclose(delta, (u[:, :2] * s[:2]) @ v[:2], atol=1e-5)
    add_weighted(terms, tmp_path / "usual", combination="svd", model=pair[0])
    assert describe_adapter(tmp_path / "usual")["rank"] == 3
    assert describe_adapter(tmp_path / "whole")["rank"] == 6


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_sums_of_convolutions(tmp_path, combination):
    model = onnxtrain.examples.small_resnet()
    paths = []
    for seed in (1, 2):
        trainer = onnxtrain.Trainer(model, loss="cross_entropy", lora=Lora(rank=2), seed=seed)
        for name, value in trainer.parameters.items():
            trainer.parameters[name] = np.random.default_rng(seed).standard_normal(value.shape).astype(np.float32)
        paths.append(tmp_path / f"{seed}.onnx_adapter")
        trainer.save(paths[-1])
    add_weighted([(path, 0.5) for path in paths], tmp_path / "sum.onnx_adapter", combination=combination, rank=None)
    first, second, found = map(deltas, (*paths, tmp_path / "sum.onnx_adapter"))
    for name, delta in found.items():
        whole = 0.5 * (first[name] + second[name])
        if combination == "cat":
            np.testing.assert_allclose(delta, whole, atol=1e-5)
        if combination == "svd":
            left = np.linalg.svd(whole.reshape(len(whole), -1))[1][2:]
            assert np.linalg.norm(delta - whole) == pytest.approx(np.linalg.norm(left), rel=1e-3)
    merge_adapter(model, tmp_path / "sum.onnx_adapter", tmp_path / "merged.onnx")


def test_element_types_are_those_of_the_adapters(tmp_path):
    found = read_adapter(adapter(decoder(), tmp_path / "a.onnx_adapter"))
    halves = dict.fromkeys(found.entries, ir.DataType.FLOAT16)
    write_file(tmp_path / "half.onnx_adapter", found, halves)
    add_weighted([(tmp_path / "half.onnx_adapter", 1.5)], tmp_path / "b.onnx_adapter")
    assert element_types(tmp_path / "b.onnx_adapter") == halves


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_sum_beyond_the_largest_number_is_refused(tmp_path, combination):
    path = adapter(decoder(), tmp_path / "a.onnx_adapter")
    with pytest.raises(ModelError, match="not finite"):
        add_weighted([(path, 1e300), (path, 1)], tmp_path / "b.onnx_adapter", combination=combination)


@pytest.mark.parametrize(
    ("terms", "settings", "message"),
    [
        ([], {}, "adapters is empty; it takes pairs"),
        ([("a.onnx_adapter",)], {}, r"adapters has \('a.onnx_adapter',\); it takes pairs"),
        ([("a.onnx_adapter", 0)], {}, r"the weight of '.*a.onnx_adapter' is 0, so that it adds nothing"),
        ([("a.onnx_adapter", float("nan"))], {}, r"is nan; it must be a finite number"),
        ([("a.onnx_adapter", 1)], {"combination": "ties"}, r"combination is 'ties'; it is 'cat' or 'svd' or 'linear'"),
        ([("a.onnx_adapter", 1)], {"rank": 3}, r'rank is for combination="svd", but combination is \'cat\''),
        ([("a.onnx_adapter", 1)], {"combination": "svd", "rank": 0}, "rank is 0; it must be an integer of at least 1"),
        ([("a.onnx_adapter", 1), ("folder", 1)], {}, r"may name the layers differently; give the model that both"),
        ([("a.onnx_adapter", 1), ("dora.onnx_adapter", 1)], {}, r"dora.onnx_adapter' has magnitudes \(DoRA\)"),
        ([("a.onnx_adapter", 1), ("other.onnx_adapter", 1)], {}, "were made for different models"),
        ([("a.onnx_adapter", 1), ("two.onnx_adapter", 1)], {"combination": "linear"}, r"has \[2, 3\]; use \"cat\""),
    ],
)
def test_sums_that_do_not_exist(tmp_path, monkeypatch, terms, settings, message):
    monkeypatch.chdir(tmp_path)
    adapter(decoder(), tmp_path / "a.onnx_adapter")
    for name, own in {"dora": {"dora": True}, "two": {"rank": 2}}.items():
        adapter(decoder(), tmp_path / f"{name}.onnx_adapter", **own)
    adapter(decoder(seed=1), tmp_path / "other.onnx_adapter")
    adapter(decoder(), tmp_path / "folder")
    with pytest.raises((OptionError, ModelError), match=message):
        add_weighted(terms, tmp_path / "sum.onnx_adapter", **settings)
    assert not (tmp_path / "sum.onnx_adapter").exists()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.5, -0.5)])
def test_sums_are_those_of_peft(tmp_path, combination, weights):
    """The change of every weight by PEFT's add_weighted_adapter; "linear" adds products of both, too."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    base = torch.nn.Sequential()
    base.add_module("one", torch.nn.Linear(6, 9))
    base.add_module("two", torch.nn.Linear(9, 5))
    torch.manual_seed(0)
    config = {"r": 3, "target_modules": ["one", "two"], "init_lora_weights": False}
    model = peft.get_peft_model(base, peft.LoraConfig(**config, lora_alpha=6), adapter_name="a")
    model.add_adapter("b", peft.LoraConfig(**config, lora_alpha=4))
    model.save_pretrained(tmp_path)
    rank = 2 if combination == "svd" else None
    model.add_weighted_adapter(["a", "b"], list(weights), "sum", combination_type=combination, svd_rank=rank)
    terms = [(tmp_path / name, weight) for name, weight in zip("ab", weights, strict=True)]
    add_weighted(terms, tmp_path / "ours", combination=combination, rank=rank)
    for name, delta in deltas(tmp_path / "ours").items():
        expected = model.base_model.model.get_submodule(name).get_delta_weight("sum").detach().numpy().T
        np.testing.assert_allclose(delta, expected, atol=1e-5)


def with_head(model, path, *, head=0.0, seed=0, **settings):
    """An adapter beside an output layer that is trained in full: its values plus a number."""
    trainer = onnxtrain.Trainer(
        model, loss="cross_entropy", lora=Lora(rank=2, targets="layer1"), train="layer3.*" if head else (), **settings
    )
    random = np.random.default_rng(seed)
    for name, value in trainer.parameters.items():
        added = head if name.startswith("layer3") else random.standard_normal(value.shape)
        trainer.parameters[name] = (value + added).astype(np.float32)
    trainer.save(path)
    return path


@pytest.mark.parametrize("form", [".onnx_adapter", ""])
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("heads", [(0.5, 0), (0, 0.5), (0.5, 0.5)])
def test_a_sum_has_the_head_of_one_adapter_or_of_all(tmp_path, form, with_model, heads):
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    paths = [with_head(model, tmp_path / f"{index}{form}", head=head, seed=index) for index, head in enumerate(heads)]
    terms, path = list(zip(paths, (0.7, -2), strict=True)), tmp_path / f"sum{form}"
    add_weighted(terms, path, model=model if with_model else None)
    merge_adapter(model, path, tmp_path / "merged.onnx")
    before = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    after = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(tmp_path / "merged.onnx").graph.initializer
    }
    first, second = (next(iter(deltas(each).values())) for each in paths)
    added = after["layer1.weight"] - before["layer1.weight"]
    np.testing.assert_allclose(added, (0.7 * first - 2 * second).T, atol=1e-4)
    for name in ("layer3.weight", "layer3.bias"):
        np.testing.assert_array_equal(after[name], before[name] + np.float32(0.5))


@pytest.mark.parametrize("form", [".onnx_adapter", ""])
@pytest.mark.parametrize("with_model", [False, True])
def test_different_heads_have_no_sum(tmp_path, form, with_model):
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    paths = [with_head(model, tmp_path / f"{index}{form}", head=head) for index, head in enumerate((0.5, 1))]
    terms = [(path, 1) for path in paths]
    with raises_sentence("different_full_tensors", what="layer3.bias"):
        add_weighted(terms, tmp_path / f"sum{form}", model=model if with_model else None)


def test_a_sum_is_trained_merged_and_run_like_any_adapter(pair, tmp_path):
    model, *paths = pair
    both = tmp_path / "both.onnx_adapter"
    add_weighted(list(zip(paths, (0.5, -2), strict=True)), both, model=model)
    x = np.random.default_rng(0).integers(0, 13, (2, 5))
    learner = onnxtrain.Trainer(
        model, loss="softmax_cross_entropy", optimizer=onnxtrain.SGD(0.1), lora=Lora(adapter=both)
    )
    expected = learner.predict(x)
    merge_adapter(model, both, tmp_path / "merged.onnx")
    np.testing.assert_allclose(onnxtrain.predict(tmp_path / "merged.onnx", x), expected, atol=1e-4)
    add_slots(model, tmp_path / "slots.onnx", adapter=both)
    loaded, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    loaded.Load(str(both))
    options.add_active_adapter(loaded)
    session = onnxruntime.InferenceSession(tmp_path / "slots.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x}, options)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    losses = [learner.train_step(x, x) for _ in range(4)]
    assert losses[-1] < losses[0]
