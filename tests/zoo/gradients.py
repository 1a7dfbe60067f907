"""Further architectures, every kind of input and loss, and PyTorch's float64 gradients of them as an oracle.

Where ``zoo.trained`` holds the models that whole training runs use, these are for gradients only. Nothing here imports
torch before a function is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from zoo.trained import quiet, torch_loss

if TYPE_CHECKING:
    import torch

Size = int | str
"""A dimension: a number, or the name of a dynamic one."""

SIZES = {"batch": 3, "sequence": 6, "height": 8, "width": 8, "points": 7, "nodes": 7, "edges": 12}
"""The named dimensions in an export."""

OTHER_SIZES = {"batch": 2, "sequence": 5, "height": 16, "width": 8, "points": 5, "nodes": 9, "edges": 14}
"""The named dimensions that a dynamic export is checked at."""


@dataclass(frozen=True)
class Input:
    """An input of a model.

    Attributes:
        name: Its name in the graph.
        shape: Sizes; named ones are dynamic where the export is.
        kind: "normal" numbers, "index" (integers below ``high``), "mask" (a prefix of ones in each row, int64).
        high: Exclusive upper bound of indices: a number or the name of a dimension.
    """

    name: str
    shape: tuple[Size, ...]
    kind: str = "normal"
    high: Size = 0

    def array(self, sizes: Mapping[str, int], generator: np.random.Generator) -> np.ndarray:
        """A seeded value."""
        shape = tuple(sizes.get(size, size) for size in self.shape)
        if self.kind == "normal":
            return generator.standard_normal(shape).astype(np.float32)
        if self.kind == "index":
            return generator.integers(0, sizes.get(self.high, self.high), shape)
        return (np.arange(shape[1]) < generator.integers(1, shape[1] + 1, (shape[0], 1))).astype(np.int64)

    @property
    def axes(self) -> dict[int, str]:
        """The dynamic axes and their names."""
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, str)}


@dataclass(frozen=True)
class Architecture:
    """A model of the further zoo.

    Attributes:
        name: Its key in ``ARCHITECTURES``.
        module: Builds the torch module.
        inputs: Its inputs.
        loss: A loss by the name that ``onnxtrain.Trainer`` gives it, or "output" where the model returns it.
        class_axis: The output's axis of classes.
        exporters: Those that can write the model; the reason why one cannot stands beside the entry.
        optimize: True if exporters may fold constants (batch normalization would be merged into convolutions).
        double: The module is exported in float64.
        fixed: By exporter the dimensions that it writes as numbers, even where they are said to be dynamic: a
            recurrent layer of the dynamo exporter has as many steps as the example, TorchScript's
            ``torch.nn.MultiheadAttention`` the sequence length of the example.
        opset: The target opset; some exports need a new one.
    """

    name: str
    module: Callable[[], torch.nn.Module]
    inputs: tuple[Input, ...]
    loss: str = "softmax_cross_entropy"
    class_axis: int = -1
    exporters: tuple[str, ...] = ("torchscript", "dynamo")
    optimize: bool = True
    double: bool = False
    fixed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    opset: int = 18
    output_names: tuple[str, ...] = ("output",)

    def build(self, seed: int = 0) -> torch.nn.Module:
        """Return the module for inference with seeded parameters; no two of their elements are equal."""
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = self.module()
            with torch.no_grad():
                for tensor in module.buffers():
                    if tensor.is_floating_point():
                        tensor.add_(0.02 * torch.rand_like(tensor))
        module = distinct(module.eval(), seed)
        return module.double() if self.double else module

    def example(self, sizes: Mapping[str, int] = SIZES, seed: int = 0) -> dict[str, np.ndarray]:
        """Seeded inputs by name."""
        generator = np.random.default_rng(seed)
        arrays = {given.name: given.array(sizes, generator) for given in self.inputs}
        if self.double:
            arrays = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in arrays.items()}
        return arrays

    def other_sizes(self, exporter: str) -> dict[str, int]:
        """Sizes that a dynamic export was not made with, where they are dynamic in it."""
        return OTHER_SIZES | {name: SIZES[name] for name in self.fixed.get(exporter, ())}

    def target(self, shape: tuple[int, ...], seed: int = 1) -> np.ndarray | None:
        """Seeded targets for an output of this shape; ``None`` where the model returns its loss."""
        generator = np.random.default_rng(seed)
        if self.loss == "output":
            return None
        if self.loss == "softmax_cross_entropy":
            axis = self.class_axis % len(shape)
            return generator.integers(0, shape[axis], shape[:axis] + shape[axis + 1 :])
        if self.loss == "binary_cross_entropy":
            target = generator.random(shape)
        else:
            target = 1.5 * generator.standard_normal(shape)
        return target.astype(np.float64 if self.double else np.float32)


def distinct(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Return the module with slight noise on its trainable parameters, so that no two of their elements are equal."""
    import torch

    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]

    generator = np.random.default_rng(seed)
    flat = torch.nn.utils.parameters_to_vector(trainable).detach().numpy()
    values = (flat + 0.02 * generator.random(flat.shape)).astype(np.float32)
    while True:
        _, first = np.unique(values, return_index=True)
        again = np.ones(values.size, bool)
        again[first] = False
        if not again.any():
            break
        values[again] += (0.02 * generator.random(again.sum())).astype(np.float32)
    ends = np.cumsum([parameter.numel() for parameter in trainable])
    for parameter, part in zip(trainable, np.split(values, ends[:-1]), strict=True):
        parameter.data.copy_(torch.from_numpy(part).reshape(parameter.shape))
    return module


