"""Options of onnxruntime sessions: threads, execution providers, memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.runtime import native

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

Provider = str | tuple[str, dict[str, Any]]
"""Name of an execution provider, alone or with its options."""

_SUFFIX = "ExecutionProvider"

_PATIENCE = 100
"""Microseconds that an idle thread of a session waits actively for the next operator, before it sleeps.

onnxruntime's default is tens of milliseconds, which another program on the same cores loses. Versions without the
setting ignore it."""

_MEMORY: Mapping[str, str] = {
    "CANNExecutionProvider": "cann",
    CUDA: "cuda",
    "DmlExecutionProvider": "dml",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
}
"""Providers with device memory, and ONNX Runtime's name for that memory."""


@dataclass(frozen=True)
class Device:
    """A device with memory of its own."""

    kind: str
    number: int = 0

    def upload(self, array: np.ndarray) -> Any:
        """Copy an array to the device; return it as an ``onnxruntime.OrtValue``."""
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), self.kind, self.number)


def choose(given: Sequence[Provider]) -> list[Provider]:
    """Resolve providers to full names and append the CPU provider, which runs nodes that the others do not support."""
    import onnxruntime

    for provider in given:
        if not isinstance(provider, str) and str(provider[1].get("enable_cuda_graph", 0)).lower() not in ("0", "false"):
            raise OptionError(
                f"The provider {provider[0]!r} has the option enable_cuda_graph, which would repeat the learning rate "
                "and the update count of the first step; leave it out."
            )
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
            ).about("providers", got=name, wanted=available)
        options = {} if isinstance(provider, str) else provider[1]
        if full == CUDA:
            options = {"use_tf32": "0", **options}
        found.append((full, options) if options else full)
    if all(name_of(provider) != CPU for provider in found):
        found.append(CPU)
    return found


def name_of(provider: Provider) -> str:
    """Return the name of a provider, with or without options."""
    return provider if isinstance(provider, str) else provider[0]


def device_of(providers: Sequence[Provider]) -> Device | None:
    """Return the device whose memory the first provider uses; ``None`` for CPU memory."""
    kind = _MEMORY.get(name_of(providers[0]))
    if kind is None:
        return None
    options = {} if isinstance(providers[0], str) else providers[0][1]
    return Device(kind, int(options.get("device_id", 0)))


def _short(name: str) -> str:
    return name.removesuffix(_SUFFIX).lower()


def most_threads() -> int:
    """Return the most threads of a session: four per CPU, at least 64; more only wait, or abort the process."""
    return max(64, 4 * (os.cpu_count() or 1))


