"""The frozen configuration of a training: the only list of its options."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict, Unpack, get_args

import numpy as np
import onnx

from onnxtrain.autodiff.options import Compute, GradientOptions
from onnxtrain.errors import OptionError
from onnxtrain.gc_pause import gc_paused
from onnxtrain.losses.base import Loss, TargetKind
from onnxtrain.losses.joint_loss import Forms, JointLoss
from onnxtrain.losses.loss_choice import LossLike, resolve_losses
from onnxtrain.model_file.file import ModelFile
from onnxtrain.operators import Adam
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.parallel.communicator import Communicator
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.training.optimizers import choose_optimizer
from onnxtrain.training.working_copy.adaptation import Adaptation
from onnxtrain.training.working_copy.training_modes import Modes
from onnxtrain.training_info.recipe import Clipping
from onnxtrain.weights.ema import EMA, choose_ema
from onnxtrain.weights.groups import Group, listed_groups
from onnxtrain.weights.masks import KEEP
from onnxtrain.weights.parameters import Patterns
from onnxtrain.weights.untie import untied


class Options(TypedDict, total=False):
    """The options of a training as keyword arguments, with the types that callers may pass.

    :class:`TrainingConfig` has the defaults, the documentation and the converted types.
    """

    train: Patterns | None
    freeze: Patterns | None
    groups: Sequence[Group]
    output: str | None
    targets: TargetKind | None
    batch_norm: str
    dropout: bool
    untie: bool | Patterns
    tie: bool | Patterns
    clip_value: float | None
    clip_norm: float | None
    masks: Mapping[str, np.ndarray] | str | None
    sparsify: Patterns | None
    accumulate: int
    ema: float | EMA | None
    state_dtype: str | None
    compute: Compute
    master_weights: bool
    straight_through: bool
    qat: bool
    recompute: Patterns
    free_batch: bool
    lora: Adaptation | None
    seed: int
    threads: int | None
    options: RuntimeOptions | None
    parallel: Communicator | None
    shard_states: bool
    shard_gradients: bool


class Masks(Mapping[str, np.ndarray]):
    """Masks by parameter, as a value: never changed, and equal where all of their elements are.

    Args:
        masks: Boolean arrays; they are copied. Or ``"keep"``, for masks that the zeros of the model tell.

    Attributes:
        keep: Whether the masks are still to be made from the zeros of the model.

    Raises:
        OptionError: They are no mapping from names to arrays.
    """

    def __init__(self, masks: Mapping[str, np.ndarray] | str | None = None) -> None:
        self.keep = isinstance(masks, str) and masks == KEEP
        self._arrays: dict[str, np.ndarray] = {}
        if self.keep:
            return
        if masks is not None and not isinstance(masks, Mapping):
            shown = repr(masks) if isinstance(masks, str) else f"a {type(masks).__name__}"
            raise OptionError(
                f"masks is {shown}; it needs {KEEP!r}, which keeps the zeros of a pruned model, or a mapping from "
                "parameters to boolean arrays, such as {'fc.weight': trainer.parameters['fc.weight'] != 0}."
            )
        for name, mask in (masks or {}).items():
            try:
                self._arrays[name] = np.array(mask)
            except (TypeError, ValueError) as error:
                kind = type(mask).__name__
                raise OptionError(f"The mask of {name!r} is a {kind} that is no array: {error}.") from error
        for array in self._arrays.values():
            array.flags.writeable = False

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        if self.keep != getattr(other, "keep", False):
            return False
        return self.keys() == other.keys() and all(np.array_equal(mask, other[name]) for name, mask in self.items())

    def __hash__(self) -> int:
        return hash(frozenset((name, np.packbits(mask).tobytes()) for name, mask in self._arrays.items()))

    def __repr__(self) -> str:
        return f"Masks({', '.join(self._arrays)})"


def _patterns(given: Patterns) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _optional_patterns(given: Patterns | None) -> tuple[str, ...] | None:
    return None if given is None else _patterns(given)


def _switch_or_patterns(given: bool | Patterns) -> bool | tuple[str, ...]:
    return given if isinstance(given, bool) else _patterns(given)


def _state_dtype(name: str | None) -> str | None:
    """Return "8bit" for the names that other tools give 8-bit states."""
    return "8bit" if name in ("int8", "uint8", "8-bit") else name


def _adaptation(given: object) -> Adaptation | None:
    if given is None or isinstance(given, Adaptation):
        return given
    raise OptionError(f"lora is {given!r}; it needs settings, such as onnxtrain.Lora(rank=8).")


def _runtime_options(given: RuntimeOptions | None) -> RuntimeOptions:
    return given or RuntimeOptions()


def _option(doc: str, convert: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return the metadata of an option's field: its documentation and the conversion of a caller's argument."""
    return {"doc": doc, "convert": convert}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The frozen configuration of a training: equal configurations make equal step graphs.

    :meth:`of` makes it from the arguments of :class:`onnxtrain.Trainer`. The documentation of an option is
    ``metadata["doc"]`` of its field.

    Raises:
        OptionError: A field has a value that it cannot have.
    """

    model: ModelFile
    """The model as it was read, with the copies that ``untie`` asks for; compared by identity."""
    loss: Loss | JointLoss | str
    optimizer: Optimizer = field(default_factory=Adam)
    train: tuple[str, ...] | None = field(
        default=None,
        metadata=_option(
            "Glob patterns of the initializers to train; by default all parameters (``onnxtrain inspect "
            "MODEL`` lists them).",
            _optional_patterns,
        ),
    )
    freeze: tuple[str, ...] | None = field(
        default=None,
        metadata=_option(
            "Glob patterns of initializers to freeze; wins over ``train``.",
            _optional_patterns,
        ),
    )
    groups: tuple[Group, ...] = field(
        default=(),
        metadata=_option(
            "Parameter groups with settings of their own, :class:`~onnxtrain.Group`. A parameter belongs to "
            "the first group that matches it, as in PyTorch.",
            listed_groups,
        ),
    )
    output: str | None = field(
        default=None,
        metadata=_option("The output that the loss reads, by default the first one of a floating type."),
    )
    targets: TargetKind | None = field(
        default=None,
        metadata=_option(
            '``"indices"`` or ``"values"`` (distributions over classes), where the loss takes both; by '
            "default decided by the first data."
        ),
    )
    batch_norm: str = field(
        default="frozen",
        metadata=_option(
            '``"frozen"``: running statistics, whatever mode the file sets; ``"train"``: batch statistics, '
            'with the running ones written back; ``"sync"``: synchronized over all ranks (SyncBatchNorm).'
        ),
    )
    dropout: bool = field(
        default=False,
        metadata=_option("Whether Dropout nodes are active while training, whatever mode the file sets."),
    )
    untie: bool | tuple[str, ...] = field(
        default=False,
        metadata=_option(
            "Split shared initializers, so that each node has its own: ``True`` for those that exporters "
            "merge (scales, biases and statistics), or glob patterns.",
            _switch_or_patterns,
        ),
    )
    tie: bool | tuple[str, ...] = field(
        default=False,
        metadata=_option(
            "Train initializers that hold the same values (an embedding, and the output projection as its "
            "transposed copy) as one: ``True`` for all, or glob patterns.",
            _switch_or_patterns,
        ),
    )
    clip_value: float | None = field(
        default=None,
        metadata=_option("Clip every element of the gradients to [-clip_value, clip_value]."),
    )
    clip_norm: float | None = field(
        default=None,
        metadata=_option("Scale the gradients so that their global norm is at most this."),
    )
    masks: Masks = field(
        default_factory=Masks,
        metadata=_option(
            'Boolean arrays by parameter name; elements stay zero where a mask is false. ``"keep"`` keeps the zeros '
            "of the tensors that were pruned. See :meth:`set_masks`.",
            Masks,
        ),
    )
    sparsify: tuple[str, ...] | None = field(
        default=None,
        metadata=_option(
            "Glob patterns of the parameters whose sparsity an optimizer such as ``SSGD`` promotes; by "
            "default the weights of linear layers, convolutions, recurrent layers and embeddings. Other "
            "parameters take plain steps.",
            _optional_patterns,
        ),
    )
    accumulate: int = field(
        default=1,
        metadata=_option("Split every batch into this many micro-batches; the step equals that of the whole batch."),
    )
    ema: EMA | None = field(
        default=None,
        metadata=_option(
            "Keep an exponential moving average of the parameters, with this decay, or as an "
            ":class:`~onnxtrain.EMA` says; ``evaluate``, ``predict``, ``save`` and ``model`` take it with "
            "``ema=True``.",
            choose_ema,
        ),
    )
    state_dtype: str | None = field(
        default=None,
        metadata=_option(
            '``"bfloat16"`` keeps the optimizer\'s states of float32 parameters in half the bytes; ``"8bit"``, '
            'or ``"int8"``, in a quarter, block-wise: 8-bit values with one scale per 256, for parameters of '
            "at least 4,096 elements, with the native kernels only. Rounding is stochastic and unbiased; its "
            "samples follow from ``seed``, so that a resumed training goes on bit for bit. By default states "
            "have the type of their parameter.",
            _state_dtype,
        ),
    )
    compute: Compute = field(
        default="float32",
        metadata=_option(
            '``"bfloat16"`` rounds the operands of linear layers to bfloat16, forward and backward, and '
            "accumulates in float32: about twice the rate on CPUs with AVX512-BF16; other CPUs refuse it. "
            "Linear layers with fewer than 64 rows or columns (adapters), attention, norms, losses and "
            "updates stay in float32, as do ``evaluate`` and ``predict``, which compute as the saved model "
            "does."
        ),
    )
    master_weights: bool = field(
        default=True,
        metadata=_option(
            "Whether trained weights of a file in float16 or bfloat16 are held in float32, and rounded when "
            "they are saved. ``False`` keeps bfloat16 weights in bfloat16, half the bytes: every update "
            "rounds them stochastically, as ``state_dtype`` rounds states."
        ),
    )
    straight_through: bool = field(
        default=False,
        metadata=_option(
            "Pass gradients unchanged through operators that round or quantize (straight-through estimator); "
            "see :func:`onnxtrain.gradient`."
        ),
    )
    qat: bool = field(
        default=False,
        metadata=_option(
            "Quantization-aware training of a quantized model: integer weights are trained as floats that "
            "every step rounds, scales are trained, and integers and scales are saved "
            "([quantization](docs/quantization.md)). Implies ``straight_through``."
        ),
    )
    recompute: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            "Glob patterns of names of nodes whose outputs are recomputed in the backward pass (activation "
            'checkpointing): takes time, saves memory, changes no result. ``"layers"`` recomputes every '
            "numbered layer from its input.",
            _patterns,
        ),
    )
    free_batch: bool = field(
        default=False,
        metadata=_option(
            "Train a model of a fixed batch size on batches of any size, as :func:`onnxtrain.free_batch` "
            "makes it; the saved file keeps its own."
        ),
    )
    lora: Adaptation | None = field(
        default=None,
        metadata=_option(
            "Adapters to train beside frozen weights, :class:`onnxtrain.Lora`. Then ``train`` names the "
            "initializers that are trained in full beside them, by default none.",
            _adaptation,
        ),
    )
    seed: int = field(
        default=0,
        metadata=_option("Seed of shuffling and of dropout."),
    )
    threads: int | None = field(
        default=None,
        metadata=_option("Threads within an operator; default one per core."),
    )
    options: RuntimeOptions = field(
        default_factory=RuntimeOptions,
        metadata=_option(
            "All other options of the ONNX Runtime sessions.",
            _runtime_options,
        ),
    )
    parallel: Communicator | None = field(
        default=None,
        metadata=_option(
            "The processes that train this model together, each on its part of every batch, such as "
            "``onnxtrain.parallel.MPI()``; by default this one alone."
        ),
    )
    shard_states: bool = field(
        default=False,
        metadata=_option(
            "Whether of N such processes each keeps an N-th of the optimizer's states, and updates an N-th of "
            "the weights."
        ),
    )
    shard_gradients: bool = field(
        default=False,
        metadata=_option("Whether it keeps no more than that share of the gradients, too; with ``shard_states`` only."),
    )
    form: Forms | None = None
    """The kind and shape of targets by loss, as the data show them; ``None`` before any data."""
    weighted: bool = False
    """True where the data have one weight per example."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise OptionError(f"accumulate is {self.accumulate}; it needs a number of micro-batches of at least 1.")
        if self.targets not in (None, "indices", "values"):
            raise OptionError(f"targets is {self.targets!r}; it is 'indices' or 'values'.")
        if self.state_dtype not in (None, "bfloat16", "8bit"):
            raise OptionError(
                f"state_dtype is {self.state_dtype!r}; it is 'bfloat16' or '8bit', or None for states of the weights' "
                "type."
            )
        if self.compute not in get_args(Compute):
            raise OptionError(f"compute is {self.compute!r}; it is 'float32' or 'bfloat16'.")
        if self.ema is not None and not self.master_weights:
            raise OptionError(
                "ema keeps averages of weights in float32, and master_weights=False has none in it; "
                "leave one of them out."
            )
        if isinstance(self.loss, JointLoss) and (self.output is not None or self.targets is not None):
            raise OptionError("output and targets are for one loss; a mapping of losses names the outputs.")
        if self.shard_gradients and not self.shard_states:
            raise OptionError("shard_gradients=True shares gradients beside states; give shard_states=True, too.")
        _ = self.modes, self.clipping  # which check their own fields
        if self.synchronized and not self.options.uses_kernels():
            raise OptionError(
                "batch_norm='sync' needs the native kernels, which add up over the processes, and these are not used "
                "here; take batch_norm='train', which has the statistics of each process's part."
            )

    @classmethod
    @gc_paused()
    def of(
        cls,
        model: str | os.PathLike[str] | onnx.ModelProto,
        loss: LossLike,
        optimizer: Optimizer | str | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """Read the model and convert a caller's arguments.

        Raises:
            ModelError: The model cannot be read.
            OptionError: An argument has a value that it cannot have.
        """
        fields: dict[str, Any] = {
            "model": untied(ModelFile.load(model, lent=True), options.get("untie", False)),
            "loss": resolve_losses(loss),
            "optimizer": choose_optimizer(optimizer),
        }
        for name, value in options.items():
            convert = cls.__dataclass_fields__[name].metadata["convert"]
            fields[name] = value if convert is None else convert(value)
        if fields.get("qat"):
            fields["straight_through"] = True
        if (threads := options.get("threads")) is not None:
            fields["options"] = dataclasses.replace(fields.get("options", RuntimeOptions()), threads=threads)
        return cls(**fields)

    @property
    def modes(self) -> Modes:
        """How layers are run that behave differently in training; each process draws masks of its own."""
        seed = self.seed
        if self.parallel is not None and self.parallel.rank:
            seed = int(np.random.SeedSequence((seed % (1 << 63), self.parallel.rank)).generate_state(1, np.uint32)[0])
        return Modes(self.batch_norm, self.dropout, seed)

    @property
    def divided(self) -> bool:
        """Whether several processes train together."""
        return self.parallel is not None and self.parallel.size > 1

    @property
    def synchronized(self) -> bool:
        """Whether batch normalization takes the statistics of several processes; of one they are its own."""
        return self.divided and self.batch_norm == "sync"

    @property
    def clipping(self) -> Clipping:
        """What happens to gradients before the update."""
        return Clipping(self.clip_value, self.clip_norm)

    @property
    def gradients(self) -> GradientOptions:
        """How gradients are built."""
        return GradientOptions(self.straight_through, self.recompute, self.compute)
