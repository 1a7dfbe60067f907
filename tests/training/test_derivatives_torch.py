"""Products with Jacobians and Hessians, Jacobians and gradients of each example, against ``torch.func``."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from zoo.exported_modules import MODULES
from zoo.exporting import Exported, export

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # on what PyTorch lacks
]

NAMES = (
    "two linear", "bilinear", "conv1d", "conv2d in groups", "conv3d", "transposed conv2d", "conv and batch norm",
    "conv and group norm", "layer norm of images", "rms norm", "lstm", "gru", "attention", "encoder layer", "gelu",
    "log softmax", "adaptive pool", "upsample", "weight norm", "rotary of many positions", "ViT", "ConvNeXt",
    "PoolFormer",
)  # fmt: skip
QUICK = ("two linear", "conv and group norm", "lstm", "attention")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in NAMES]


class Twin:
    """A module, its file and seeded vectors."""

    def __init__(self, name: str, folder: Path) -> None:
        case: Exported = MODULES[name]
        exporter = case.exporters[0]
        _, self.model = export(torch, case, folder / "m.onnx", exporter, free=False, fresh=False)
        torch.manual_seed(0)
        from zoo.gradients import distinct

        self.module = distinct(case.build(torch).eval())
        self.inputs = case.example(torch)
        self.names = [value.name for value in self.model.graph.input]
        self.output = self.model.graph.output[0].name
        self.feeds = {name: one.numpy() for name, one in zip(self.names, self.inputs, strict=True)}
        self.parameters = self.shared_with(self.model)
        self.draw_again()

    def draw_again(self) -> None:
        """Draw the same vectors from now on as in the beginning."""
        self._generator = np.random.default_rng(1)

    def shared_with(self, model: onnx.ModelProto) -> dict[str, Any]:
        """Return the parameters that the exporter kept as they are."""
        held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        parameters = {name: value.detach() for name, value in self.module.named_parameters()}
        return {name: v for name, v in parameters.items() if name in held and np.array_equal(held[name], v.numpy())}

    def call(self, *inputs: Any) -> Any:
        """Return the output of the module."""
        found = self.module(*inputs)
        return found[0] if isinstance(found, tuple) else found

    def with_parameters(self, parameters: dict[str, Any], *inputs: Any) -> Any:
        """Return the output of the module with other parameters."""
        found = torch.func.functional_call(self.module, parameters, inputs)
        return found[0] if isinstance(found, tuple) else found

    def draw(self, like: Any) -> Any:
        """Draw a vector of the shape of a tensor."""
        return torch.from_numpy(self._generator.normal(size=tuple(like.shape)).astype(np.float32))

    def with_square(self) -> onnx.ModelProto:
        """Return the model with the output ``loss``, the sum of the squared elements of its own output."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        model.graph.node.append(onnx.helper.make_node("ReduceSumSquare", [self.output], ["loss"], keepdims=0))
        model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
        return model


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def close(found: np.ndarray, expected: Any, tolerance: float = 2e-4) -> None:
    expected = expected.detach().numpy()
    assert found.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found - expected).max() <= tolerance * scale


