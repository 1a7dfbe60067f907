"""Operations on adapter files: list the layers of a model, merge, convert, describe, add."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx

from onnxtrain.adapters.adapter import Adapter, Entry, checked, concatenated
from onnxtrain.adapters.base_model import BaseModel
from onnxtrain.adapters.checkpoint import Checkpoint
from onnxtrain.adapters.emit import with_adapters
from onnxtrain.adapters.files import SUFFIX, element_types, is_adapter_path, read_adapter, write_file
from onnxtrain.adapters.layers import Target
from onnxtrain.adapters.merging import MOST_LOST, Cost, is_quantized, merged_weights
from onnxtrain.adapters.peft import write_folder
from onnxtrain.data.data_names import read_names, write_names
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid

Model = str | os.PathLike[str] | onnx.ModelProto
AdapterPath = str | os.PathLike[str]


@dataclass(frozen=True)
class AdaptableLayer:
    """A layer that can have an adapter.

    Attributes:
        name: The name of its adapter.
        kind: Its operator.
        inputs: Number of input features; the number of rows for an embedding.
        outputs: Number of output features.
        bits: Bits per weight.
        weight: Name of the weight's initializer.
        parts: The checkpoint's layers that an exporter packed into this one.
    """

    name: str
    kind: str
    inputs: int
    outputs: int
    bits: int
    weight: str
    parts: tuple[str, ...] = ()


@checks_arguments
@refuses_invalid()
def adaptable_layers(model: Model) -> list[AdaptableLayer]:
    """Return the layers of a model that can have adapters.

    Raises:
        ModelError: The model cannot be read.
    """
    return [
        AdaptableLayer(
            layer.name,
            layer.kind,
            layer.inputs,
            layer.outputs,
            layer.bits,
            str(layer.weight.name),
            tuple(part.name for part in layer.parts),
        )
        for layer in BaseModel.of(ModelFile.load(model)).layers
    ]


@checks_arguments
@refuses_invalid()
def merge_adapter(model: Model, adapter: AdapterPath, output: AdapterPath, *, requantize: bool = False) -> list[Cost]:
    """Merge an adapter into the weights of a model and write the model; only these weights change.

    Where quantizing again would lose more than half of an adapter's change, the layer keeps its weight, and the adapter
    becomes initializers and nodes beside it.

    Args:
        model: A path or a loaded model; it is not changed.
        adapter: An ``.onnx_adapter`` file or a PEFT folder.
        output: The file to write.
        requantize: Quantize the merged weights again, with new scales and zero points of smallest squared error, which
            rounds off a part of the adapter; without it quantized weights are refused.

    Returns:
        The rounding error of each requantized layer, and whether its adapter stays beside it.

    Raises:
        ModelError: A file cannot be read or written, or the adapter belongs to another model.
        OptionError: A weight is quantized and ``requantize`` is false, or several nodes read the weight.
    """
    file = ModelFile.load(model)
    found, targets = BaseModel.of(file).read(adapter)
    adapted = list(zip(targets, found.entries.values(), strict=True))
    costs: dict[str, Cost] = {}
    made = merged_weights(adapted, requantize=requantize, costs=costs)
    beside = set[str]()
    if requantize:
        for name in dict.fromkeys(str(target.layer.weight.name) for target in targets if is_quantized(target.layer)):
            made[name]
        beside = {cost.layer for cost in costs.values() if cost.lost > MOST_LOST}
        made = merged_weights([item for item in adapted if item[0].layer.name not in beside], requantize=True)
    target = with_adapters(file, found.entries, beside) if beside else file
    target.save(output, made | found.tensors)
    write_names(Path(output), read_names(file, adapter))
    return [Cost(cost.layer, 0.0, beside=True) if cost.layer in beside else cost for cost in costs.values()]


@checks_arguments
@refuses_invalid()
def convert_adapter(
    model: Model, adapter: AdapterPath, output: AdapterPath, *, base_model: str | os.PathLike[str] | None = None
) -> None:
    """Convert an adapter to an ``.onnx_adapter`` file or to a PEFT folder.

    Args:
        model: The base model; it provides the names and element types of the layers.
        adapter: An ``.onnx_adapter`` file or a PEFT folder.
        output: The file or folder to write.
        base_model: The PyTorch model that the ONNX model was exported from, a folder or a name on the Hugging Face Hub:
            PEFT's ``AutoPeftModel`` classes load it. By default as in the adapter, else by ``config.json`` beside the
            model.

    Raises:
        ModelError: A file cannot be read or written, or the adapter belongs to another model.
        OptionError: ``output`` has another suffix.
    """
    path = Path(output)
    if not is_adapter_path(path):
        raise OptionError(f"output is {str(path)!r}; it must be a file that ends in .onnx_adapter, or a folder.").about(
            "output", got=str(path)
        )
    base = BaseModel.of(ModelFile.load(model))
    base.write(path, *base.read(adapter), base_model)


@checks_arguments
def describe_adapter(adapter: AdapterPath, *, model: Model | None = None) -> dict[str, Any]:
    """Describe an adapter: its settings and its layers, each with rank, sizes and scale.

    Args:
        adapter: An ``.onnx_adapter`` file or a PEFT folder.
        model: Its base model, to check that it belongs to it.

    Returns:
        A JSON-serializable mapping.

    Raises:
        ModelError: A file cannot be read, or the adapter belongs to another model.
    """
    found = read_adapter(adapter) if model is None else BaseModel.of(ModelFile.load(model)).read(adapter)[0]
    full = {**found.tensors, **found.of_modules}
    return {
        "kind": "DoRA" if found.dora else "LoRA",
        "rank": found.rank,
        "alpha": found.alpha,
        "rank_stabilized": found.rslora,
        "dropout": found.dropout,
        "parameters": sum(entry.size for entry in found.entries.values()) + sum(map(np.size, full.values())),
        "base_model": found.checkpoint.base_model,
        "task_type": found.checkpoint.task_type,
        "trained_in_full": sorted(full),
        "names_its_model": found.base is not None,
        "layers": [
            {
                "name": name,
                "rank": entry.rank,
                "inputs": entry.inputs,
                "outputs": entry.outputs,
                "scale": entry.scale,
            }
            for name, entry in found.entries.items()
        ],
    }


Combination = Literal["cat", "svd", "linear"]

Term = tuple[Entry, float]
"""The adapter of a layer and its weight in the sum."""


@checks_arguments
@refuses_invalid()
def add_weighted(
    adapters: Sequence[tuple[str | os.PathLike[str], float]],
    output: str | os.PathLike[str],
    *,
    combination: Combination = "cat",
    rank: int | None = None,
    model: str | os.PathLike[str] | onnx.ModelProto | None = None,
) -> None:
    """Write the weighted sum of several adapters of one model: ΔW = Σ w s A B, as PEFT's ``add_weighted_adapter``.

    A layer that some adapters lack gets the sum of the others. Tensors that were trained in full beside the adapters,
    such as a head, are not added: only one of the adapters may have some, or all that have some have the same.

    Args:
        adapters: Pairs of an adapter (``.onnx_adapter`` file or PEFT folder) and its weight, which may be negative.
        output: The file or folder to write.
        combination: "cat" concatenates the matrices: the exact sum, with the sum of the ranks. "svd" is the best
            approximation of the sum with rank ``rank``. "linear" adds the matrices, A = Σ ±√|w s| A and
            B = Σ √|w s| B, which need one rank: products of different adapters are a part of the result, so that it is
            no sum.
        rank: The rank of "svd"; by default the largest rank of the adapters.
        model: Their base model. It is needed where a PEFT folder becomes an ``.onnx_adapter`` file, or both are added,
            since it has the names of the layers in each.

    Raises:
        ModelError: A file cannot be read or written, or the adapters belong to different models.
        OptionError: A weight is 0 or not finite, the combination does not exist or does not take ``rank``, ranks differ
            for "linear", an adapter has magnitudes (DoRA), two have different tensors that were trained in full, or
            ``model`` is needed.

    Example:
        >>> add_weighted([("songs.onnx_adapter", 0.7), ("poems.onnx_adapter", 0.3)], "both.onnx_adapter")
        ... # doctest: +SKIP
    """
    path = Path(output)
    given = _checked_terms(adapters)
    if combination not in get_args(Combination):
        raise OptionError(f"combination is {combination!r}; it is {' or '.join(map(repr, get_args(Combination)))}.")
    if rank is not None and combination != "svd":
        raise OptionError(f'rank is for combination="svd", but combination is {combination!r}; leave it out.')
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise OptionError(f"rank is {rank!r}; it must be an integer of at least 1.")
    if not is_adapter_path(path):
        raise OptionError(f"output is {str(path)!r}; it must be a file that ends in .onnx_adapter, or a folder.").about(
            "output", got=str(path)
        )
    paths = [one for one, _ in given]
    base = None if model is None else BaseModel.of(ModelFile.load(model))
    targets: dict[str, Target] = {}
    common = None
    if base is None:
        _check_one_form([*paths, str(path)])
        read = [read_adapter(one) for one in paths]
        common = _common_base(paths, read)
    else:
        matched = [base.read(one) for one in paths]
        read = [found for found, _ in matched]
        for found, own in matched:
            targets |= zip(found.entries, own, strict=True)
    terms: dict[str, list[Term]] = {}
    for (label, weight), adapter in zip(given, read, strict=True):
        if adapter.dora:
            raise OptionError(f"{label!r} has magnitudes (DoRA), whose sum is no adapter; merge it, or leave it out.")
        for name, entry in adapter.entries.items():
            terms.setdefault(name, []).append((entry, weight))
    settings = replace(_settings(paths, read), base=common)
    size = rank or max(entry.rank for adapter in read for entry in adapter.entries.values())
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused below
        entries = {name: _combined(name, each, combination, size) for name, each in terms.items()}
    largest = max(entry.rank for entry in entries.values())
    result = checked(replace(settings, entries=entries, rank=largest, alpha=float(largest)), str(path))
    if base is not None:
        base.write(path, result, [targets[name] for name in result.entries])
    elif path.suffix != SUFFIX:
        write_folder(path, result, result.of_modules)
    else:
        write_file(path, result, {name: dtype for one in paths for name, dtype in element_types(Path(one)).items()})


def _check_one_form(paths: Sequence[str]) -> None:
    """Refuse adapters whose names only a model relates."""
    if len({one.endswith(SUFFIX) for one in paths}) > 1:
        raise OptionError(
            "An .onnx_adapter file and a PEFT folder may name the layers differently; give the model that both belong "
            "to (model=), or one form of all."
        )


def _settings(labels: Sequence[str], adapters: Sequence[Adapter]) -> Adapter:
    """Return an adapter without entries that has the tensors that were trained in full, and the settings, of a sum."""
    full = {label: {**one.tensors, **one.of_modules} for label, one in zip(labels, adapters, strict=True)}
    having = [label for label in labels if full[label]]
    chosen = adapters[labels.index(having[0])] if having else adapters[0]
    for label in having[1:]:
        first, other = full[having[0]], full[label]
        same = {name for name in first.keys() & other.keys() if np.array_equal(first[name], other[name])}
        different = sorted({*first, *other} - same)
        if different:
            advice = "leave one of the two out"
            if chosen.of_modules:
                advice += ", or give the model (model=), which shows heads that PEFT saved untrained"
            raise OptionError(
                f"{having[0]!r} and {label!r} have different values of {different[0]!r}, which was trained in full "
                f"beside the adapters and has no sum; {advice}."
            ).about(different[0])
    return Adapter(
        {},
        chosen.rank,
        chosen.alpha,
        dropout=adapters[0].dropout,
        tensors=chosen.tensors,
        of_modules=chosen.of_modules,
        aliases=chosen.aliases,
        checkpoint=_checkpoint(adapters),
    )


def _checked_terms(adapters: Sequence[tuple[str | os.PathLike[str], float]]) -> list[tuple[str, float]]:
    """Return the adapters' paths with their weights."""
    found = []
    for term in adapters:
        if not isinstance(term, tuple | list) or len(term) != 2:
            raise OptionError(f"adapters has {term!r}; it takes pairs of an adapter and its weight.")
        path, weight = term
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not math.isfinite(weight):
            raise OptionError(f"the weight of {str(path)!r} is {weight!r}; it must be a finite number.")
        if weight == 0:
            raise OptionError(f"the weight of {str(path)!r} is 0, so that it adds nothing; leave it out.")
        found.append((str(path), float(weight)))
    if not found:
        raise OptionError("adapters is empty; it takes pairs of an adapter and its weight.")
    return found