def export(entry: Architecture, path: Path, exporter: str, dynamic: bool) -> Path:
    """Writes the entry's module to ``path`` and returns the path."""
    import torch

    module = entry.build()
    example = tuple(torch.from_numpy(array) for array in entry.example().values())
    names = [given.name for given in entry.inputs]
    keywords: dict[str, Any] = {
        "input_names": names,
        "output_names": list(entry.output_names),
        "opset_version": entry.opset,
    }
    fixed = entry.fixed.get(exporter, ())
    axes = [{axis: size for axis, size in given.axes.items() if size not in fixed} for given in entry.inputs]
    if exporter == "dynamo":
        keywords |= {"dynamo": True, "external_data": False, "verbose": False, "optimize": entry.optimize}
        if dynamic:
            keywords["dynamic_shapes"] = tuple(axes)
    else:
        mode = torch.onnx.TrainingMode.EVAL if entry.optimize else torch.onnx.TrainingMode.PRESERVE
        keywords |= {"dynamo": False, "training": mode, "do_constant_folding": entry.optimize}
        if dynamic:
            keywords["dynamic_axes"] = dict(zip(names, axes, strict=True))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused operator that no exporter supports
    try:
        with quiet():
            torch.onnx.export(module, example, str(path), **keywords)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return path


class Oracle(NamedTuple):
    """Compute with PyTorch in float64: the loss, its gradients by torch's names, the shape of the output."""

    loss: float
    gradients: dict[str, np.ndarray]
    output_shape: tuple[int, ...]


def oracle(entry: Architecture, sizes: Mapping[str, int] = SIZES, loss: str | None = None) -> Oracle:
    """Float64 gradients of every parameter at ``entry.example(sizes)``; zeros where the loss depends on none."""
    import torch

    module = entry.build().double()
    inputs = [torch.from_numpy(array) for array in entry.example(sizes).values()]
    output = module(*(x.double() if x.is_floating_point() else x for x in inputs))
    output = output[0] if isinstance(output, tuple) else output
    target = entry.target(tuple(output.shape))
    name = loss or entry.loss
    value = output if target is None else torch_loss(name, output, torch.from_numpy(target), entry.class_axis)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, materialize_grads=True)
    named = {key: gradient.numpy() for key, gradient in zip(parameters, gradients, strict=True)}
    return Oracle(value.item(), named, tuple(output.shape))


