"""What is trained, as a value: the model, the loss, the update rule and every option, in one place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, Unpack, get_args

import numpy as np
import onnx

from onnxtrain.autodiff.options import Compute, GradientOptions
from onnxtrain.errors import OptionError
from onnxtrain.gc_pause import gc_paused
from onnxtrain.losses.base import Forms, JointLoss, Loss, TargetKind
from onnxtrain.losses.loss_choice import LossLike, resolve_losses
from onnxtrain.model_file.file import ModelFile
from onnxtrain.operators import Adam
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.parallel.communicator import Communicator
from onnxtrain.patterns import Patterns
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.training.optimizers import choose_optimizer
from onnxtrain.training.working_copy.adaptation import Adaptation
from onnxtrain.training.working_copy.training_modes import Modes
from onnxtrain.training_info.recipe import Clipping
from onnxtrain.weights.ema import EMA, choose_ema
from onnxtrain.weights.groups import Group, listed_groups
from onnxtrain.weights.ties import untied

if TYPE_CHECKING:
    from onnxtrain.training.options import Options


class Masks(Mapping[str, np.ndarray]):
    """Masks by parameter, as a value: never changed, and equal where all of their elements are.

    Args:
        masks: Boolean arrays; they are copied.

    Raises:
        OptionError: They are no mapping from names to arrays.
    """

    def __init__(self, masks: Mapping[str, np.ndarray] | None = None) -> None:
        if masks is not None and not isinstance(masks, Mapping):
            raise OptionError(
                f"masks is a {type(masks).__name__}; it needs a mapping from parameters to boolean arrays, such as "
                "{'fc.weight': trainer.parameters['fc.weight'] != 0}."
            )
        self._arrays: dict[str, np.ndarray] = {}
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
        return self.keys() == other.keys() and all(np.array_equal(mask, other[name]) for name, mask in self.items())

    def __hash__(self) -> int:
        return hash(frozenset((name, np.packbits(mask).tobytes()) for name, mask in self._arrays.items()))

    def __repr__(self) -> str:
        return f"Masks({', '.join(self._arrays)})"


@dataclass(frozen=True, kw_only=True)
class Specification:
    """All that a training's step graph is made from; equal specifications make the same steps.

    The fields are the arguments of :class:`onnxtrain.Trainer`, which says what they mean, with patterns as tuples and
    the model and the loss looked up. What is not an argument:

    Attributes:
        model: The model as it was read, with the copies that ``untie`` asks for. Compared by identity.
        form: What the data say that targets are, those of each loss; ``None`` before there are any.
        weighted: Whether the data have one weight per example.
        options: All options of the sessions, with ``threads`` among them.

    Raises:
        OptionError: A field has a value that it cannot have.
    """

    model: ModelFile
    loss: Loss | JointLoss | str
    optimizer: Optimizer = field(default_factory=Adam)
    train: tuple[str, ...] | None = None
    freeze: tuple[str, ...] | None = None
    groups: tuple[Group, ...] = ()
    output: str | None = None
    targets: TargetKind | None = None
    batch_norm: str = "frozen"
    dropout: bool = False
    untie: bool | tuple[str, ...] = False
    tie: bool | tuple[str, ...] = False
    clip_value: float | None = None
    clip_norm: float | None = None
    masks: Masks = field(default_factory=Masks)
    sparsify: tuple[str, ...] | None = None
    accumulate: int = 1
    ema: EMA | None = None
    state_dtype: str | None = None
    compute: Compute = "float32"
    master_weights: bool = True
    straight_through: bool = False
    qat: bool = False
    recompute: tuple[str, ...] = ()
    free_batch: bool = False
    lora: Adaptation | None = None
    seed: int = 0
    options: RuntimeOptions = field(default_factory=RuntimeOptions)
    parallel: Communicator | None = None
    shard_states: bool = False
    shard_gradients: bool = False
    form: Forms | None = None
    weighted: bool = False

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
        reductions = {part.reduction for _, part in self.loss} if isinstance(self.loss, JointLoss) else set()
        if len(reductions) > 1 and self.accumulate > 1:
            raise OptionError(
                "accumulate adds up micro-batches, but one loss is a mean and another a sum; give them one reduction."
            )
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
        """The specification that arguments of a user describe; the model is read, and its copies are made.

        Raises:
            ModelError: The model cannot be read.
            OptionError: An argument has a value that it cannot have.
        """
        runtime = options.get("options") or RuntimeOptions()
        threads = options.get("threads")
        untie, tie = options.get("untie", False), options.get("tie", False)
        return cls(
            model=untied(ModelFile.load(model, lent=True), untie),
            loss=resolve_losses(loss),
            optimizer=choose_optimizer(optimizer),
            train=_patterns(options.get("train")),
            freeze=_patterns(options.get("freeze")),
            groups=listed_groups(options.get("groups", ())),
            output=options.get("output"),
            targets=options.get("targets"),
            batch_norm=options.get("batch_norm", "frozen"),
            dropout=options.get("dropout", False),
            untie=untie if isinstance(untie, bool) else _tuple(untie),
            tie=tie if isinstance(tie, bool) else _tuple(tie),
            clip_value=options.get("clip_value"),
            clip_norm=options.get("clip_norm"),
            masks=Masks(options.get("masks")),
            sparsify=_patterns(options.get("sparsify")),
            accumulate=options.get("accumulate", 1),
            ema=choose_ema(options.get("ema")),
            state_dtype=_state_dtype(options.get("state_dtype")),
            compute=options.get("compute", "float32"),
            master_weights=options.get("master_weights", True),
            straight_through=options.get("straight_through", False) or options.get("qat", False),
            qat=options.get("qat", False),
            recompute=_tuple(options.get("recompute", ())),
            free_batch=options.get("free_batch", False),
            lora=_adaptation(options.get("lora")),
            seed=options.get("seed", 0),
            options=runtime if threads is None else dataclasses.replace(runtime, threads=threads),
            parallel=options.get("parallel"),
            shard_states=options.get("shard_states", False),
            shard_gradients=options.get("shard_gradients", False),
        )

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


def _state_dtype(name: str | None) -> str | None:
    """The name under which other tools have states in 8 bits, too."""
    return "8bit" if name in ("int8", "uint8", "8-bit") else name


def _tuple(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _patterns(given: Patterns | None) -> tuple[str, ...] | None:
    return None if given is None else _tuple(given)


def _adaptation(given: object) -> Adaptation | None:
    if given is None or isinstance(given, Adaptation):
        return given
    raise OptionError(f"lora is {given!r}; it needs settings, such as onnxtrain.Lora(rank=8).")