def _checkpoint(adapters: Sequence[Adapter]) -> Checkpoint:
    """Return the first name and the first task of a PyTorch model that adapters have."""
    found = [adapter.checkpoint for adapter in adapters]
    name = next((one.base_model for one in found if one.base_model), "")
    return Checkpoint(name, next((one.task_type for one in found if one.task_type), ""))


def _common_base(paths: Sequence[str], adapters: Sequence[Adapter]) -> Mapping[str, Any] | None:
    """Return the description of the adapters' model; ``None`` where an adapter has none."""
    known = [(path, one.base) for path, one in zip(paths, adapters, strict=True) if one.base is not None]
    weights: dict[str, Any] = {}
    for path, base in known:
        own = base.get("weights")
        own = own if isinstance(own, Mapping) else {}
        same = base.get("graph") == known[0][1].get("graph")
        if not same or any(weights.get(name, digest) != digest for name, digest in own.items()):
            raise ModelError(f"{path!r} and {known[0][0]!r} were made for different models, so that they have no sum.")
        weights |= own
    return {**known[0][1], "weights": weights} if len(known) == len(adapters) else None


def _combined(name: str, terms: Sequence[Term], combination: Combination, rank: int) -> Entry:
    """Return the weighted sum of the adapters of one layer, with the scale 1."""
    if len({(entry.sizes, entry.embedding) for entry, _ in terms}) > 1:
        raise ModelError(f"The adapters have matrices of different sizes for {name!r}; give adapters of one model.")
    if combination == "linear":
        ranks = sorted({entry.rank for entry, _ in terms})
        if len(ranks) > 1:
            raise OptionError(f'combination="linear" needs one rank, but {name!r} has {ranks}; use "cat" or "svd".')
        return _linear(terms)
    whole = concatenated(terms, 1.0)
    try:
        return whole if combination == "cat" else _truncated(whole, rank)
    except np.linalg.LinAlgError:
        raise ModelError(
            f"The sum of the adapters of {name!r} has values that are not finite; train them again."
        ) from None


