"""Parameters that no gradient reaches are named: behind rounding or a choice, and of outputs without a loss."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import OptionError, TrainingHint
from sentences import warns_sentence

LAYERS = ("w", "v", "u")


def network(outputs: str, nodes: str) -> onnx.ModelProto:
    """A model with up to three layers of 4 x 4 weights, a bias, and constants of exporters."""
    graph = f"net (float[n,4] x) => ({outputs}) <float val_0 = {{0.5}}> {{ {nodes} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {graph}')
    rng, read = np.random.default_rng(0), {name for node in model.graph.node for name in node.input}
    for name, shape in {**dict.fromkeys(LAYERS, (4, 4)), "bias": (4,), "s": ()}.items():
        if name in read:
            array = np.asarray(rng.normal(size=shape) if shape else 8, np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def hints(model: onnx.ModelProto, loss: object = "mse", **options: object) -> tuple[list[str], list[str]]:
    """Return the hints of a trainer, and those that were warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = onnxtrain.Trainer(model, loss=loss, optimizer="sgd", **options)
    return trainer.hints, [str(each.message) for each in caught if each.category is TrainingHint]


ROUNDED = {
    "Round": "r = Round(w)  h = MatMul(x, r)  y = Add(h, bias)",
    "Floor": "p = MatMul(x, w)  q = Add(p, val_0)  r = Floor(q)  y = Add(r, bias)",
    "Ceil": "p = MatMul(x, w)  q = Ceil(p)  y = Add(q, bias)",
    "Sign": "r = Sign(w)  h = MatMul(x, r)  y = Add(h, bias)",
    "Cast": "p = MatMul(x, w)  c = Cast<to = 7>(p)  f = Cast<to = 1>(c)  y = Add(f, bias)",
    "Round, Sign": "r = Round(w)  p = MatMul(x, r)  q = Sign(p)  y = Add(q, bias)",
}


@pytest.mark.parametrize("operators", ROUNDED)
def test_a_weight_behind_rounding_is_named_with_straight_through(operators: str) -> None:
    model = network("float[n,4] y", ROUNDED[operators])
    with warns_sentence("stopped_by_rounding", names="w", operators=operators):
        assert list(onnxtrain.Trainer(model, loss="mse", optimizer="sgd").parameters) == ["bias"]
    assert any("straight_through=True" in text for text in onnxtrain.inspect(model).surprises)
    found, _ = hints(model, straight_through=True)
    assert not found
    found, _ = hints(model, freeze="w")
    assert not found


def test_a_file_with_nothing_else_to_train_gets_the_same_advice() -> None:
    model = network("float[n,4] y", "r = Round(w)  y = MatMul(x, r)")
    with pytest.raises(OptionError, match=r"no trainable parameter: .*w is not trained: .*straight_through=True"):
        onnxtrain.Trainer(model, loss="mse", optimizer="sgd")


CHOICES = {
    "ArgMax": "h = MatMul(x, w)  i = ArgMax<axis = 1, keepdims = 1>(h)  c = Cast<to = 1>(i)  y = Add(c, bias)",
    "Greater": "h = MatMul(x, w)  m = Greater(h, x)  y = Where(m, x, bias)",
    "Equal": "h = MatMul(x, w)  m = Equal(h, x)  n = Not(m)  f = Cast<to = 1>(n)  y = Mul(f, bias)",
    "Hardmax": "h = MatMul(x, w)  i = Hardmax(h)  y = Mul(i, bias)",
}


@pytest.mark.parametrize("operator", CHOICES)
def test_a_weight_behind_a_choice_is_named_quietly(operator: str) -> None:
    found, warned = hints(network("float[n,4] y", CHOICES[operator]))
    assert found == [f"w is not trained: no gradient passes {operator}."]
    assert not warned


QUIET = {
    "a weight with another way": "h = MatMul(x, w)  r = Round(h)  z = Add(h, r)  y = Add(z, bias)",
    "rounded numbers of an exporter": "h = MatMul(x, w)  r = Round(val_0)  z = Mul(h, r)  y = Add(z, bias)",
    "a mask of the input": """h = MatMul(x, w)  m = Greater(x, val_0)  f = Cast<to = 1>(m)
        z = Mul(h, f)  y = Add(z, bias)""",
    "a rounded input": "i = Round(x)  h = MatMul(i, w)  y = Add(h, bias)",
    "an index": """h = MatMul(x, w)  m = ReduceMax<keepdims = 0>(val_0)  r = Floor(m)  i = Cast<to = 7>(r)
        g = Gather<axis = 0>(bias, i)  y = Add(h, g)""",
}
SIZES = {
    "Reshape": "f = Floor(sizes)  c = Cast<to = 7>(f)  y = Reshape(h, c)",
    "Resize": """k = Shape(h)  a = Cast<to = 1>(k)  m = Mul(a, sizes)  f = Floor(m)  c = Cast<to = 7>(f)
        z = Reshape(h, c)  y = Identity(z)""",
    "Unsqueeze": "f = Round(axis)  c = Cast<to = 7>(f)  e = Unsqueeze(h, c)  y = ReduceMax<keepdims = 0>(e, c)",
    "Expand": "f = Ceil(sizes)  c = Cast<to = 7>(f)  y = Expand(h, c)",
}


@pytest.mark.parametrize("case", QUIET)
def test_other_rounding_has_no_hint(case: str) -> None:
    assert hints(network("float[n,4] y", QUIET[case])) == ([], [])


