"""Files of jax2onnx: trainable parameters equal the parameters of flax's modules; needs the jax extra."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from zoo.framework_steps import check_steps

jax = pytest.importorskip("jax", reason="jax is not installed; .ci/run says how")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed; .ci/run says how")
jax2onnx = pytest.importorskip("jax2onnx", reason="jax2onnx is not installed; .ci/run says how")
pytestmark = pytest.mark.filterwarnings("ignore")


class Dense(nnx.Module):
    """Two linear layers with a normalization between them."""

    def __init__(self, rngs, norm):
        self.first, self.norm, self.last = nnx.Linear(6, 8, rngs=rngs), norm(rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.gelu(self.norm(self.first(x))))


class Convolutions(nnx.Module):
    """A convolution, normalizations and pooling."""

    def __init__(self, rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.groups = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.norm(self.first(x)))
        y = self.groups(nnx.max_pool(y, window_shape=(2, 2), strides=(2, 2)))
        return self.last(y.mean((1, 2)))


class Attention(nnx.Module):
    """Attention between a projection and a linear layer."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.norm, self.last = nnx.RMSNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        y = self.first(x)
        return self.last(self.norm(y + self.attend(y)))


MODELS = {
    "layer norm": (lambda rngs: Dense(rngs, lambda rngs: nnx.LayerNorm(8, rngs=rngs)), (4, 6)),
    "rms norm": (lambda rngs: Dense(rngs, lambda rngs: nnx.RMSNorm(8, rngs=rngs)), (4, 6)),
    "no norm": (lambda rngs: Dense(rngs, lambda rngs: lambda x: x), (4, 6)),
    "convolutions": (Convolutions, (2, 8, 8, 3)),
    "attention": (Attention, (2, 5, 6)),
}


def trained(graph_and_state):
    """Return the parameters by path."""
    _, state = graph_and_state
    return {"/".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(state)}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_three_steps(name, tmp_path):
    make, shape = MODELS[name]
    module = make(nnx.Rngs(0))
    generator = np.random.default_rng(0)
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    state = jax.tree.map(lambda a: a + 0.02 * generator.random(a.shape).astype(np.float32), state)
    x = generator.normal(size=shape).astype(np.float32)
    module = nnx.merge(graph, state, rest)
    target = generator.normal(size=module(x).shape).astype(np.float32)
    loss, slopes = jax.value_and_grad(lambda state: ((nnx.merge(graph, state, rest)(x) - target) ** 2).mean())(state)
    model = jax2onnx.to_onnx(module, inputs=[shape])
    check_steps(
        model, trained((graph, state)), trained((graph, slopes)), float(loss), x, target, tmp_path / "trained.onnx"
    )


def test_a_function_with_arrays_of_its_own(tmp_path):
    generator = np.random.default_rng(0)
    weights = {"w": generator.normal(size=(6, 4)).astype(np.float32), "b": generator.normal(size=4).astype(np.float32)}
    x, target = generator.normal(size=(5, 6)).astype(np.float32), generator.normal(size=(5, 4)).astype(np.float32)

    def apply(w, x):
        return jax.numpy.tanh(x @ w["w"] + w["b"])

    loss, slopes = jax.value_and_grad(lambda w: ((apply(w, x) - target) ** 2).mean())(weights)
    held = {name: jax.numpy.asarray(array) for name, array in weights.items()}
    model = jax2onnx.to_onnx(lambda x: apply(held, x), inputs=[("B", 6)])
    slopes = {name: np.asarray(array) for name, array in slopes.items()}
    check_steps(model, weights, slopes, float(loss), x, target, tmp_path / "trained.onnx")


def test_fresh_scales_are_hinted():
    model = jax2onnx.to_onnx(MODELS["layer norm"][0](nnx.Rngs(0)), inputs=[("B", 6)])
    assert isinstance(model, onnx.ModelProto)
    assert [hint for hint in onnxtrain.inspect(model).hints if "neither use nor name" in hint]