class Elements:
    """Finds the elements of torch's parameters in the initializers of an export, by value.

    Exporters rename, transpose, reorder (the gates of an LSTM), concatenate, cut up and duplicate parameters.
    No two elements of ``Architecture.build()`` are equal, so that each is recognized wherever it went.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        arrays = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
        self._shapes = {name: array.shape for name, array in arrays.items()}
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        self._order = np.argsort(flat)
        self._sorted = flat[self._order]

    def positions(self, model: onnx.ModelProto) -> dict[str, np.ndarray]:
        """For every initializer that holds nothing but elements of parameters, where each of them stands."""
        found = {}
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if array.dtype != self._sorted.dtype or not array.size:
                continue
            nearest = np.searchsorted(self._sorted, array).clip(max=self._sorted.size - 1)
            if (self._sorted[nearest] == array).all():
                found[tensor.name] = self._order[nearest]
        return found

    def worst_error(
        self,
        gradients: Mapping[str, np.ndarray],
        positions: Mapping[str, np.ndarray],
        expected: Mapping[str, np.ndarray],
    ) -> float:
        """The largest error of a parameter's gradient, relative to its norm.

        An element that several initializers hold (a tied embedding, transposed) gets the sum of their gradients.

        Raises:
            AssertionError: An element whose gradient is not zero is in no initializer.
        """
        total = np.zeros(self._sorted.size)
        held = np.zeros(self._sorted.size, bool)
        for name, places in positions.items():
            np.add.at(total, places, gradients[name])
            held[places] = True
        found, present = self._split(total), self._split(held)
        norm = np.sqrt(sum(np.sum(gradient**2) for gradient in expected.values()))
        assert norm > 0
        worst = 0.0
        for name, gradient in expected.items():
            assert (present[name] | (gradient == 0)).all(), f"{name} is in no initializer"
            # A key's bias has no influence on a softmax: what should be zero is compared with all gradients.
            scale = max(float(np.linalg.norm(gradient)), 1e-4 * norm)
            worst = max(worst, float(np.linalg.norm(found[name] - gradient)) / scale)
        return worst

    def _split(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes.values()])
        parts = np.split(flat, ends[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _of(module: str) -> Callable[..., Callable[[], torch.nn.Module]]:
    """Builders of the classes of a file, which is imported when a model is built."""

    def pick(name: str, *arguments: Any, compiled: bool = False, **keywords: Any) -> Callable[[], torch.nn.Module]:
        def build() -> torch.nn.Module:
            file = importlib.import_module(f"zoo.{module}_architectures")
            made = getattr(file, name)(*arguments, **keywords)
            return file.scripted(made) if compiled else made

        return build

    return pick


def _sequences() -> Iterator[Architecture]:
    of = _of("sequence")
    tokens = Input("tokens", ("batch", "sequence"), "index", 20)
    source = Input("source", ("batch", "sequence"), "index", 20)
    mask = Input("mask", ("batch", "sequence"), "mask")
    recurrent: dict[str, Any] = {"fixed": {"dynamo": ("sequence",)}}
    attentive: dict[str, Any] = {"fixed": {"torchscript": ("sequence",)}}
    for kind in ("LSTM", "GRU", "RNN"):
        model = of("LanguageModel", kind, tied=kind == "LSTM")
        yield Architecture(f"{kind.lower()}_language_model", model, (tokens,), **recurrent)
    yield Architecture("rnn_relu", of("LanguageModel", "RNN", 1, nonlinearity="relu"), (tokens,), **recurrent)
    for kind in ("LSTM", "GRU"):
        tagger = of("BidirectionalTagger", kind)
        yield Architecture(f"bidirectional_{kind.lower()}", tagger, (tokens,), **recurrent)
    yield Architecture("unrolled_cells", of("UnrolledCells"), (Input("x", ("batch", 4, 4)),))
    translation = Input("translation", ("batch", 4), "index", 20)
    yield Architecture("seq2seq", of("Seq2Seq"), (source, translation), **recurrent)
    for suffix, norm_first, activation in (("", False, "relu"), ("_norm_first", True, "gelu")):
        encoder = of("TransformerEncoder", norm_first, activation)
        yield Architecture(f"transformer_encoder{suffix}", encoder, (tokens, mask), **attentive)
    # TorchScript takes no mask in float64, ONNX Runtime no Erf.
    double: dict[str, Any] = {"exporters": ("dynamo",), "double": True}
    encoder = of("TransformerEncoder", True, "relu")
    yield Architecture("transformer_double", encoder, (tokens, mask), **double)
    memory = Input("memory", ("batch", 3, 8))
    yield Architecture("transformer_decoder", of("TransformerDecoder"), (tokens, memory), **attentive)
    yield Architecture("translator", of("Translator"), (source, translation), **attentive)
    yield Architecture("llama", of("Llama"), (tokens,))
    # TorchScript has no RMS normalization; in opset 23 it is an operator, as is Attention.
    for suffix, opset in (("library", 18), ("opset_23", 23)):
        llama = of("Llama", library=True)
        yield Architecture(f"llama_{suffix}", llama, (tokens,), exporters=("dynamo",), opset=opset)
    sound = Input("sound", ("batch", 2, "sequence"))
    yield Architecture("wavenet", of("WaveNet"), (sound,), "huber")
    yield Architecture("text_conv_net", of("TextConvNet"), (tokens,))
    yield Architecture("attention_pooling", of("AttentionPooling"), (tokens, mask), "binary_cross_entropy")
    yield Architecture("linear_attention", of("LinearAttention"), (tokens,))
    waves = Input("x", ("batch", 8, 6))
    mixer = of("SpectralMixer")  # TorchScript has no Fourier transform
    yield Architecture("spectral_mixer", mixer, (waves,), "mean_squared_error", exporters=("dynamo",))
    x, steps = Input("x", ("batch", 4)), Input("steps", (), "index", 5)
    script: dict[str, Any] = {"exporters": ("torchscript",)}  # dynamo exports no compiled module
    yield Architecture("scripted_loop", of("ScriptedLoop", compiled=True), (x, steps), **script)
    series = Input("x", ("batch", "sequence", 4))
    for name in ("Recurrence", "Layers", "History", "Context"):
        yield Architecture(f"scripted_{name.lower()}", of(f"Scripted{name}", compiled=True), (series,), **script)
    yield Architecture("scripted_branch", of("ScriptedBranch", compiled=True), (x,), **script)
    traced: dict[str, Any] = {"exporters": ("dynamo",)}  # TorchScript has no such operators
    yield Architecture("traced_branch", of("TracedBranch"), (x,), **traced)
    yield Architecture("traced_scan", of("TracedScan"), (Input("x", ("batch", 5, 4)),), **traced)


def _images() -> Iterator[Architecture]:
    of = _of("vision")
    image = Input("image", ("batch", 3, 8, 8))
    resizable = Input("image", ("batch", 3, "height", "width"))
    gray = Input("image", ("batch", 1, 8, 8))
    resizable_gray = Input("image", ("batch", 1, "height", "width"))
    yield Architecture("convnext", of("ConvNeXt"), (resizable,))
    yield Architecture("mixed_unet", of("MixedUNet"), (resizable_gray,), "mean_squared_error")
    for kind in ("group", "instance"):
        yield Architecture(f"{kind}_norm_net", of("NormNet", kind), (image,))
    yield Architecture("group_norm_opset_21", of("NormNet", "group"), (image,), exporters=("dynamo",), opset=21)
    yield Architecture("squeeze_excite", of("SqueezeExcite"), (resizable,))
    yield Architecture("super_resolution", of("SuperResolution"), (resizable_gray,), "mean_absolute_error")
    yield Architecture("separable_net", of("SeparableNet"), (resizable,), optimize=False)
    yield Architecture("mixer", of("Mixer"), (image,))
    yield Architecture("volume_net", of("VolumeNet"), (Input("volume", ("batch", 1, 4, 8, 4)),))
    yield Architecture("sound_net", of("SoundNet"), (Input("sound", ("batch", 1, 16)),), "mean_absolute_error")
    latent = Input("latent", ("batch", 5))
    yield Architecture("decoder", of("Decoder"), (latent,), "binary_cross_entropy", optimize=False)
    # TorchScript writes affine_grid from opset 20 only.
    yield Architecture("spatial_transformer", of("SpatialTransformer"), (gray,), opset=20)
    yield Architecture("vision_transformer", of("VisionTransformer"), (image,))
    yield Architecture("discriminator", of("Discriminator"), (gray,), "binary_cross_entropy")
    yield Architecture("capsules", of("Capsules"), (Input("x", ("batch", 6)),), "mean_squared_error")
    yield Architecture("dense_pyramid", of("DensePyramid"), (resizable,), class_axis=1)
    yield Architecture("shifted_windows", of("ShiftedWindows"), (image,))


def _others() -> Iterator[Architecture]:
    of = _of("other")
    table = Input("x", ("batch", 6))
    autoencoder = (Input("x", ("batch", 8)), Input("noise", ("batch", 3)))
    yield Architecture("variational_autoencoder", of("VariationalAutoencoder"), autoencoder, "output")
    pairs = (Input("user", ("batch",), "index", 12), Input("item", ("batch",), "index", 9))
    factorization = of("MatrixFactorization")
    yield Architecture("matrix_factorization", factorization, pairs, "mean_squared_error")
    yield Architecture("factorization_double", factorization, pairs, "mean_squared_error", double=True)
    edges = tuple(Input(name, ("edges",), "index", "nodes") for name in ("source", "destination"))
    graph = (Input("x", ("nodes", 4)), *edges)
    for sum_by in ("scatter_add", "amax", "prod"):
        yield Architecture(f"graph_{sum_by}", of("GraphConvolution", sum_by), graph)
    # TorchScript loses all but one of the rows with the same index, or refuses.
    by_index = of("GraphConvolution", "index_add")
    yield Architecture("graph_index_add", by_index, graph, exporters=("dynamo",))
    yield Architecture("mixture_of_experts", of("MixtureOfExperts"), (table,))
    siamese = (Input("first", ("batch", 6)), Input("second", ("batch", 6)), Input("same", ("batch",), "index", 2))
    yield Architecture("siamese", of("Siamese"), siamese, "output")
    yield Architecture("highway", of("Highway"), (table,))
    yield Architecture("neural_ode", of("NeuralOde"), (Input("x", ("batch", 5)),), "huber")
    yield Architecture("point_net", of("PointNet"), (Input("cloud", ("batch", "points", 3)),))
    bag = Input("features", ("batch", 4), "index", 15)
    yield Architecture("factorization_machine", of("FactorizationMachine"), (bag,), "binary_cross_entropy")
    words = Input("words", ("batch", "sequence"), "index", 20)
    for mode in ("mean", "sum", "max"):
        yield Architecture(f"bag_of_words_{mode}", of("BagOfWords", mode), (words,))
    yield Architecture("coupling", of("Coupling"), (table,), "output")
    density = (Input("x", ("batch", 4)), Input("y", ("batch", 1)))
    yield Architecture("mixture_density", of("MixtureDensity"), density, "output")
    yield Architecture("sine_net", of("SineNet"), (Input("x", ("batch", 2)),), "mean_squared_error")
    # The dynamo exporter has no translation of cdist.
    radial = of("RadialBasis")
    yield Architecture("radial_basis", radial, (Input("x", ("batch", 4)),), "huber", exporters=("torchscript",))
    word = Input("word", ("batch",), "index", 20)
    samples = (word, Input("context", ("batch",), "index", 20), Input("negatives", ("batch", 3), "index", 20))
    yield Architecture("word_vectors", of("WordVectors"), samples, "output")
    # Folding constants multiplies the latent vectors with the weights of the queries.
    yield Architecture("perceiver", of("Perceiver"), (Input("cloud", ("batch", "points", 3)),), optimize=False)
    two_heads = of("TwoHeads")
    yield Architecture("two_heads", two_heads, (table,), output_names=("output", "second"))


ARCHITECTURES: dict[str, Architecture] = {entry.name: entry for entry in (*_sequences(), *_images(), *_others())}
