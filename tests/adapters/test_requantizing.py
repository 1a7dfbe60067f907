"""Quantizing merged weights again: errors of the grid, shared scales, and the share of the loss's fall that is kept."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from adapters.test_quantized_bases import BASES, data, few_bits, trainer
from onnxtrain import Lora
from onnxtrain.adapters import merge_adapter
from onnxtrain.adapters.merging import Grid
from onnxtrain.errors import OptionError


def grid(weights, low, high, *, symmetric, signed=True):
    """A grid of the usual kind: the largest magnitude, or the whole range, and zero."""
    least, most = np.minimum(weights.min(-1, keepdims=True), 0), np.maximum(weights.max(-1, keepdims=True), 0)
    if symmetric:
        scales = np.maximum(-least, most) / ((high - low) // 2)
        zeros = np.full_like(scales, 0 if low < 0 else (high + 1) // 2)
    else:
        scales = (most - least) / (high - low)
        zeros = np.clip(np.rint(low - least / scales), low, high)
    return Grid(scales, zeros, low, high, symmetric, signed, np.dtype(np.float32))


def errors(found, weights):
    return ((weights - found.values(found.rounded(weights))) ** 2).sum(-1)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0, 15), (-8, 7), (0, 3), (-128, 127)])
def test_a_fitted_grid_has_a_smaller_error(low, high, symmetric):
    """In every group at most that of before; over all groups of 4 bits at least 5% less."""
    weights = np.random.default_rng(0).standard_normal((5, 40, 32)).astype(np.float32)
    before = grid(weights, low, high, symmetric=symmetric)
    after = before.fitted(weights)
    assert (errors(after, weights) <= errors(before, weights)).all()
    assert (after.zeros == np.rint(after.zeros)).all()
    assert after.zeros.min() >= low
    assert after.zeros.max() <= high
    if symmetric:
        np.testing.assert_array_equal(after.zeros, before.zeros)
    if high - low == 15:
        assert errors(after, weights).sum() < 0.95 * errors(before, weights).sum()


def test_scales_are_positive_where_they_must_be_and_in_their_type():
    weights = -np.abs(np.random.default_rng(0).standard_normal((3, 32))).astype(np.float32)
    start = grid(weights, -8, 7, symmetric=True, signed=False)
    assert (start.fitted(weights).scales > 0).all()
    half = replace(start, dtype=np.dtype(np.float16)).fitted(weights).scales
    np.testing.assert_array_equal(
        half[half != start.scales], half.astype(np.float16).astype(np.float32)[half != start.scales]
    )
    np.testing.assert_array_equal(start.fitted(np.zeros((3, 32), np.float32)).rounded(np.zeros((3, 32))), 0)


def tuned(model, path, scale=1.0):
    learner = trainer(model)
    random = np.random.default_rng(0)
    for name, value in learner.parameters.items():
        learner.parameters[name] = scale * 0.3 * random.standard_normal(value.shape).astype(np.float32)
    learner.save(path)
    return path


@pytest.mark.parametrize("kind", BASES)
def test_scales_that_others_read_stay(kind, tmp_path):
    """Then the error is larger, and only the weight changes."""
    model, _ = BASES[kind]()
    path = tuned(model, tmp_path / "tuned.onnx_adapter")
    (free,) = merge_adapter(model, path, tmp_path / "free.onnx", requantize=True)
    names = [name for name in model.graph.node[-1].input if "scale" in name]
    names = names or [name for node in model.graph.node for name in node.input if "scale" in name]
    model.graph.node.append(onnx.helper.make_node("Identity", names[:1], ["other"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, None))
    path = tuned(model, tmp_path / "other.onnx_adapter")  # with the same values, for this graph
    (held,) = merge_adapter(model, path, tmp_path / "held.onnx", requantize=True)
    assert free.lost < held.lost
    assert held.is_high or held.lost < 0.1
    before = {tensor.name: tensor for tensor in model.graph.initializer}
    after = {tensor.name: tensor for tensor in onnx.load(tmp_path / "held.onnx").graph.initializer}
    assert {name for name in before if before[name] != after[name]} == {"fc.weight"}


@pytest.mark.parametrize("kind", BASES)
def test_scales_stay_where_none_is_better(kind, tmp_path, monkeypatch):
    model, _ = BASES[kind]()
    path = tuned(model, tmp_path / "tuned.onnx_adapter")
    monkeypatch.setattr(Grid, "fitted", lambda self, weights: self)
    merge_adapter(model, path, tmp_path / "merged.onnx", requantize=True)
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    after = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "merged.onnx").graph.initializer
    }
    assert {name for name in before if (before[name] != after[name]).any()} == {"fc.weight"}


def test_the_command_says_where_much_is_lost(tmp_path, capsys):
    from onnxtrain.__main__ import main

    model, _ = few_bits(4, zeros=True)
    onnx.save(model, tmp_path / "model.onnx")
    tuned(model, tmp_path / "tuned.onnx_adapter", scale=0.5)
    names = [str(tmp_path / name) for name in ("model.onnx", "tuned.onnx_adapter", "merged.onnx")]
    assert not main(["adapter", "merge", *names[:2], "-o", names[2], "--requantize", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["lost"]["fc"] > 0.1
    assert found["warning"].startswith("1 of 1 layers lose more than a tenth of the adapter's change: evaluate the")


def chains(rows, tokens, seeds):
    """Sequences in which each token mostly has the same successor, by a permutation for each seed."""
    made = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        usual, other = random.permutation(97), random.permutation(97)
        x = np.zeros((rows, tokens + 1), np.int64)
        x[:, 0] = random.integers(0, 97, rows)
        for position in range(tokens):
            x[:, position + 1] = np.where(random.random(rows) < 0.8, usual[x[:, position]], other[x[:, position]])
        made.append(x)
    return np.concatenate(made)


def tasks(name):
    """Inputs and labels of a task, and of another one to tune for."""
    if name != "bert":
        first, second = chains(256, 16, [1]), chains(128, 16, [1, 2])
        return (first[:, :-1], first[:, 1:]), (second[:, :-1], second[:, 1:])
    x = np.random.default_rng(3).integers(0, 97, (512, 12))
    return (x, (x[:, :4].sum(1) // 20) % 5), (x, (x[:, 2:6].sum(1) // 20) % 5)


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
"""20 million weights in linear layers."""


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled("rate")
@pytest.mark.parametrize("rate", [1e-4, 1e-3])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        pytest.param("llama", SMALL, id="llama", marks=pytest.mark.thorough),
        pytest.param("bert", SMALL, id="bert", marks=pytest.mark.thorough),
        pytest.param("llama", LARGE, id="llama of 20 million", marks=pytest.mark.slow),
        pytest.param("qwen2", LARGE, id="qwen2 of 20 million", marks=pytest.mark.slow),
        pytest.param("bert", LARGE | {"num_hidden_layers": 8}, id="bert of 20 million", marks=pytest.mark.slow),
    ],
)
def test_the_loss_keeps_most_of_its_fall(name, own, rate, tmp_path, monkeypatch):
    """int4 weights, an adapter for a second task, and the loss of the merged model; prints the share that is kept.

    The figures of benchmarks/pages/requantizing.md: pytest -s -m thorough tests/adapters/test_requantizing.py
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    torch.manual_seed(0)
    sizes = {"vocab_size": 97} | own
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64, "attn_implementation": "eager"}
    decoder = {"num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False}
    classes = 97
    if name == "llama":
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **decoder))
    elif name == "qwen2":
        network = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **decoder))
    else:
        network, classes = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=5)), 5

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, input_ids):
            return self.network(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits

    first, (x, y) = tasks(name)
    inputs, labels = map(torch.from_numpy, first)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    steps, size = (300, 32) if own is SMALL else (100, 8)
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (size,))
        loss = torch.nn.functional.cross_entropy(
            Logits()(inputs[chosen]).reshape(-1, classes), labels[chosen].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()
    dynamic = {"dynamo": False, "dynamic_axes": {"input_ids": {0: "batch"}}}
    if name != "bert":
        dynamic = {"dynamo": True, "dynamic_shapes": ({0: "batch"},), "external_data": False}
    path = tmp_path / "float.onnx"
    torch.onnx.export(Logits(), (inputs[:32],), str(path), input_names=["input_ids"], verbose=False, **dynamic)
    quantized = quantizer.MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=False)
    quantized.process()
    onnx.save(quantized.model.model, tmp_path / "int4.onnx")
    settings = {"loss": "softmax_cross_entropy", "optimizer": onnxtrain.AdamW(rate)}
    layers = [
        row.name for row in onnxtrain.adapters.adaptable_layers(tmp_path / "int4.onnx") if row.kind == "MatMulNBits"
    ]
    layers = [layer for layer in layers if "lm_head" not in layer]
    learner = onnxtrain.Trainer(tmp_path / "int4.onnx", lora=Lora(targets=layers), **settings)
    if own is not SMALL:
        assert (
            sum(row.inputs * row.outputs for row in onnxtrain.adapters.adaptable_layers(tmp_path / "int4.onnx")) > 17e6
        )
    before = learner.evaluate(x, y)["loss"]
    random = np.random.default_rng(0)
    for _ in range(steps // 2):
        rows = random.integers(0, len(x), size)
        learner.train_step(x[rows], y[rows])
    learner.save(tmp_path / "tuned.onnx_adapter")
    tuned = learner.evaluate(x, y)["loss"]

    def share(label):
        """The share of the loss's fall that the merged model keeps, and whether the merge warns."""
        costs = merge_adapter(
            tmp_path / "int4.onnx", tmp_path / "tuned.onnx_adapter", tmp_path / label, requantize=True
        )
        merged = onnxtrain.Trainer(tmp_path / label, train="*norm*|*Norm*", **settings).evaluate(x, y)["loss"]
        lost, beside = np.mean([cost.lost for cost in costs]), sum(cost.beside for cost in costs)
        kept = (before - merged) / (before - tuned)
        print(
            f"{name} {own['hidden_size']} rate {rate} {label}: {before:.3f} -> {tuned:.3f}, merged {merged:.3f}: "
            f"{kept:.2f}; lost {lost:.2f}; beside {beside} of {len(costs)}"
        )
        return kept

    kept = share("new.onnx")
    assert kept > 0.9
    monkeypatch.setattr("onnxtrain.adapters.operations.MOST_LOST", np.inf)
    assert kept > share("in the weights.onnx") - 0.05
    monkeypatch.setattr(Grid, "fitted", lambda self, weights: self)
    assert kept > share("old.onnx") - 0.05


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_stays_beside_a_weight_that_cannot_hold_it(kind, dora, tmp_path):
    """The model computes with the exact sum; its weight is that of the file."""
    model, dense = BASES[kind]()
    learner, path = trainer(model, dora=dora), tmp_path / "tuned.onnx_adapter"
    for name, value in learner.parameters.items():
        if name.endswith("lora_B.weight"):
            learner.parameters[name] = np.full_like(value, 1e-4)
    learner.save(path)
    (cost,) = merge_adapter(model, path, tmp_path / "merged.onnx", requantize=True)
    assert (cost.beside, cost.lost, cost.is_high) == (True, 0.0, False)
    before, after = (
        {tensor.name: numpy_helper.to_array(tensor) for tensor in one.graph.initializer}
        for one in (model, onnx.load(tmp_path / "merged.onnx"))
    )
    assert all(np.array_equal(array, after[name]) for name, array in before.items())
    added = {f"fc.lora_{letter}.weight" for letter in "AB"} | ({"fc.lora_gain"} if dora else set())
    assert added <= after.keys()
    x, _ = data()
    weight = dense + 2 * learner.parameters["fc.lora_A.weight"] @ learner.parameters["fc.lora_B.weight"]
    if dora:
        weight *= learner.parameters["fc.lora_magnitude_vector"] / np.linalg.norm(weight, axis=0)
    exact, options = np.tanh(x) @ weight, onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # it would round x to 8 bits
    found, unchanged = (
        onnxruntime.InferenceSession(one.SerializeToString(), options).run(None, {"x": x})[0]
        for one in (onnx.load(tmp_path / "merged.onnx"), model)
    )
    np.testing.assert_allclose(found, exact, atol=3e-6)
    assert np.abs(unchanged - exact).max() > 2e-5
    with pytest.raises(OptionError, match=r"has a tensor 'fc.lora_A.weight' already"):
        trainer(tmp_path / "merged.onnx")


def test_the_command_names_the_layers_with_adapters_beside(tmp_path, capsys):
    from onnxtrain.__main__ import main

    model, _ = few_bits(4, zeros=True)
    onnx.save(model, tmp_path / "model.onnx")
    tuned(model, tmp_path / "tuned.onnx_adapter", scale=0.01)
    names = [str(tmp_path / name) for name in ("model.onnx", "tuned.onnx_adapter", "merged.onnx")]
    assert not main(["adapter", "merge", *names[:2], "-o", names[2], "--requantize", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["beside"] == ["fc"]
    assert found["note"][0].startswith("1 of 1 layers keep their adapter beside the weight")
    assert "warning" not in found
