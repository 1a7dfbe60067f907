"""The PyTorch models that the tests train, their ONNX exports, and PyTorch's gradients as an oracle.

Nothing here imports torch before a function is called, so that a test file can list the zoo without it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ZooEntry:
    """A model of the zoo.

    Attributes:
        name: Its key in ``ZOO``.
        module: Builds the torch module (without a seed: call ``build``).
        inputs: Shape of each input, without the batch dimension.
        input_names: Names of the graph inputs, in the order of ``inputs``.
        target: What the output is compared with: "class" (one index per output vector along axis 1),
            "token" (one index per vector along the last axis) or "value" (an array like the output).
        classes: The number of classes, of pixel labels or of values.
        vocabulary: Token inputs hold indices below it; 0 where inputs are floats.
        training: The module is exported in training mode (dropout, batch statistics).
        dynamic_axes: Names of further dynamic dimensions by input; the first is always "batch".
        exporters: Exporters that support the model.
        oldest_opset: The oldest one that the TorchScript exporter can write it at.
    """

    name: str
    module: Callable[[], torch.nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    input_names: tuple[str, ...] = ("input",)
    output_names: tuple[str, ...] = ("output",)
    target: str = "class"
    classes: int = 5
    vocabulary: int = 0
    training: bool = False
    dynamic_axes: dict[str, dict[int, str]] = field(default_factory=dict)
    exporters: tuple[str, ...] = ("torchscript", "dynamo")
    oldest_opset: int = 11

    def opsets(self, exporter: str) -> range:
        """The opsets at which the exporter writes this model, up to 23.

        The dynamo exporter writes opset 18 and later; asked for an older one, it may convert, fail, write
        an invalid file, or write opset 18 regardless.
        """
        return range(self.oldest_opset if exporter == "torchscript" else 18, 24)

    @property
    def class_axis(self) -> int:
        """The output's axis of classes: the last for tokens, else 1 (pixel labels included)."""
        return -1 if self.target == "token" else 1

    def build(self, seed: int = 0) -> torch.nn.Module:
        """The module with seeded weights, no two parameters or statistics equal, in its mode."""
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = self.module()
            # Exporters merge equal initializers (fresh biases and scales), which would tie them in training.
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    if tensor.is_floating_point():
                        tensor.add_(0.02 * torch.rand_like(tensor))
        return module.train(self.training)

    def example(self, batch: int = 3, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Seeded inputs: floats are standard normal; a second token input is a mask of at least one 1."""
        import torch

        generator = np.random.default_rng(seed)
        arrays: list[np.ndarray] = []
        for shape in self.inputs:
            if not self.vocabulary:
                arrays.append(generator.standard_normal((batch, *shape)).astype(np.float32))
            elif not arrays:
                arrays.append(generator.integers(0, self.vocabulary, (batch, *shape)))
            else:
                lengths = generator.integers(1, shape[0] + 1, (batch, 1))
                arrays.append((np.arange(shape[0]) < lengths).astype(np.int64))
        return tuple(torch.from_numpy(array) for array in arrays)

    def targets(self, output_shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
        """Seeded targets for an output of this shape: int64 indices, or float32 values."""
        generator = np.random.default_rng(seed)
        if self.target == "value":
            return generator.standard_normal(output_shape).astype(np.float32)
        axis = self.class_axis % len(output_shape)
        shape = output_shape[:axis] + output_shape[axis + 1 :]
        return generator.integers(0, self.classes, shape)


def _mlp(activation: str, *arguments: Any, **keywords: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        from torch import nn

        from zoo.architectures import Mlp

        return Mlp((6, 16, 12, 5), lambda: getattr(nn, activation)(*arguments, **keywords))

    return build


def _mlp_ending_in(final: str) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        from torch import nn

        from zoo.architectures import Mlp

        return Mlp((6, 16, 5), nn.ReLU, lambda: getattr(nn, final)(dim=-1))

    return build


def _folded(name: str, *arguments: Any, **keywords: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        from zoo import architectures

        return architectures.folded(_architecture(name, *arguments, **keywords)())

    return build


def _architecture(name: str, *arguments: Any, **keywords: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        from zoo import architectures

        return getattr(architectures, name)(*arguments, **keywords)

    return build


_ACTIVATIONS = {
    "relu": _mlp("ReLU"),
    "leaky_relu": _mlp("LeakyReLU", 0.1),
    "elu": _mlp("ELU", 0.7),
    "selu": _mlp("SELU"),
    "celu": _mlp("CELU", 0.6),
    "gelu": _mlp("GELU"),
    "gelu_tanh": _mlp("GELU", approximate="tanh"),
    "silu": _mlp("SiLU"),
    "sigmoid": _mlp("Sigmoid"),
    "tanh": _mlp("Tanh"),
    "softplus": _mlp("Softplus"),
    "softsign": _mlp("Softsign"),
    "hardtanh": _mlp("Hardtanh", -0.5, 0.8),
    "hardsigmoid": _mlp("Hardsigmoid"),
    "hardswish": _mlp("Hardswish"),
    "mish": _mlp("Mish"),
    "prelu": _mlp("PReLU"),
    "relu6": _mlp("ReLU6"),
    "log_softmax": _mlp_ending_in("LogSoftmax"),
    "softmax": _mlp_ending_in("Softmax"),
}

_RESNET: tuple[Any, ...] = ("ResNet", 8, (1, 1, 1), 5)
_MOBILENET: tuple[Any, ...] = ("MobileNetV2", 0.5, ((1, 8, 1, 1), (4, 16, 2, 2), (4, 24, 2, 2)), 32, 0.0, 5)
_IMAGE = ((3, 16, 16),)
_TINY_VIT = {"layers": 2, "width": 32, "heads": 4, "image": 16, "classes": 5}


def _entries() -> Iterator[ZooEntry]:
    for name, module in _ACTIVATIONS.items():
        yield ZooEntry(f"mlp_{name}", module, ((6,),), oldest_opset=12 if name == "celu" else 11)
    yield ZooEntry("mlp_regression", _mlp("Tanh"), ((6,),), target="value")
    yield ZooEntry("mlp_dropout", _mlp("Dropout", 0.25), ((6,),), training=True)
    yield ZooEntry("lenet5", _architecture("LeNet5"), ((1, 28, 28),), classes=10)
    yield ZooEntry("strided_conv_net", _architecture("StridedConvNet", 8, 5), _IMAGE)
    for name, sizes in (("resnet", _RESNET), ("mobilenet_v2", _MOBILENET)):
        yield ZooEntry(name, _architecture(*sizes), _IMAGE)
        # The default exports, with weights that are PyTorch parameters, too.
        yield ZooEntry(f"{name}_folded", _folded(*sizes), _IMAGE)
        # The dynamo exporter writes inference batch normalization for a module in training mode.
        yield ZooEntry(f"{name}_train", _architecture(*sizes), _IMAGE, training=True, exporters=("torchscript",))
    for upsampling in ("transpose", "nearest", "bilinear"):
        unet = _architecture("UNet", upsampling, 1, 4)
        yield ZooEntry(f"unet_{upsampling}", unet, ((1, 16, 16),), classes=3)
    yield from _transformers()


def _transformers() -> Iterator[ZooEntry]:
    names = ("input_ids", "attention_mask")
    text: dict[str, Any] = {
        "inputs": ((8,), (8,)),
        "input_names": names,
        "vocabulary": 100,
        "dynamic_axes": {name: {1: "sequence"} for name in names},
    }
    # scaled_dot_product_attention, the library's default, can be written from opset 14 on.
    for suffix, attention, oldest in (("", "sdpa", 14), ("_eager", "eager", 11)):
        settings: dict[str, Any] = {"oldest_opset": oldest}
        distilbert = _architecture("distilbert", attention)
        yield ZooEntry(f"distilbert{suffix}", distilbert, classes=3, **text, **settings)
        gpt2 = _architecture("gpt2", attention)
        yield ZooEntry(f"gpt2{suffix}", gpt2, target="token", classes=100, **text, **settings)
        vit = _architecture("vit", attention, **_TINY_VIT)
        yield ZooEntry(f"vit{suffix}", vit, _IMAGE, ("pixel_values",), **settings)
    bert = _architecture("bert", 2, 32, 4, 100, 3)
    yield ZooEntry("bert", bert, classes=3, **text, oldest_opset=14)
    gpt2 = _architecture("gpt2", masked=False)
    unmasked = text | {"inputs": ((8,),), "input_names": names[:1], "exporters": ("dynamo",)}
    yield ZooEntry("gpt2_unmasked", gpt2, target="token", classes=100, **unmasked)


ZOO: dict[str, ZooEntry] = {entry.name: entry for entry in _entries()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the output and warnings of exporters."""
    names = ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export(
    entry: ZooEntry,
    path: Path,
    exporter: str = "torchscript",
    opset: int = 18,
    dynamic: bool = True,
    optimize: bool = True,
    module: torch.nn.Module | None = None,
) -> Path:
    """Writes the entry's module to ``path`` and returns the path.

    Args:
        entry: The model; its ``training`` decides the mode.
        path: The file to write.
        exporter: "torchscript" or "dynamo".
        opset: The target opset.
        dynamic: Names the batch dimension "batch" and a sequence dimension "sequence"; else every shape is
            that of ``entry.example()``.
        optimize: What exporters do by default: constants folded, inference batch normalization merged into
            the convolution before it. Without, every node and parameter stays.
        module: The module to export instead of ``entry.build()``.
    """
    import torch

    module = entry.build() if module is None else module
    module.train(entry.training)
    axes = {name: {0: "batch", **entry.dynamic_axes.get(name, {})} for name in entry.input_names}
    keywords: dict[str, Any] = {
        "input_names": list(entry.input_names),
        "output_names": list(entry.output_names),
        "opset_version": opset,
    }
    if exporter == "dynamo":
        keywords |= {"dynamo": True, "external_data": False, "verbose": False, "optimize": optimize}
        if dynamic:
            keywords["dynamic_shapes"] = tuple(axes[name] for name in entry.input_names)
    else:
        mode = torch.onnx.TrainingMode.EVAL if optimize else torch.onnx.TrainingMode.PRESERVE
        if entry.training:
            mode = torch.onnx.TrainingMode.TRAINING
        fold = optimize and not entry.training
        keywords |= {"dynamo": False, "training": mode, "do_constant_folding": fold}
        if dynamic:
            keywords["dynamic_axes"] = axes | {name: {0: "batch"} for name in entry.output_names}
    with quiet():
        torch.onnx.export(module, entry.example(), str(path), **keywords)
    return path


def torch_loss(name: str, output: torch.Tensor, target: torch.Tensor, class_axis: int = 1) -> torch.Tensor:
    """The loss of this name (as ``onnxtrain.Trainer`` names them), averaged over all its terms."""
    from torch.nn import functional

    if name == "softmax_cross_entropy":
        return functional.cross_entropy(output.movedim(class_axis, 1), target)
    losses = {
        "binary_cross_entropy": functional.binary_cross_entropy_with_logits,
        "mean_squared_error": functional.mse_loss,
        "mean_absolute_error": functional.l1_loss,
        "huber": functional.huber_loss,
    }
    return losses[name](output, target.to(output.dtype))


class TorchGradients(NamedTuple):
    """Compute with PyTorch in float64: the loss and its gradient for every parameter, by torch's names."""

    loss: float
    gradients: dict[str, np.ndarray]


def torch_gradients(
    entry: ZooEntry,
    loss: str | None = None,
    batch: int = 3,
    seed: int = 0,
    module: torch.nn.Module | None = None,
) -> TorchGradients:
    """Float64 gradients of every parameter at ``entry.example(batch, seed)`` and its ``targets``.

    ``loss`` is by default mean squared error for values and softmax cross-entropy for classes and tokens.
    A parameter that the loss does not depend on has zeros.
    """
    import torch

    module = copy.deepcopy(entry.build() if module is None else module).double().train(entry.training)
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in entry.example(batch, seed)]
    output = module(*inputs)
    target = torch.from_numpy(entry.targets(tuple(output.shape)))
    name = loss or ("mean_squared_error" if entry.target == "value" else "softmax_cross_entropy")
    value = torch_loss(name, output, target, entry.class_axis)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, materialize_grads=True)
    named = zip(parameters, gradients, strict=True)
    return TorchGradients(value.item(), {name: gradient.numpy() for name, gradient in named})


