"""Weighted sums of several adapters of one model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter, Array, Entry, concatenated
from onnxtrain.adapters.architectures import Architecture
from onnxtrain.adapters.checkpoint import Checkpoint
from onnxtrain.adapters.convert import fitted
from onnxtrain.adapters.files import SUFFIX, element_types, is_adapter_path, read_adapter, write_adapter
from onnxtrain.adapters.full_tensors import for_peft
from onnxtrain.adapters.manifest import describe_base
from onnxtrain.adapters.packing import in_checkpoint
from onnxtrain.adapters.validity import checked
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid

Combination = Literal["cat", "svd", "linear"]
COMBINATIONS: tuple[Combination, ...] = ("cat", "svd", "linear")

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
    if combination not in COMBINATIONS:
        raise OptionError(f"combination is {combination!r}; it is {' or '.join(map(repr, COMBINATIONS))}.")
    if rank is not None and combination != "svd":
        raise OptionError(f'rank is for combination="svd", but combination is {combination!r}; leave it out.')
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise OptionError(f"rank is {rank!r}; it must be an integer of at least 1.")
    if not is_adapter_path(path):
        raise OptionError(f"output is {str(path)!r}; it must be a file that ends in .onnx_adapter, or a folder.").about(
            "output", got=str(path)
        )
    paths = [one for one, _ in given]
    read = _read(paths, path, model)
    terms: dict[str, list[Term]] = {}
    for (label, weight), adapter in zip(given, read.adapters, strict=True):
        if adapter.dora:
            raise OptionError(f"{label!r} has magnitudes (DoRA), whose sum is no adapter; merge it, or leave it out.")
        for name, entry in adapter.entries.items():
            terms.setdefault(name, []).append((entry, weight))
    settings = _settings(paths, read)
    size = rank or max(entry.rank for adapter in read.adapters for entry in adapter.entries.values())
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused below
        entries = {name: _combined(name, each, combination, size) for name, each in terms.items()}
    largest = max(entry.rank for entry in entries.values())
    result = checked(replace(settings, entries=entries, rank=largest, alpha=float(largest)), str(path))
    if path.suffix != SUFFIX:
        result = read.in_checkpoint(result)
    write_adapter(path, result, read.dtypes, {}, lambda: read.in_modules(result))


@dataclass(frozen=True)
class _Read:
    """Adapters with the names of one model."""

    adapters: Sequence[Adapter]
    base: Mapping[str, Any] | None
    dtypes: Mapping[str, ir.DataType]
    checkpoint: Checkpoint
    in_checkpoint: Callable[[Adapter], Adapter]
    in_modules: Callable[[Adapter], Mapping[str, Array]]


def _settings(labels: Sequence[str], read: _Read) -> Adapter:
    """Return an adapter without entries that has the tensors that were trained in full, and the settings, of a sum."""
    full = {label: {**one.tensors, **one.of_modules} for label, one in zip(labels, read.adapters, strict=True)}
    having = [label for label in labels if full[label]]
    chosen = read.adapters[labels.index(having[0])] if having else read.adapters[0]
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
        dropout=read.adapters[0].dropout,
        base=read.base,
        tensors=chosen.tensors,
        of_modules=chosen.of_modules,
        aliases=chosen.aliases,
        checkpoint=read.checkpoint,
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


def _read(paths: Sequence[str], output: Path, model: str | os.PathLike[str] | onnx.ModelProto | None) -> _Read:
    """Read adapters with the names of one model."""
    files = [str(path).endswith(SUFFIX) for path in (*paths, output)]
    if model is not None:
        file = ModelFile.load(model)
        matched = [fitted(file, path) for path in paths]
        layers = {
            name: layer
            for found, layer_parts, _ in matched
            for name, (layer, _) in zip(found.entries, layer_parts, strict=True)
        }
        dtypes = {name: layer.y.dtype or ir.DataType.FLOAT for name, layer in layers.items()}
        adapters, graph = [found for found, _, _ in matched], matched[0][2]
        base = describe_base(file, layers.values())
        checkpoint = _checkpoint(adapters).completed(file.folder, None)
        architecture = Architecture.of(graph[0].initializers, file.folder, checkpoint)
        return _Read(
            adapters,
            base,
            dtypes,
            checkpoint,
            lambda result: in_checkpoint(result, graph[1], architecture),
            lambda result: for_peft(result, *graph, architecture, str(output)),
        )
    if any(files) and not all(files):
        raise OptionError(
            "An .onnx_adapter file and a PEFT folder may name the layers differently; give the model that both belong "
            "to (model=), or one form of all."
        )
    adapters = [read_adapter(path) for path in paths]
    dtypes = {name: dtype for path in paths if files[-1] for name, dtype in element_types(Path(path)).items()}
    common = _common_base(paths, [adapter.base for adapter in adapters])
    return _Read(
        adapters, common, dtypes, _checkpoint(adapters), lambda result: result, lambda result: result.of_modules
    )


def _checkpoint(adapters: Sequence[Adapter]) -> Checkpoint:
    """Return the first name and the first task of a PyTorch model that adapters have."""
    found = [adapter.checkpoint for adapter in adapters]
    name = next((one.base_model for one in found if one.base_model), "")
    return Checkpoint(name, next((one.task_type for one in found if one.task_type), ""))


def _common_base(paths: Sequence[str], bases: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the description of the adapters' model; ``None`` where an adapter has none."""
    known = [(path, base) for path, base in zip(paths, bases, strict=True) if base is not None]
    weights: dict[str, Any] = {}
    for path, base in known:
        own = base.get("weights")
        own = own if isinstance(own, Mapping) else {}
        same = base.get("graph") == known[0][1].get("graph")
        if not same or any(weights.get(name, digest) != digest for name, digest in own.items()):
            raise ModelError(f"{path!r} and {known[0][0]!r} were made for different models, so that they have no sum.")
        weights |= own
    return {**known[0][1], "weights": weights} if len(known) == len(bases) else None


def _combined(name: str, terms: Sequence[Term], combination: Combination, rank: int) -> Entry:
    """Return the weighted sum of the adapters of one layer, with the scale 1."""
    shapes = {(entry.inputs, entry.outputs, entry.a.shape[2:] if entry.is_convolution else ()) for entry, _ in terms}
    if len(shapes) > 1 or len({(entry.is_convolution, entry.embedding) for entry, _ in terms}) > 1:
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