def _linear(terms: Sequence[Term]) -> Entry:
    """Add the matrices, each with the root of its factor; as in PEFT, A also gets the sign."""
    first, factors = terms[0][0], [entry.scale * weight for entry, weight in terms]
    roots = [math.sqrt(abs(factor)) for factor in factors]
    signed = [math.copysign(root, factor) for root, factor in zip(roots, factors, strict=True)]
    a = sum(entry.a * entry.a.dtype.type(root) for (entry, _), root in zip(terms, signed, strict=True))
    b = sum(entry.b * entry.b.dtype.type(root) for (entry, _), root in zip(terms, roots, strict=True))
    return Entry(np.asarray(a), np.asarray(b), embedding=first.embedding, alias=first.alias)


def _truncated(entry: Entry, rank: int) -> Entry:
    """Return the best approximation of A B with a smaller rank."""
    if entry.rank <= rank:
        return entry
    a, b = entry.a.astype(np.float64), entry.b.astype(np.float64)
    if entry.is_convolution:
        a, b = a.reshape(len(a), -1).T, b.reshape(len(b), -1).T
    q, r = np.linalg.qr(a)
    p, s = np.linalg.qr(b.T)
    left, values, right = np.linalg.svd(r @ s.T)
    root = np.sqrt(values[:rank])
    a, b = q @ (left[:, :rank] * root), (right[:rank].T * root).T @ p.T
    if entry.is_convolution:
        a, b = a.T.reshape(-1, *entry.a.shape[1:]), b.T.reshape(entry.outputs, -1, *entry.b.shape[2:])
    a, b = (np.ascontiguousarray(side, entry.a.dtype) for side in (a, b))
    return Entry(a, b, embedding=entry.embedding, alias=entry.alias)