@checks_arguments
@dataclass(frozen=True)
class RuntimeOptions:
    """Options of the onnxruntime sessions that train and evaluate.

    Attributes:
        threads: Threads within an operator, at most :func:`most_threads`; ``None`` lets onnxruntime take one per core.
        providers: Execution providers in order of preference, by full or short names (``"cuda"``), alone or with
            options: ``("cuda", {"device_id": 1})``. Native kernels need the CPU provider to come first. On CUDA,
            float32 products are computed in float32, as PyTorch computes them; the option ``{"use_tf32": "1"}``
            rounds their factors to 10 bits for speed, which is ONNX Runtime's own default.
        memory_pattern: Whether onnxruntime plans one block of memory per input shape. The block adds to the arena that
            the first step filled: up to half as much memory again, at no measured gain in time.
        kernels: Whether to use native kernels; ``None`` uses them where the library can be loaded. With the CUDA
            provider, these are the optimizer updates alone, in a separate library.
        profile: Prefix of a profile that onnxruntime writes; ``None`` for none.
        accuracy_level: Compute type of MatMulNBits (linear layers with low-bit weights) during training and
            evaluation: 0 (default) is the input's type; 4, common in such models, is int8; ``None`` keeps the
            attribute of each node. The saved file keeps its attributes in any case. So it is for a MatMul of
            dequantized weights, which ONNX Runtime makes a MatMulNBits of level 4.
    """

    threads: int | None = None
    providers: Sequence[Provider] = (CPU,)
    memory_pattern: bool = False
    kernels: bool | None = None
    profile: str | None = None
    accuracy_level: int | None = 0

    def __post_init__(self) -> None:
        if isinstance(self.providers, str) or not self.providers:
            raise OptionError(f"providers is {self.providers!r}; it needs a list of names, such as ['cuda'].").about(
                "providers", got=self.providers
            )
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"threads is {self.threads}; it needs a number of at least 1.")
        if self.accuracy_level not in (None, *range(5)):
            raise OptionError(
                f"accuracy_level is {self.accuracy_level!r}; it is a number from 0 to 4, as in MatMulNBits of ONNX "
                "Runtime, or None for the attributes of the model."
            ).about("accuracy_level", got=self.accuracy_level)
        if self.threads is not None and self.threads > (most := most_threads()):
            raise OptionError(
                f"threads is {self.threads}; it needs a number from 1 to {most}, since more would only wait for each "
                f"other on {os.cpu_count()} CPUs."
            )

    def uses_kernels(self) -> bool:
        """Return whether steps are lowered to native CPU kernels.

        Raises:
            OptionError: ``kernels`` is True, but its library or provider is not available.
        """
        first = name_of(self.provider_list()[0])
        if first != CPU:
            if self.kernels and first != CUDA:
                raise OptionError(f"kernels=True, but native kernels run on the CPU only, not on {first}.").about(
                    "kernels", got=first
                )
            self.updates()
            return False
        if self.kernels is None:
            return native.kernels_available()
        if self.kernels and not native.kernels_available():
            raise OptionError("kernels=True, but the native library could not be loaded; see the warning above.")
        return self.kernels

    def uses_cuda(self) -> bool:
        """Return whether CUDA's provider may run nodes of a step: alone, or where TensorRT leaves them to it."""
        names = [name_of(provider) for provider in self.provider_list()]
        return CUDA in names[: names.index(CPU)]

    def require_bfloat16(self) -> None:
        """Check that matrix multiplication in bfloat16 is possible and faster than in float32.

        Raises:
            OptionError: Native kernels are not used, or the CPU lacks bfloat16 multiplication.
        """
        if not self.uses_kernels():
            raise OptionError("precision='bfloat16' needs the native kernels, which are not used here; leave it out.")
        if not native.multiplies_bfloat16():
            raise OptionError(
                "precision='bfloat16' needs a CPU with AVX512-BF16; this one has "
                f"{native.instruction_set()} without it, so that bfloat16 would be slower than float32; leave it out."
            )

    def updates(self) -> native.CudaUpdates | None:
        """Return the library of CUDA updates; ``None`` if CUDA is not the first provider or the library is missing.

        Raises:
            OptionError: ``kernels`` is True and the library is missing, or the environment variable names a file that
                is missing or cannot be loaded.
        """
        if name_of(self.provider_list()[0]) != CUDA or self.kernels is False:
            return None
        found = native.find_cuda()
        if found is None and self.kernels:
            raise OptionError(
                f"kernels=True, but native kernels run on the CPU only, not on {CUDA}, and the separate library of "
                f"CUDA updates is missing here: {native.HOW_TO_GET_CUDA}."
            )
        return found

    def session_options(self, *, kernels: bool = False) -> Any:
        """Return the ``onnxruntime.SessionOptions`` for these options."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised; logging would repeat them
        options.enable_mem_pattern = self.memory_pattern
        # Nodes run in the order of the graph, which frees activations early. onnxruntime's default order runs weight
        # gradients late, since no node waits for them, and so keeps both activations and gradients in memory.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        # A buffer returns to the arena with its tensor, instead of waiting for a later tensor of the same shape.
        # Operators that can work in place still do.
        options.enable_mem_reuse = False
        if self.accuracy_level is not None:
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(self.accuracy_level))
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_PATIENCE))
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
        """Return the providers by their full names, the CPU provider last.

        Raises:
            OptionError: A provider is not available.
        """
        return choose(self.providers)
