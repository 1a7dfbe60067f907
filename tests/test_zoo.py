import numpy as np
import onnx
import onnxruntime
import pytest

from zoo.sklearn_models import sklearn_models
from zoo.trained import (
    ZOO,
    TorchGradients,
    export,
    match_parameters,
    parameter_gradients,
    torch_gradients,
    torch_loss,
)

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

ENTRIES = pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO.keys())


def session(path):
    onnx.checker.check_model(path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def check_export(entry, path, exporter, opset, dynamic=True, optimize=True):
    """The file has the asked opset and computes what the module computes, at another batch size too."""
    module = entry.build()
    export(entry, path, exporter, opset, dynamic, optimize, module)
    imports = {entry.domain: entry.version for entry in onnx.load(path).opset_import}
    assert imports[""] == opset
    runtime = session(path)
    assert [value.name for value in runtime.get_inputs()] == list(entry.input_names)
    assert [value.name for value in runtime.get_outputs()] == list(entry.output_names)
    assert isinstance(runtime.get_inputs()[0].shape[0], str) == dynamic
    for batch in (3, 5) if dynamic else (3,):
        inputs = entry.example(batch, seed=1)
        with torch.no_grad():
            expected = entry.build()(*inputs).numpy()
        feeds = dict(zip(entry.input_names, (tensor.numpy() for tensor in inputs), strict=True))
        (actual,) = runtime.run(None, feeds)
        assert actual.shape == expected.shape
        if "dropout" not in entry.name:
            np.testing.assert_allclose(actual, expected, atol=2e-5)
    return module


@ENTRIES
def test_torchscript_export_equals_torch(entry, tmp_path):
    if "torchscript" not in entry.exporters:
        pytest.skip("this exporter cannot write the model")
    check_export(entry, tmp_path / "model.onnx", "torchscript", 18)


@pytest.mark.parametrize("name", ["mlp_gelu", "lenet5", "resnet_folded", "gpt2_unmasked", "vit"])
def test_dynamo_export_equals_torch(name, tmp_path):
    check_export(ZOO[name], tmp_path / "model.onnx", "dynamo", 18)


@pytest.mark.slow
@ENTRIES
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_every_export_equals_torch(entry, exporter, dynamic, tmp_path):
    if exporter not in entry.exporters:
        pytest.skip("this exporter cannot write the model")
    for opset in entry.opsets(exporter):
        check_export(entry, tmp_path / "model.onnx", exporter, opset, dynamic)


@pytest.mark.parametrize(("name", "training_mode"), [("resnet", 0), ("resnet_train", 1)])
def test_unoptimized_export_keeps_batch_normalization(name, training_mode, tmp_path):
    check_export(ZOO[name], tmp_path / "model.onnx", "torchscript", 18, optimize=False)
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    norms = [node for node in nodes if node.op_type == "BatchNormalization"]
    assert norms
    for node in norms:
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert attributes.get("training_mode", 0) == training_mode


def test_dropout_export_drops(tmp_path):
    path = export(ZOO["mlp_dropout"], tmp_path / "model.onnx")
    feeds = {"input": ZOO["mlp_dropout"].example()[0].numpy()}
    # ONNX Runtime's EliminateDropout drops a Dropout whose mask nobody reads, in training mode too.
    runtime = onnxruntime.InferenceSession(path, disabled_optimizers=["EliminateDropout"])
    assert not np.array_equal(runtime.run(None, feeds)[0], runtime.run(None, feeds)[0])


@ENTRIES
def test_build_is_seeded_and_no_two_tensors_are_equal(entry):
    first, again, other = (dict(entry.build(seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    values = [tuple(parameter.flatten().tolist()) for parameter in first.values()]
    assert len(set(values)) == len(values)


@ENTRIES
def test_targets_fit_the_loss(entry):
    oracle = torch_gradients(entry)
    assert np.isfinite(oracle.loss)
    assert oracle.gradients.keys() == dict(entry.build().named_parameters()).keys()
    assert all(gradient.dtype == np.float64 for gradient in oracle.gradients.values())
    assert any(gradient.any() for gradient in oracle.gradients.values())


@pytest.mark.parametrize("loss", [None, "binary_cross_entropy", "mean_squared_error", "mean_absolute_error", "huber"])
def test_torch_gradients_agree_with_finite_differences(loss):
    entry = ZOO["mlp_regression"]
    oracle = torch_gradients(entry, loss)
    module = entry.build().double()
    (inputs,) = entry.example()
    name = loss or "mean_squared_error"
    generator = np.random.default_rng(0)
    losses = []
    direction = {key: generator.standard_normal(value.shape) for key, value in oracle.gradients.items()}
    for step in (1e-6, -1e-6):
        moved = {
            key: value.detach() + step * torch.from_numpy(direction[key]) for key, value in module.named_parameters()
        }
        output = torch.func.functional_call(module, moved, inputs.double())
        target = torch.from_numpy(entry.targets(tuple(output.shape)))
        losses.append(torch_loss(name, output, target).item())
    slope = sum(np.vdot(direction[key], gradient) for key, gradient in oracle.gradients.items())
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        ("mlp_prelu", "torchscript"),
        ("mlp_prelu", "dynamo"),
        ("mobilenet_v2_folded", "torchscript"),
        ("resnet_train", "torchscript"),
        ("distilbert", "torchscript"),
        ("gpt2", "torchscript"),
        ("unet_bilinear", "torchscript"),
    ],
)
def test_every_parameter_is_found_in_the_export(name, exporter, tmp_path):
    entry = ZOO[name]
    module = entry.build()
    model = onnx.load(export(entry, tmp_path / "model.onnx", exporter, module=module))
    matches = match_parameters(model, module)
    parameters = dict(module.named_parameters())
    assert {match.name for match in matches.values()} == parameters.keys()
    # Run backwards, the initializers themselves become the parameters.
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    oracle = TorchGradients(0.0, {key: value.detach().numpy() for key, value in parameters.items()})
    for key, value in parameter_gradients(arrays, matches, oracle).items():
        copies = sum(match.name == key for match in matches.values())
        np.testing.assert_array_equal(value, copies * oracle.gradients[key])


def test_a_tied_embedding_is_two_initializers_of_one_parameter(tmp_path):
    module = ZOO["gpt2"].build()
    model = onnx.load(export(ZOO["gpt2"], tmp_path / "model.onnx", module=module))
    copies = [match for match in match_parameters(model, module).values() if "wte" in match.name]
    assert sorted(match.transposed for match in copies) == [False, True]


def test_equal_parameters_cannot_be_matched():
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight hold equal values"):
        match_parameters(onnx.ModelProto(), module)


@pytest.mark.parametrize("opset", [11, 18, 22])
def test_sklearn_models_equal_scikit_learn(opset):
    pytest.importorskip("skl2onnx")
    for name, case in sklearn_models(opset).items():
        runtime = onnxruntime.InferenceSession(case.model.SerializeToString())
        outputs = runtime.run(None, {"X": case.inputs})
        if "regressor" in name:
            expected, actual = case.estimator.predict(case.inputs), outputs[0][:, 0]
        else:
            np.testing.assert_array_equal(outputs[0], case.estimator.predict(case.inputs))
            expected, actual = case.estimator.predict_proba(case.inputs), outputs[1]
            if name.endswith("zipmap"):
                actual = np.array([list(row.values()) for row in actual])
        np.testing.assert_allclose(actual, expected, atol=1e-5)
