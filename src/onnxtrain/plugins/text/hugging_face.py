"""Write a model as a checkpoint of transformers: its weights under the names and in the layouts of the checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.adapters.base_model import BaseModel, packed_layers
from onnxtrain.adapters.checkpoint import Architecture, Checkpoint
from onnxtrain.adapters.full_tensors import ModuleTensor, bias_of, module_tensors, names_in_checkpoint
from onnxtrain.adapters.layers import Layer, Target
from onnxtrain.adapters.merging import add_to_weight
from onnxtrain.adapters.values import evaluate, matrix
from onnxtrain.data.files import map_safetensors
from onnxtrain.editing.working_copy.kv_cache import remove_cache_inputs
from onnxtrain.errors import ModelError
from onnxtrain.errors.formatting import listed
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.model_file.exporters import NameOrigin, origin_of
from onnxtrain.model_file.exporters.pytorch import lost_parameters
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.small_files import read_json
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.model_file.writing import write_files
from onnxtrain.parameters.names import module_paths
from onnxtrain.parameters.readers import read_through_identity
from onnxtrain.parameters.trainable import parameter_table

_CONFIG: Final = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER: Final = "adapter_config.json"
"""File for which transformers loads an adapter of the folder, too."""

_BESIDE: Final = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Files that are copied from beside the model, else from its checkpoint."""

_SHARD: Final = 2 << 30
"""Bytes of a file of weights."""

_ROOT: Final = re.compile(
    r"^(?P<wrapper>(?:.*\.)?)(?:model\.language_model|model\.decoder|model|transformer|gpt_neox|backbone)"
    r"\.(?:layers|h|blocks)\.(?P<layer>\d+)\."
)
"""The name of a tensor of a layer, behind the modules that wrap the model in an export."""

_BARE: Final = re.compile(r"(layers|h|blocks)\.\d+\.")

_TRANSPOSED: Final = {
    kind: re.compile(r"\.(c_attn|q_attn|c_proj|c_fc)\.weight$") for kind in ("gpt2", "openai-gpt", "imagegpt")
}
"""Weights that a checkpoint has as [inputs, outputs], by ``model_type``."""

