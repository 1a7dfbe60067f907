"""How sessions run: threads, providers, memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.spelling import checks_arguments

if TYPE_CHECKING:
    from onnxtrain.runtime.cuda_updates import CudaUpdates


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


def most_threads() -> int:
    """How many threads a session may have here: four for each processor, and 64 in any case.

    More only wait for each other, and with many thousands the system refuses them, or onnxruntime ends the process.
    """
    return max(64, 4 * (os.cpu_count() or 1))


@checks_arguments
@dataclass(frozen=True)
class RuntimeOptions:
    """Options of the onnxruntime sessions that train and evaluate.

    Attributes:
        threads: Threads within an operator, at most :func:`most_threads`; ``None`` lets onnxruntime take one per core.
        providers: Execution providers in order of preference, by full or short names (``"cuda"``), or with options of
            theirs: ``("cuda", {"device_id": 1})``. Without the processor's own there are no native kernels.
        memory_pattern: Whether onnxruntime plans one block of memory per input shape. It comes on top of the
            arena that the first step filled: up to a half more memory at no measured gain in time.
        kernels: Whether native kernels are used: ``None`` where the library can be loaded, else as said. With CUDA's
            provider these are the updates alone, of a library of their own.
        profile: Prefix of a profile that onnxruntime writes; ``None`` for none.
        accuracy_level: In what products with weights of a few bits (MatMulNBits) compute while the model is trained
            and evaluated: 0, the default, is the type of their input, 4 is int8, as such models often have it;
            ``None`` leaves what the model says. In the file it stays.
    """

    threads: int | None = None
    providers: Sequence[Provider] = (CPU,)
    memory_pattern: bool = False
    kernels: bool | None = None
    profile: str | None = None
    accuracy_level: int | None = 0

    def __post_init__(self) -> None:
        if isinstance(self.providers, str) or not self.providers:
            raise OptionError(f"providers is {self.providers!r}; it needs a list of names, such as ['cuda'].")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"threads is {self.threads}; it needs a number of at least 1.")
        if self.accuracy_level not in (None, *range(5)):
            raise OptionError(
                f"accuracy_level is {self.accuracy_level!r}; it is a number from 0 to 4, as MatMulNBits of ONNX "
                "Runtime has it, or None for what the model says."
            )
        if self.threads is not None and self.threads > (most := most_threads()):
            raise OptionError(
                f"threads is {self.threads}; it needs a number from 1 to {most}, since more would only wait for each "
                f"other on {os.cpu_count()} processors."
            )

    def uses_kernels(self) -> bool:
        """Whether steps are lowered to native kernels."""
        from onnxtrain.runtime import native

        first = name_of(self.provider_list()[0])
        if first != CPU:
            if self.kernels and first != CUDA:
                raise OptionError(f"kernels=True, but native kernels run on the processor only, not on {first}.")
            self.updates()
            return False
        if self.kernels is None:
            return native.kernels_available()
        if self.kernels and not native.kernels_available():
            raise OptionError("kernels=True, but the native library could not be loaded; see the warning above.")
        return self.kernels

    def require_bfloat16(self) -> None:
        """Refuse products of bfloat16 where they would be slower than those of float32, or cannot be computed.

        Raises:
            OptionError: Native kernels are not used, or the processor does not multiply bfloat16.
        """
        from onnxtrain.runtime import native

        if not self.uses_kernels():
            raise OptionError("precision='bfloat16' needs the native kernels, which are not used here; leave it out.")
        if not native.multiplies_bfloat16():
            raise OptionError(
                "precision='bfloat16' needs a CPU with AVX512-BF16; this one has "
                f"{native.instruction_set()} without it, which would take longer than in float32: leave it out."
            )

    def updates(self) -> CudaUpdates | None:
        """The library with the updates for CUDA; ``None`` where another provider comes first, or there is none.

        Raises:
            OptionError: It is asked for and missing, or the environment variable names another file.
        """
        if name_of(self.provider_list()[0]) != CUDA or self.kernels is False:
            return None
        from onnxtrain.runtime import cuda_updates  # for that provider only

        found = cuda_updates.find()
        if found is None and self.kernels:
            raise OptionError(
                f"kernels=True, but native kernels run on the processor only, not on {CUDA}, whose updates have a "
                f"library of their own that is missing here: {cuda_updates.HOW_TO_GET_IT}."
            )
        return found

    def session_options(self, *, kernels: bool = False) -> Any:
        """The ``onnxruntime.SessionOptions`` for these options."""
        import onnxruntime

        from onnxtrain.runtime import native

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # its errors are raised, which says them once
        options.enable_mem_pattern = self.memory_pattern
        # Nodes run in the order of the graph, where what reads an activation for the last time follows closely. By
        # default onnxruntime looks for an order of its own, in which gradients of weights, which nobody waits for, run
        # late and keep both activations and gradients.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        # A buffer goes back to the arena with its tensor, instead of waiting for a later tensor of the same shape.
        # Operators that can work in place still do.
        options.enable_mem_reuse = False
        # Without this, int8 matrix multiplications saturate at 16 bits on x86 CPUs that lack VNNI.
        options.add_session_config_entry("session.x64quantprecision", "1")
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        if self.profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = self.profile
        if kernels:
            options.register_custom_ops_library(str(native.custom_ops_library()))
        elif (updates := self.updates()) is not None:
            options.register_custom_ops_library(str(updates.path))
        return options

    def provider_list(self) -> list[Provider]:
        """The providers by their full names, checked against what this onnxruntime has; the processor's comes last.

        Raises:
            OptionError: One is not available.
        """
        return choose(self.providers)