@pytest.mark.parametrize("operator", SIZES)
def test_rounded_sizes_are_no_parameters(operator: str) -> None:
    model = network("float[n,4] y", f"h = MatMul(x, w)  {SIZES[operator]}")
    for name, values in (("sizes", [1.2, 1.1]), ("axis", [0.1])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.float32), name))
    assert hints(model) == ([], [])
    for straight_through in (False, True):
        trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd", straight_through=straight_through)
        assert list(trainer.parameters) == ["w"]


HEADS = "h = MatMul(x, w)  a = MatMul(h, v)  b = MatMul(h, u)"
TWO = "float[n,4] a, float[n,4] b"


def test_the_parameters_of_outputs_without_a_loss_are_named() -> None:
    model = network(f"{TWO}, float[n,4] c", f"{HEADS}  c = Relu(b)")
    for loss in ("mse", {"a": "mse"}):
        with warns_sentence("output_without_loss", outputs="b, c", names="u"):
            onnxtrain.Trainer(model, loss=loss, optimizer="sgd")
    found, warned = hints(model, output="a")  # on request
    assert "No loss reads b, c, so that u is not trained" in found[0]
    assert not warned
    assert hints(model, {"a": "mse", "b": "mse"}) == ([], [])
    assert hints(model, freeze="u") == ([], [])
    assert hints(model, train=["w", "v"]) == ([], [])


def test_an_output_beside_is_named_where_losses_are_given_by_output() -> None:
    """As of detectors, whose last layer gives all outputs."""
    model = network(
        "float[n,2] a, float[n,2] b, float[n,4] p",
        "p = MatMul(x, w)  a, b = Split<axis = 1, num_outputs = 2>(p)",
    )
    found, warned = hints(model, {"a": "mse"})
    assert found == ["No loss reads b; loss={output: loss, ...} takes one for each."]
    assert not warned
    assert hints(model, "mse") == ([], [])


SHARING = {
    "hidden states": (TWO.replace("b", "h"), "h = MatMul(x, w)  a = MatMul(h, v)"),
    "probabilities": (TWO, "h = MatMul(x, w)  a = MatMul(h, v)  b = Softmax(a)"),
    "labels": ("float[n,4] a, int64[n] b", "h = MatMul(x, w)  a = MatMul(h, v)  b = ArgMax<axis = 1, keepdims = 0>(a)"),
    "scaled": (TWO, "a = MatMul(x, w)  b = Mul(a, val_0)"),
}


@pytest.mark.parametrize("case", SHARING)
def test_outputs_without_parameters_of_their_own_have_no_hint(case: str) -> None:
    outputs, nodes = SHARING[case]
    assert hints(network(outputs, nodes), {"a": "mse"}) == ([], [])
    assert hints(network(outputs, nodes)) == ([], [])


FAKE = "m = Mul(w, s)  r = Round(m)  d = Div(r, s)  h = MatMul(x, d)  y = Add(h, bias)"


def test_a_scale_of_rounded_values_is_named_and_a_name_in_full_trains_it() -> None:
    model = network("float[n,4] y", FAKE)
    rows = {row.name: row for row in onnxtrain.inspect(model).initializers}
    assert rows["s"].reason == "scale of rounded values"
    found, _ = hints(model, straight_through=True)
    assert len(found) == 1
    assert 'train=["*", "s"] trains it' in found[0]
    assert "qat=True trains the logarithm of s" in found[0]
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.1)", straight_through=True, train=["*", "s"])
    assert set(trainer.parameters) == {"w", "s", "bias"}
    assert not trainer.hints
    assert "s.log" in onnxtrain.Trainer(model, loss="mse", optimizer="sgd", qat=True).parameters


def test_a_declared_scale_of_rounded_values_is_not_trained_as_a_plain_number() -> None:
    model = network("float[n,4] y", FAKE)
    for tensor in model.graph.initializer:
        info = onnx.helper.make_tensor_value_info(tensor.name, 1, tensor.dims)
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value="PARAMETER")
        model.graph.value_info.append(info)
    found, _ = hints(model, straight_through=True)
    assert any("qat=True trains the logarithm of s" in text for text in found)
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd", straight_through=True, freeze="s")
    assert set(trainer.parameters) == {"w", "bias"}
    assert "s.log" in onnxtrain.Trainer(model, loss="mse", optimizer="sgd", qat=True).parameters


@pytest.mark.torch
def test_a_named_scale_trains_as_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    model = network("float[n,4] y", FAKE)
    held = {t.name: torch.tensor(onnx.numpy_helper.to_array(t), requires_grad=True) for t in model.graph.initializer}
    weights = {name: held[name] for name in ("w", "s", "bias")}
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    target = x[:, ::-1].copy()
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.1)", straight_through=True, train=["*", "s"])
    optimizer = torch.optim.SGD(weights.values(), 0.1)
    for _ in range(5):
        scaled = weights["w"] * weights["s"]
        rounded = scaled + (scaled.round() - scaled).detach()
        loss = ((torch.tensor(x) @ (rounded / weights["s"]) + weights["bias"] - torch.tensor(target)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.train_step(x, target) == pytest.approx(loss.item(), rel=1e-4)
    for name, value in weights.items():
        np.testing.assert_allclose(trainer.parameters[name], value.detach().numpy(), atol=1e-4)