_EMBEDDING: Final = re.compile(r"(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_BUFFER: Final = re.compile(r"\.(attn|attention)\.(masked_)?bias$|rotary_emb")
"""Buffers that old checkpoints have beside weights."""

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEAD: Final = re.compile(r"^(language_model\.)?(lm_head|embed_out)\.weight$")


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the checkpoint, which is computed when it is written."""

    name: str
    size: int
    make: Callable[[], Array]
    sources: frozenset[str]


@checks_arguments
@refuses_invalid()
def save_checkpoint(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
) -> None:
    """Write a language model as a checkpoint that ``AutoModelForCausalLM.from_pretrained`` loads, an adapter merged.

    Names and layouts are those of the module paths in the model and of the architecture's checkpoints. Quantized
    weights become float32, to which the adapter is added exactly. ``config.json`` and the tokenizer's files are copied.

    Args:
        model: The ONNX model: an export of transformers, or one of onnxruntime-genai's builder.
        output: The folder to write.
        adapter: An ``.onnx_adapter`` file or a PEFT folder, which is merged into the weights.
        base_model: The folder of the checkpoint that the model was exported from, which has ``config.json``; by default
            the adapter's, else the folder of the model.

    Raises:
        ModelError: There is no ``config.json``, the names of the checkpoint are not known, or a file cannot be read or
            written.

    Example:
        >>> onnxtrain.text.save_checkpoint("model.onnx", "merged", adapter="tuned.onnx_adapter")  # doctest: +SKIP
    """
    base = BaseModel.of(ModelFile.load(model))
    found, targets = (Adapter({}, 1, 1.0), list[Target]()) if adapter is None else base.read(adapter)
    folder, config, source = _config(base, found.checkpoint, base_model)
    for name, array in found.tensors.items():
        base.graph.initializers[name].const_value = ir.tensor(array, name=name)
    checkpoint = Checkpoint(str(source))
    architecture = base.architecture(checkpoint)
    architecture.check_known(str(output))
    adapted: dict[int, list[tuple[Target, Entry]]] = {}
    for target, entry in zip(targets, found.entries.values(), strict=True):
        adapted.setdefault(id(target.layer.node), []).append((target, entry))
    tensors = _without_wrapper(list(_tensors(base, architecture, adapted)))
    _check_complete(base, tensors, architecture, str(output))
    _check_layers(tensors, config, source, str(output))
    tensors = _with_others(tensors, source, str(output))
    transposed = _TRANSPOSED.get(str(config.get("model_type")))
    path = Path(output)
    path.mkdir(parents=True, exist_ok=True)
    tied = _write(path, tensors, transposed)
    config |= {"dtype": "float32", "tie_word_embeddings": tied}
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    copies = {path / _CONFIG: _json(config)}
    for name in _BESIDE:
        origin = next((one / name for one in (folder, source) if one is not None and (one / name).is_file()), None)
        if origin is not None and origin.resolve() != (path / name).resolve():
            copies[path / name] = origin.read_bytes()
    write_files(copies)


def _config(
    base: BaseModel, checkpoint: Checkpoint, base_model: str | os.PathLike[str] | None
) -> tuple[Path | None, dict[str, Any], Path]:
    """Return the folder of the model, and the configuration of the checkpoint with its folder."""
    given = checkpoint.base_model if base_model is None else os.fspath(base_model)
    folder = base.file.folder
    tried = (
        [Path(given)] if base_model is not None else [*([Path(given)] if given else []), *([folder] if folder else [])]
    )
    for one in tried:
        try:
            config = read_json(one / _CONFIG, finite=False)
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            return folder, config, one
    places = " or ".join(repr(str(one)) for one in tried) or "the model in memory"
    raise ModelError(
        f"A checkpoint of transformers needs {_CONFIG}, but there is none in {places}; "
        "name the folder of the checkpoint that the model was exported from: base_model=, or --base-model."
    )


def _tensors(
    base: BaseModel, architecture: Architecture, adapted: Mapping[int, Sequence[tuple[Target, Entry]]]
) -> Iterator[_Tensor]:
    """Yield the tensors of all layers and of other modules, under the names of the checkpoint."""
    parts: dict[str, _Tensor] = {}
    of_layers: set[str] = set()
    named: set[str] = set()
    for layer in base.layers:
        weight = str(layer.weight.name)
        merged = partial(_merged, layer, adapted.get(id(layer.node), ()))
        bias = bias_of(layer)
        bias = bias if bias is not None and bias.const_value is not None and is_float(bias) else None
        of_layers |= {weight, *(() if bias is None else (str(bias.name),))}
        split = architecture.built and len(layer.parts) > 1 and not architecture.packs(layer.name)
        for target in layer.targets if split else (Target(layer),):
            size = layer.inputs * target.outputs * 4
            made = {"weight": (weight, size, partial(_weight, merged, target))}
            if bias is not None:
                made["bias"] = str(bias.name), target.outputs * 4, partial(_bias, bias, target)
            for word, (name, count, make) in made.items():
                known = names_in_checkpoint(layer, word, architecture)
                named.update(known)
                full = f"{architecture.in_checkpoint(target.name)}.{word}" if split else known[0]
                parts[full] = _Tensor(full, count, make, frozenset([name]))
    for packed in packed_layers(base.layers, architecture):
        for word in ("weight", "bias"):
            names = [f"{architecture.in_checkpoint(name)}.{word}" for name in packed.targets]
            if all(name in parts for name in names):
                given = [parts.pop(name) for name in names]
                whole = f"{architecture.in_checkpoint(packed.name)}.{word}"
                sources = frozenset[str]().union(*(one.sources for one in given))
                parts[whole] = _Tensor(whole, sum(one.size for one in given), partial(_joined, given), sources)
    yield from parts.values()
    for node in base.graph:  # the builder's embedding of low-bit weights, which are those of the head
        if node.op_type == "GatherBlockQuantized":
            read = _initializer(node.inputs[0])
            head = next((layer for layer in base.layers if layer.weight is read), None)
            if head is not None:
                name = f"{architecture.in_checkpoint('model.embed_tokens')}.weight"
                plain = partial(_weight, partial(_merged, head, ()), Target(head))
                yield _Tensor(name, head.inputs * head.outputs * 4, plain, frozenset([str(head.weight.name)]))
    for name, value in base.graph.initializers.items():
        if not is_float(value):
            continue
        own = [] if name in of_layers else module_tensors(value, base.layers, architecture)
        several = [one for one in _of_several(value, architecture) if one.names[0] not in named]
        for tensor in own or several:
            if tensor.word in ("weight", "bias"):
                size = int(np.prod(tensor.shape)) * 4
                yield _Tensor(tensor.names[0], size, tensor.in_checkpoint, frozenset([str(name)]))


def _of_several(value: ir.Value, architecture: Architecture) -> list[ModuleTensor]:
    """Return the tensors of an initializer that PyTorch's exporter merged from equal ones, as of fresh norms."""
    reading, name = read_through_identity(value), str(value.name)
    paths = (*((name,) if origin_of(name) is NameOrigin.MODULE else ()), *module_paths(value))
    if len(dimensions(value) or ()) != 1 or not 1 < len(paths) == len(reading) or not all("." in one for one in paths):
        return []
    # Exporters compute the sum with the offset of a norm, unless the graph does.
    is_sum = all(node.op_type != "Add" for node, _ in reading)
    offsets = [architecture.offset if is_sum and path.endswith("norm.weight") else 0.0 for path in paths]
    return [ModuleTensor((path,), value, value, offset=offset) for path, offset in zip(paths, offsets, strict=True)]


def _initializer(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer behind views of it."""
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0] if node.op_type in ("Reshape", "Identity") else None
    return value


def _merged(layer: Layer, adapted: Sequence[tuple[Target, Entry]]) -> Array:
    """Return the weight of a layer with its adapters: [inputs, outputs]; [rows, outputs] of an embedding."""
    found = np.array(matrix(layer), np.float32)
    for target, entry in adapted:
        add_to_weight(target, entry, found)
    return found


def _weight(merged: Callable[[], Array], target: Target) -> Array:
    weight = target.of_weight(merged())
    return weight if target.layer.is_embedding or target.layer.is_convolution else weight.T


def _bias(bias: ir.Value, target: Target) -> Array:
    return evaluate(bias).reshape(-1)[target.start : target.start + target.outputs]


def _joined(parts: list[_Tensor]) -> Array:
    return np.concatenate([part.make() for part in parts])


def _without_wrapper(tensors: list[_Tensor]) -> list[_Tensor]:
    """Return tensors without the path of the module that wraps the model, and without those outside it."""
    found = next((match["wrapper"] for one in tensors if (match := _ROOT.match(one.name))), "")
    inside = [one for one in tensors if one.name.startswith(found) and "rotary_emb" not in one.name]
    return [_Tensor(one.name.removeprefix(found), one.size, one.make, one.sources) for one in inside]


def _check_complete(base: BaseModel, tensors: list[_Tensor], architecture: Architecture, label: str) -> None:
    """Refuse a model with parameters that no tensor of the checkpoint holds."""
    held = frozenset[str]().union(*(one.sources for one in tensors))
    model = base.file.training_model()
    remove_cache_inputs(model)
    trained = [row.name for row in parameter_table(model, None) if row.trainable]
    if not architecture.norms:  # the checkpoint has none, the builder writes ones
        trained = [name for name in trained if not architecture.is_norm(name)]
    layers = {match[0] for one in tensors if (match := _ROOT.match(one.name))}
    missing = [name for name in trained if name not in held]
    for name in lost_parameters(base.graph):  # two norms of one value that were equal are one node in the file
        is_neutral = name.endswith("norm.weight") and architecture.offset != 0
        if name.endswith(".weight") and any(layer in name for layer in layers) and not is_neutral:
            missing += [] if any(name.endswith(one.name) for one in tensors) else [name]
    if missing:
        raise ModelError(
            f"{label!r} cannot be a checkpoint of transformers: the model does not say which module has "
            f"{listed(missing, 3)}; export with torch.onnx.export(..., optimize=False), or write the model as .onnx."
        ).about(label, got=missing)
    if not any(_EMBEDDING.search(one.name) for one in tensors):
        raise ModelError(
            f"{label!r} cannot be a checkpoint of transformers: the model has no embedding in floating point, or "
            "in those of its head; write the model as .onnx."
        ).about(label)
    if not any(_ROOT.match(one.name) for one in tensors):
        shown = listed([one.name for one in tensors], 3) if tensors else "none"
        raise ModelError(
            f"{label!r} cannot be a checkpoint of transformers: the names of the weights ({shown}) are those of no "
            "language model that it exports; write the model as .onnx."
        ).about(label)


def _with_others(tensors: list[_Tensor], source: Path, label: str) -> list[_Tensor]:
    """Add what only the checkpoint has, such as a vision tower; refuse names that it does not have."""
    known: dict[str, Array] = {}
    for file in _weight_files(source):
        known |= map_safetensors(file)
    if not known:
        return tensors
    if any(map(_BARE.match, known)):  # of the model without its head, as GPT-2's
        root = next(one.name.partition(".")[0] for one in tensors if _ROOT.match(one.name))
        known = {name if _HEAD.search(name) else f"{root}.{name}": array for name, array in known.items()}
    former = [one.name.replace("model.language_model.", "language_model.model.", 1) for one in tensors]
    former = [f"language_model.{name}" if _HEAD.search(name) else name for name in former]
    tensors = [replace(one, name=name) if name in known else one for one, name in zip(tensors, former, strict=True)]
    own = {one.name for one in tensors}
    if strange := sorted(name for name in own - known.keys() if not _HEAD.search(name)):
        raise ModelError(
            f"{label!r} cannot be a checkpoint of transformers: {str(source)!r} has no {listed(strange, 3)}; give the "
            "checkpoint that the model was exported from (base_model=), or write the model as .onnx."
        ).about(label, got=strange)
    others = [name for name in known if name not in own and not _HEAD.search(name)]
    of_layers = {match[0] for name in own if (match := _ROOT.match(name))}
    weights = [name for name in others if name.endswith((".weight", ".bias")) and not _BUFFER.search(name)]
    # Exporters leave out biases that are zero, and norms of 1 + w where w is, as of a model that nobody trained.
    weights = [name for name in weights if known[name].ndim > 1 or np.asarray(known[name], np.float32).any()]
    if lost := [name for name in weights if (match := _ROOT.match(name)) and match[0] in of_layers]:
        raise ModelError(
            f"{label!r} cannot be a checkpoint of transformers: the model lacks {listed(lost, 3)} of {str(source)!r}; "
            "give the checkpoint that the model was exported from (base_model=), or write the model as .onnx."
        ).about(label, got=lost)
    made = [_Tensor(name, known[name].size * 4, partial(np.asarray, known[name]), frozenset()) for name in others]
    return [*tensors, *made]


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that transformers reads of a checkpoint."""
    if (folder / _WEIGHTS).is_file() or not (folder / _INDEX).is_file():
        return [folder / _WEIGHTS] if (folder / _WEIGHTS).is_file() else []
    try:
        places = read_json(folder / _INDEX)["weight_map"]
        return [folder / name for name in sorted(set(places.values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"'{folder / _INDEX}' cannot be read: {error}.") from error


def _check_layers(tensors: Sequence[_Tensor], config: Mapping[str, Any], source: Path, label: str) -> None:
    """Refuse a configuration of another number of layers."""
    of_text = config.get("text_config")
    given = {**config, **of_text} if isinstance(of_text, Mapping) else config
    wanted = next((given[name] for name in _LAYERS if isinstance(given.get(name), int)), None)
    found = len({match["layer"] for one in tensors if (match := _ROOT.match(one.name))})
    if wanted is not None and wanted != found:
        raise ModelError(
            f"{label!r} cannot be a checkpoint of transformers: the model has {found} layers, but {_CONFIG} in "
            f"{str(source)!r} says {wanted}; give the checkpoint that the model was exported from (base_model=)."
        ).about(label, got=found, wanted=wanted)


def _write(folder: Path, tensors: list[_Tensor], transposed: re.Pattern[str] | None) -> bool:
    """Write the weights in files of bounded size; return whether the head is the embedding."""
    from safetensors.numpy import save

    head = next((one for one in tensors if _HEAD.search(one.name)), None)
    embedding = next((one for one in tensors if _EMBEDDING.search(one.name)), None)
    tied = head is None
    if head is not None and embedding is not None and head.size == embedding.size:
        tied = np.array_equal(head.make(), embedding.make())
    shards: list[list[_Tensor]] = [[]]
    for one in tensors:
        if one is head and tied:
            continue
        if shards[-1] and sum(each.size for each in shards[-1]) + one.size > _SHARD:
            shards.append([])
        shards[-1].append(one)
    stale = [_ADAPTER, *([_WEIGHTS] if len(shards) > 1 else [])]
    if other := next((name for name in stale if (folder / name).exists()), None):
        raise ModelError(
            f"{str(folder)!r} has a file {other} of something else, which transformers would load; name another folder."
        ).about(str(folder), got=other)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {one.name: np.ascontiguousarray(one.make(), np.float32) for one in shard}
        if transposed is not None:
            arrays |= {name: np.ascontiguousarray(a.T) for name, a in arrays.items() if transposed.search(name)}
        write_files({folder / file: save(arrays, {"format": "pt"})})
        places |= dict.fromkeys(arrays, file)
    if len(shards) > 1:
        total = sum(one.size for shard in shards for one in shard)
        write_files({folder / _INDEX: _json({"metadata": {"total_size": total}, "weight_map": places})})
    return tied


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
