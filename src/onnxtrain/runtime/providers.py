"""Execution providers of ONNX Runtime: by which names they are asked for, and where their memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.errors import OptionError

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

Provider = str | tuple[str, dict[str, Any]]
"""A provider by its name, or with its own options."""

_SUFFIX = "ExecutionProvider"

_MEMORY: Mapping[str, str] = {
    "CANNExecutionProvider": "cann",
    CUDA: "cuda",
    "DmlExecutionProvider": "dml",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
}
"""The memory of providers that do not work in the processor's, by the names that ONNX Runtime has for it."""


@dataclass(frozen=True)
class Device:
    """Memory that is not the processor's.

    Attributes:
        kind: What ONNX Runtime calls it, such as ``"cuda"``.
        number: Which one, where there are several.
    """

    kind: str
    number: int = 0

    def place(self, array: np.ndarray) -> Any:
        """An ``onnxruntime.OrtValue`` there, with a copy of an array."""
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self.kind, self.number)


def choose(given: Sequence[Provider]) -> list[Provider]:
    """Providers by their full names; the processor's, which runs what the others do not, comes last.

    Args:
        given: In order of preference, by full names or short ones: ``"cuda"`` for ``"CUDAExecutionProvider"``.

    Raises:
        OptionError: One is not available.
    """
    import onnxruntime

    available = onnxruntime.get_available_providers()
    by_short_name = {_short(name): name for name in available}
    found: list[Provider] = []
    for provider in given:
        name = provider if isinstance(provider, str) else provider[0]
        full = by_short_name.get(_short(name))
        if full is None:
            raise OptionError(
                f"The provider {name!r} is not available; this onnxruntime has {', '.join(available)} "
                f"({', '.join(by_short_name)} for short)."
            )
        found.append(full if isinstance(provider, str) else (full, provider[1]))
    if all(name_of(provider) != CPU for provider in found):
        found.append(CPU)
    return found


def name_of(provider: Provider) -> str:
    """The name of a provider that may have options."""
    return provider if isinstance(provider, str) else provider[0]


def device_of(providers: Sequence[Provider]) -> Device | None:
    """The memory of the first of some providers; ``None`` where it is the processor's."""
    kind = _MEMORY.get(name_of(providers[0]))
    if kind is None:
        return None
    options = {} if isinstance(providers[0], str) else providers[0][1]
    return Device(kind, int(options.get("device_id", 0)))


def _short(name: str) -> str:
    return name.removesuffix(_SUFFIX).lower()
