"""Import weights that were trained with an exported step graph into the original model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.data.data_names import read_names, write_names
from onnxtrain.data.files import map_safetensors
from onnxtrain.data.model_inputs import FixedBatch
from onnxtrain.editing.working_copy.widening import rounded_to
from onnxtrain.errors import DataError, ModelError
from onnxtrain.errors.formatting import listed
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import HALVES
from onnxtrain.model_file.file import ModelFile
from onnxtrain.parameters.ties import choose_copies, find_repeated, untied, with_copies


@dataclass(frozen=True)
class Imported:
    """Names of the tensors in a file of states."""

    weights: list[str]
    others: list[str]


def import_states(
    model: str | os.PathLike[str],
    states: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    untie: bool | str | Sequence[str] = False,
    tie: bool | str | Sequence[str] = False,
) -> Imported:
    """Write a model with the weights of a file of states; nothing else changes."""
    given = ModelFile.load(model)
    tensors = _read(Path(states))
    file = untied(given, untie, lambda _: tensors)
    values = {name: array for name, array in tensors.items() if _has(file, name)}
    if not values:
        raise DataError(
            f"{str(states)!r} has no weight of {str(model)!r}: it holds {_listed(tensors)}, the model "
            f"{_listed(file.names())}; give the model that the step graph was exported from."
        )
    for name, array in values.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(f"{name!r} in {str(states)!r} has values that are not finite; the training diverged.")
    values = {name: _in_type_of(file, name, array) for name, array in values.items()}
    copies = choose_copies(file, tie)
    one = {name for name, array in values.items() if array.shape != file.value(name).shape}
    if one:  # perhaps of tokens that the file holds for each example
        working = infer_shapes(file.training_model())
        fixed = FixedBatch.of(working.graph)
        repeated = find_repeated(working, None if fixed is None else fixed.size)
        copies += [copy for copy in repeated if copy.name in one]
    file.save(output, with_copies(values, copies))
    write_names(Path(output), read_names(given))
    return Imported(list(values), [name for name in tensors if name not in values])


def _in_type_of(file: ModelFile, name: str, array: np.ndarray) -> np.ndarray:
    kind = ir.DataType(file.declared(name).data_type)
    return rounded_to(array, kind) if kind in HALVES and array.dtype == np.float32 else array


def _has(file: ModelFile, name: str) -> bool:
    if any(sparse.values.name == name for sparse in file.proto.graph.sparse_initializer):
        return True
    try:
        file.declared(name)
    except ModelError:
        return False
    return True


def _read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        path.stat()
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    try:
        return map_safetensors(path)
    except DataError as error:
        raise DataError(f"{str(path)!r} is not a file of states as safetensors: {error}") from error


def _listed(names: Any) -> str:
    return listed(map(repr, sorted(names)), 4) or "nothing"
