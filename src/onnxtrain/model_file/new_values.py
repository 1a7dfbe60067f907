"""New values of initializers, sorted by where a model stores them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.data_changes import Change
from onnxtrain.model_file.embedded_weights import Hidden
from onnxtrain.model_file.external import ExternalData
from onnxtrain.model_file.protobuf_wire import Path
from onnxtrain.model_file.tensor_data import raw_bytes

Arrays = Mapping[str, npt.NDArray[np.generic]]


class NewValues:
    """New values to write over a model; every other byte stays.

    Large values are asked for when they are written, one after the other.

    Args:
        values: New arrays by initializer name, of the initializers' types and shapes.
        declared: Gives the initializer of a name.
        positions: The places of the main graph's initializers.
        external: Those whose data is in files.
        hidden: Those that are no initializers of the main graph.
        large: Places of those whose data is inside the model and made when it is written.

    Attributes:
        inline: Those inside the model, by place.
        inner: Those in Constant nodes and bodies, by the way to them.
        changes: Those in data files, by file.

    Raises:
        ModelError: A value does not fit its initializer.
    """

    def __init__(
        self,
        values: Arrays,
        declared: Callable[[str], TensorProto],
        *,
        positions: Mapping[str, int],
        external: Mapping[str, ExternalData],
        hidden: Mapping[str, Hidden],
        large: Container[int],
    ) -> None:
        self.inline: dict[int, npt.NDArray[np.generic]] = {}
        self.inner: dict[Path, tuple[TensorProto, npt.NDArray[np.generic]]] = {}
        self.changes: dict[str, list[Change]] = {}
        self._late: dict[int, Callable[[], bytes | memoryview]] = {}
        for name in values:
            tensor = declared(name)
            stored = partial(_stored_bytes, tensor, values, name)
            if name in external:
                data = external[name]
                self.changes.setdefault(data.file, []).append(Change(data.offset, data.length, stored))
            elif name in hidden:
                array = values[name]
                _check_value(tensor, array)
                self.inner[hidden[name].path] = (tensor, hidden[name].stored(array))
            elif positions[name] in large:
                self._late[positions[name]] = stored
            else:
                array = values[name]
                _check_value(tensor, array)
                self.inline[positions[name]] = array

    def late(self, position: int) -> bytes | memoryview | None:
        """The new data of a large initializer inside the model; ``None`` where it stays."""
        made = self._late.get(position)
        return None if made is None else made()


def _check_value(tensor: TensorProto, array: npt.NDArray[np.generic]) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    if array.dtype != dtype or array.shape != shape:
        raise ModelError(
            f"The new value of {tensor.name!r} is {array.dtype}{list(array.shape)}, "
            f"but the model has {dtype}{list(shape)}; type and shape must stay the same."
        )


def _stored_bytes(tensor: TensorProto, values: Arrays, name: str) -> bytes | memoryview:
    array = values[name]
    _check_value(tensor, array)
    return raw_bytes(array, tensor.data_type)


def check_shared(external: Mapping[str, ExternalData], values: Arrays) -> None:
    """Exporters may let equal initializers share their bytes in a data file: they can only change together.

    Raises:
        ModelError: Some that share bytes are given different values.
    """
    order = sorted(external, key=lambda name: (external[name].file, external[name].offset))
    widest = order[0] if order else ""  # of those before, the one that reaches furthest
    for name in order[1:]:
        first, second = external[widest], external[name]
        apart = first.file != second.file or second.offset >= first.offset + first.length
        same = (first.offset, first.length) == (second.offset, second.length)
        changed = widest in values or name in values
        if changed and not apart and not (same and _are_equal(values.get(widest), values.get(name))):
            raise ModelError(
                f"The initializers {widest!r} and {name!r} share bytes of {first.file!r}, so that they "
                "cannot be given different values; save the model with its weights inside, and train that."
            )
        if apart or second.offset + second.length > first.offset + first.length:
            widest = name


def _are_equal(one: npt.NDArray[np.generic] | None, other: npt.NDArray[np.generic] | None) -> bool:
    return one is not None and other is not None and one.tobytes() == other.tobytes()