class ParameterMatch(NamedTuple):
    """The torch parameter that an initializer holds; ``transposed`` if it holds the parameter's ``.T``."""

    name: str
    transposed: bool


def match_parameters(model: onnx.ModelProto, module: torch.nn.Module) -> dict[str, ParameterMatch]:
    """Match floating initializers to parameters by value: exporters rename, transpose and duplicate.

    Dimensions of 1 do not count: a PRelu slope may be stored as [1, 1]. Several initializers may hold one
    parameter (a tied embedding): its gradient is then the sum of theirs. Initializers that hold no parameter
    (statistics, constants, weights with batch normalization merged into them) are left out. Two equal
    parameters cannot be told apart and raise ValueError; ``ZooEntry.build`` makes none.
    """
    arrays = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    found: dict[tuple[tuple[int, ...], bytes], ParameterMatch] = {}
    for transposed in (False, True):
        for name, array in arrays.items():
            if transposed and array.ndim != 2:
                continue
            key = _value_key(array.T if transposed else array)
            match = found.setdefault(key, ParameterMatch(name, transposed))
            if match.name != name:
                raise ValueError(f"the parameters {match.name} and {name} hold equal values")
    initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    keys = {name: _value_key(array) for name, array in initializers.items()}
    return {name: found[key] for name, key in keys.items() if key in found}


def _value_key(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    squeezed = np.ascontiguousarray(array.squeeze())
    return squeezed.shape, squeezed.tobytes()


def parameter_gradients(
    gradients: Mapping[str, np.ndarray], matches: Mapping[str, ParameterMatch], oracle: TorchGradients
) -> dict[str, np.ndarray]:
    """Gradients of initializers as gradients of torch's parameters, to compare with ``oracle.gradients``.

    Transposes back, restores dimensions of 1, and sums where several initializers hold one parameter.
    """
    sums: dict[str, np.ndarray] = {}
    for initializer, (name, transposed) in matches.items():
        gradient = gradients[initializer].T if transposed else gradients[initializer]
        sums[name] = sums.get(name, 0) + gradient.reshape(oracle.gradients[name].shape)
    return sums