@contextlib.contextmanager
def composed_operators() -> Iterator[None]:
    """Disable the kernels of PyTorch that have no forward mode."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        yield
    torch.backends.mha.set_fastpath_enabled(fast)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    """The twin of each name, exported once for all tests."""
    return functools.cache(lambda name: Twin(name, tmp_path_factory.mktemp("twin")))


@pytest.fixture
def twin(request: pytest.FixtureRequest, twins: Callable[[str], Twin]) -> Iterator[Twin]:
    made = twins(request.param)  # exported with all kernels: without them the exporter fails now and then
    made.draw_again()
    with composed_operators():
        yield made


def each_twin(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("twin", CASES, indirect=True)(test)


@each_twin
def test_products_with_the_jacobian(twin: Twin) -> None:
    tangents = tuple(twin.draw(one) for one in twin.inputs)
    _, expected = torch.func.jvp(twin.call, twin.inputs, tangents)
    given = {f"{name}_tangent": one.numpy() for name, one in zip(twin.names, tangents, strict=True)}
    found = run(onnxtrain.jvp(twin.model), twin.feeds | given)
    close(found[f"{twin.output}_jvp"], expected)

    y, pull_back = torch.func.vjp(twin.call, *twin.inputs)
    cotangent = twin.draw(y)
    found = run(onnxtrain.vjp(twin.model), twin.feeds | {f"{twin.output}_cotangent": cotangent.numpy()})
    close(found[twin.output], y)
    for name, product in zip(twin.names, pull_back(cotangent), strict=True):
        close(found[f"{name}_vjp"], product)


@each_twin
def test_forward_mode_by_parameters(twin: Twin) -> None:
    if not twin.parameters:
        pytest.skip("the exporter renamed all parameters")
    values = twin.parameters
    tangents = {name: twin.draw(value) for name, value in values.items()}
    _, expected = torch.func.jvp(lambda p: twin.with_parameters(p, *twin.inputs), (values,), (tangents,))
    model = onnxtrain.jvp(twin.model, xs=list(values))
    found = run(model, twin.feeds | {f"{name}_tangent": one.numpy() for name, one in tangents.items()})
    close(found[f"{twin.output}_jvp"], expected)


@each_twin
def test_hessian_vector_products(twin: Twin) -> None:
    if not twin.parameters:
        pytest.skip("the exporter renamed all parameters")
    values = twin.parameters
    vectors = {name: twin.draw(value) for name, value in values.items()}
    slope = torch.func.grad(lambda p: twin.with_parameters(p, *twin.inputs).square().sum())
    gradient, expected = torch.func.jvp(slope, (values,), (vectors,))
    model = onnxtrain.hessian_vector_product(twin.with_square(), "loss", list(values))
    found = run(model, twin.feeds | {f"{name}_vector": one.numpy() for name, one in vectors.items()})
    for name in values:
        close(found[f"{name}_grad"], gradient[name])
        close(found[f"{name}_hvp"], expected[name], 1e-3)


@each_twin
def test_jacobians(twin: Twin) -> None:
    expected = torch.func.jacrev(twin.call, argnums=tuple(range(len(twin.inputs))))(*twin.inputs)
    found = run(onnxtrain.jacobian(twin.model), twin.feeds)
    for name, one in zip(twin.names, expected, strict=True):
        close(found[f"{name}_jacobian"], one)


@pytest.mark.parametrize(
    "name", ["two linear", "conv2d", "layer norm", pytest.param("BERT", marks=pytest.mark.thorough)]
)
def test_gradients_of_each_example(name: str, twins: Callable[[str], Twin], tmp_path: Path) -> None:
    case = MODULES[name]
    free = "dynamo" if "dynamo" in case.free else "torchscript"
    twin = copy.copy(twins(name))
    _, model = export(torch, case, tmp_path / "free.onnx", free, free=True, fresh=False)
    twin.model = model
    values = twin.shared_with(model)
    assert values
    twin.output = model.graph.output[0].name
    feeds = dict(zip((value.name for value in model.graph.input), twin.feeds.values(), strict=True))
    found = run(onnxtrain.per_example_gradients(twin.with_square(), "loss", list(values)), feeds)
    for index in range(2):
        one = tuple(value[index : index + 1] for value in twin.inputs)
        expected = torch.func.grad(lambda p, one=one: twin.with_parameters(p, *one).square().sum())(values)
        for name in values:
            close(found[f"{name}_grads"][index], expected[name])


@pytest.mark.parametrize("ends_in", ["logits", "probabilities"])
def test_the_gradient_of_a_loss_by_an_input_is_pytorchs(ends_in: str) -> None:
    """The recipe of docs/gradients.md."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32)
    labels = np.array([0, 3, 1, 1, 2])
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> f (float[n,6] x) => (float[n,4] logits)
        { logits = MatMul(x, w) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    node, nodes = onnx.helper.make_node, model.graph.node
    if ends_in == "logits":
        nodes.append(node("SoftmaxCrossEntropyLoss", ["logits", "label"], ["loss"], reduction="sum"))
    else:
        nodes.append(node("Softmax", ["logits"], ["p"]))
        nodes.append(node("Log", ["p"], ["log"]))
        nodes.append(node("NegativeLogLikelihoodLoss", ["log", "label"], ["loss"], reduction="sum"))
    model.graph.input.append(onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["n"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    found = onnxtrain.gradient(model, y="loss", xs=["x"])
    session = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    loss, gradient = session.run(["loss", "x_grad"], {"x": x, "label": labels})
    image = torch.tensor(x, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(image @ torch.tensor(w), torch.tensor(labels), reduction="sum")
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, image.grad.numpy(), atol=1e-5)
