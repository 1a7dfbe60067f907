"""The frozen configuration of a training: the only list of its options."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Final, Literal, Self, TypedDict, Unpack, get_args

import numpy as np
import onnx

from onnxtrain.autodiff.options import Compute, GradientOptions
from onnxtrain.distributed.communicator import Communicator
from onnxtrain.editing.working_copy.adaptation import Adaptation
from onnxtrain.editing.working_copy.training_modes import Modes
from onnxtrain.editing.working_copy.widening import widen
from onnxtrain.errors import OptionError
from onnxtrain.errors._internal import gc_paused
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.patterns import Patterns
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.losses.base import Forms, JointLoss, Loss, TargetKind
from onnxtrain.losses.loss_choice import LossLike, resolve_losses
from onnxtrain.lowering.training_info.recipe import Clipping
from onnxtrain.model_file.file import ModelFile
from onnxtrain.operators import Adam
from onnxtrain.operators.call_text import read_call
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.registry import choose_optimizer
from onnxtrain.parameters.ema import EMA, choose_ema
from onnxtrain.parameters.groups import Group, listed_groups
from onnxtrain.parameters.masks import Masks
from onnxtrain.parameters.ties import untied
from onnxtrain.parameters.trainable import parameter_table
from onnxtrain.runtime.options import RuntimeOptions


@checks_arguments
@dataclass(frozen=True)
class Precision:
    """Number formats of a training: ``Trainer(precision=Precision(compute="bfloat16", states="8bit"))``.

    As text, ``"bfloat16"`` or ``"bfloat16, states=8bit, master_weights=false"``.

    Args:
        compute: ``"bfloat16"`` rounds the operands of linear layers, attention and convolutions, forward and
            backward, and accumulates in float32: about twice the rate on CPUs with AVX512-BF16; other CPUs refuse it.
            Linear layers with fewer than 64 rows or columns (adapters), convolutions of few channels or several groups,
            softmax, norms, losses and updates stay in float32, as do ``evaluate`` and ``predict``, which compute as the
            saved model does.
        states: ``"bfloat16"`` keeps the optimizer's states of float32 parameters in half the bytes; ``"8bit"``, or
            ``"int8"``, in a quarter, block-wise: 8-bit values with one scale per 256, for parameters of at least 4,096
            elements, with the native kernels only. Rounding is stochastic and unbiased; its samples follow from the
            seed, so that a resumed training continues bit for bit. By default states have the type of their parameter.
        master_weights: Whether trained weights of a file in float16 or bfloat16 are held in float32, and rounded when
            they are saved. ``False`` keeps bfloat16 weights in bfloat16, half the bytes: every update rounds them
            stochastically, as ``states`` rounds states.

    Raises:
        OptionError: A value is not accepted.

    Example:
        >>> Precision(states="int8")
        Precision(compute='float32', states='8bit', master_weights=True)
    """

    compute: Compute = "float32"
    states: str | None = None
    master_weights: bool = True

    def __post_init__(self) -> None:
        if self.states in ("int8", "uint8", "8-bit"):  # names of other tools
            object.__setattr__(self, "states", "8bit")
        if self.states not in (None, "bfloat16", "8bit"):
            raise OptionError(
                f"Precision: states is {self.states!r}; it is 'bfloat16' or '8bit', or None for states of the weights' "
                "type."
            )
        if self.compute not in get_args(Compute):
            raise OptionError(
                f"Precision: compute is {self.compute!r}; it is 'float32' or 'bfloat16'. Models in float16 or bfloat16 "
                "train in float32 as they are."
            )


@checks_arguments
@dataclass(frozen=True)
class Distributed:
    """Data-parallel training: ``Trainer(distributed=Distributed("mpi", shard_states=True))``.

    A communicator, or ``"mpi"``, is short for one without sharding.

    Args:
        communicator: The processes that train this model together, each on its part of every batch, such as
            ``onnxtrain.distributed.MPI()``; ``"mpi"`` makes one.
        shard_states: Whether each of N processes keeps an N-th of the optimizer's states, and updates an N-th of the
            weights.
        shard_gradients: Whether each process keeps no more than that share of the gradients, too; with
            ``shard_states`` only.

    Raises:
        OptionError: A value is not accepted.
    """

    communicator: Communicator | Literal["mpi"] | None = None
    shard_states: bool = False
    shard_gradients: bool = False

    def __post_init__(self) -> None:
        if self.shard_gradients and not self.shard_states:
            raise OptionError("shard_gradients=True shares gradients beside states; give shard_states=True, too.")
        if isinstance(self.communicator, str):
            if self.communicator != "mpi":
                raise OptionError(f"distributed is {self.communicator!r}; as text it is 'mpi'.")
            from onnxtrain.distributed.mpi import MPI

            object.__setattr__(self, "communicator", MPI())

    @property
    def processes(self) -> Communicator | None:
        """The communicator, if there is one."""
        return None if isinstance(self.communicator, str) else self.communicator


class AdvancedOptions(TypedDict, total=False):
    """Options of a training that few trainings need; see :class:`TrainingConfig` for all."""

    clip_value: float | None
    masks: Mapping[str, np.ndarray] | str | None
    sparsify: Patterns | None
    untie: bool | Patterns
    tie: bool | Patterns
    straight_through: bool
    recompute: Patterns
    dynamic_batch: bool


class ModelOptions(AdvancedOptions, total=False):
    """Options of a training that a training model records."""

    train: Patterns | None
    freeze: Patterns | None
    groups: Sequence[Group]
    output: str | None
    targets: TargetKind | None
    batch_norm: str
    dropout: bool
    clip_norm: float | None
    ema: float | EMA | None
    lora: Adaptation | None
    qat: bool
    seed: int
    precision: Precision | str | None


class Options(ModelOptions, total=False):
    """The options of a training as keyword arguments, with the types that callers may pass."""

    accumulate: int
    threads: int | None
    distributed: Distributed | Communicator | Literal["mpi"] | None
    runtime: RuntimeOptions | None


ADVANCED: Final = tuple(AdvancedOptions.__annotations__)


def _patterns(given: Patterns) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _optional_patterns(given: Patterns | None) -> tuple[str, ...] | None:
    return None if given is None else _patterns(given)


def _switch_or_patterns(given: bool | Patterns) -> bool | tuple[str, ...]:
    return given if isinstance(given, bool) else _patterns(given)


def _trained(file: ModelFile, train: Patterns | None) -> set[str]:
    """Return the names of the initializers that are parameters by default, or that ``train`` names."""
    model = file.training_model()
    widen(model)
    rows = parameter_table(infer_shapes(model), None)
    return {row.name for row in rows if row.trainable} | set(_optional_patterns(train) or ())


def choose_precision(given: Precision | str | None) -> Precision:
    """Return the number formats that an argument describes."""
    if given is None or isinstance(given, Precision):
        return given or Precision()
    call = read_call(f"precision({given})") if isinstance(given, str) else None
    if call is None or len(call.positional) > 1:
        raise OptionError(
            f"precision is {given!r}; it needs onnxtrain.Precision(compute='bfloat16'), or text such as 'bfloat16' or "
            "'bfloat16, states=8bit'."
        )
    values = {"true": True, "false": False, "none": None}
    named: dict[str, Any] = {name: values.get(text.lower(), text.strip("'\"")) for name, text in call.named.items()}
    compute: Any = call.positional[0] if call.positional else named.pop("compute", "float32")
    return Precision(compute, **named)


def choose_distributed(given: Distributed | Communicator | str | None) -> Distributed:
    """Return the data-parallel settings that an argument describes."""
    if isinstance(given, Distributed):
        return given
    if given is not None and not isinstance(given, str) and not hasattr(given, "size"):
        raise OptionError(
            f"distributed is {given!r}; it needs a communicator such as onnxtrain.distributed.MPI(), "
            "onnxtrain.Distributed(...), or 'mpi'."
        )
    return Distributed(given)  # type: ignore[arg-type]


def _adaptation(given: object) -> Adaptation | None:
    if given is None or isinstance(given, Adaptation):
        return given
    raise OptionError(f"lora is {given!r}; it needs settings, such as onnxtrain.Lora(rank=8).").about("lora", got=given)


@dataclass(frozen=True)
class Flag:
    """Form of an option on the command line."""

    help: str
    group: str = "Weights"
    kind: Any = None
    metavar: str | None = None
    common: bool = False


def option(
    default: Any,
    doc: str,
    convert: Callable[[Any], Any] | None = None,
    *,
    flag: Flag | None = None,
    factory: Any = MISSING,
) -> Any:
    """Return the field of an option."""
    metadata = {"doc": doc, "convert": convert, "flag": flag}
    return field(default=default, default_factory=factory, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The frozen configuration of a training: equal configurations make equal step graphs.

    :meth:`of` makes it from the arguments of :class:`onnxtrain.Trainer`. The documentation of an option is
    ``metadata["doc"]`` of its field; ``tools/option_docs.py`` writes it into the docstring of ``Trainer``.
    """

    model: ModelFile = option(
        MISSING,
        "A path or a loaded model. It is never changed; :meth:`save` writes a copy in which only the trained "
        "initializers differ. A path takes less memory: the weights are held once, and not a second time in the "
        "loaded model.",
    )
    """The model as it was read, with the copies that ``untie`` asks for; compared by identity."""
    loss: Loss | JointLoss | str = option(
        MISSING,
        'What to minimise: ``"softmax_cross_entropy"``, ``"next_token"``, ``"binary_cross_entropy"``, '
        '``"mean_squared_error"``, ``"mean_absolute_error"``, ``"huber"``, each with arguments as in '
        '``"huber(delta=0.5)"``, ``"output:NAME"`` for a scalar output of the model, a '
        ":class:`~onnxtrain.losses.Loss`, the path of an ONNX model of (prediction, target), or a function "
        "(builder, prediction, target) -> value. A model that ends in the Softmax or Sigmoid that a cross-entropy "
        "contains is trained on its logits.",
    )
    optimizer: Optimizer = option(
        MISSING, 'Update rule, by default ``Adam()``; or its name, ``"adamw(lr=3e-4)"``.', factory=Adam
    )
    train: tuple[str, ...] | None = option(
        None,
        "Glob patterns of the initializers to train; by default all parameters (``onnxtrain inspect "
        "MODEL`` lists them).",
        _optional_patterns,
        flag=Flag("Train only matching parameters, such as 'classifier.*'. May be repeated.", common=True),
    )
    freeze: tuple[str, ...] | None = option(
        None,
        "Glob patterns of initializers to freeze; wins over ``train``.",
        _optional_patterns,
        flag=Flag("Freeze matching parameters. May be repeated.", common=True),
    )
    groups: tuple[Group, ...] = option(
        (),
        "Parameter groups with settings of their own, :class:`~onnxtrain.Group`. A parameter belongs to "
        "the first group that matches it, as in PyTorch.",
        listed_groups,
        flag=Flag(
            "Other optimizer settings for matching parameters: '*.bias|*norm*, weight_decay=0', or "
            "lr_scale=0.1. The first matching group counts. May be repeated.",
            group="Optimizer",
            kind=list[str] | None,
            metavar="GROUP",
        ),
    )
    output: str | None = option(
        None,
        "The output that the loss reads, by default the first one of a floating type.",
        flag=Flag(
            "Output of the model that the loss reads.  [default: the first floating-point output]",
            group="Loss",
            metavar="NAME",
        ),
    )
    targets: TargetKind | None = option(
        None,
        '``"indices"`` or ``"values"`` (distributions over classes), where the loss takes both; by '
        "default decided by the first data.",
        flag=Flag(
            "Targets are class indices or values, where the loss takes both.  [default: by the data]", group="Loss"
        ),
    )
    batch_norm: str = option(
        "frozen",
        '``"frozen"``: running statistics, whatever mode the file sets; ``"train"``: batch statistics, '
        'with the running ones written back; ``"sync"``: synchronized over all ranks (SyncBatchNorm).',
        flag=Flag(
            "Batch normalization: running statistics of the file; statistics of the batch, with the running "
            "ones written back; or of the batch over all processes.",
            kind=Literal["frozen", "train", "sync"],
        ),
    )
    dropout: bool = option(
        False,
        "Whether Dropout nodes are active while training, whatever mode the file sets.",
        flag=Flag("Let Dropout nodes drop while training."),
    )
    untie: bool | tuple[str, ...] = option(
        False,
        "Split shared initializers, so that each node has its own: ``True`` for those that exporters "
        "merge (scales, biases and statistics), or glob patterns.",
        _switch_or_patterns,
        flag=Flag("Give every node its own copy of equal vectors that an exporter merged."),
    )
    tie: bool | tuple[str, ...] = option(
        False,
        "Train initializers that hold the same values (an embedding, and the output projection as its "
        "transposed copy) as one: ``True`` for all, or glob patterns.",
        _switch_or_patterns,
        flag=Flag("Train weights that the model holds twice, such as a transposed embedding, as one."),
    )
    clip_value: float | None = option(
        None,
        "Clip every element of the gradients to [-clip_value, clip_value].",
        flag=Flag("Clip every element of the gradients to [-FLOAT, FLOAT].", group="Optimizer"),
    )
    clip_norm: float | None = option(
        None,
        "Scale the gradients so that their global norm is at most this.",
        flag=Flag("Scale the gradients so that their global norm is at most this.", group="Optimizer"),
    )
    masks: Masks = option(
        MISSING,
        'Boolean arrays by parameter name; elements stay zero where a mask is false. ``"keep"`` keeps the zeros '
        "of the tensors that were pruned. See :meth:`set_masks`.",
        Masks,
        flag=Flag("keep: keep the zeros of a pruned model while its other weights train.", kind=Literal["keep"] | None),
        factory=Masks,
    )
    sparsify: tuple[str, ...] | None = option(
        None,
        "Glob patterns of the parameters whose sparsity an optimizer such as ``SSGD`` promotes; by "
        "default the weights of linear layers, convolutions, recurrent layers and embeddings. Other "
        "parameters take plain steps.",
        _optional_patterns,
    )
    accumulate: int = option(
        1, "Split every batch into this many micro-batches; the step equals that of the whole batch."
    )
    ema: EMA | None = option(
        None,
        "Keep an exponential moving average of the parameters, with this decay, or as an "
        ":class:`~onnxtrain.EMA` says; ``evaluate``, ``predict``, ``save`` and ``model`` take it with "
        "``ema=True``.",
        choose_ema,
    )
    straight_through: bool = option(
        False,
        "Pass gradients unchanged through operators that round or quantize (straight-through estimator); "
        "see :func:`onnxtrain.gradient`.",
        flag=Flag("Pass gradients unchanged through operators that round or quantize."),
    )
    qat: bool = option(
        False,
        "Quantization-aware training of a quantized model: integer weights are trained as floats that "
        "every step rounds, scales are trained, and integers and scales are saved "
        "([quantization](docs/quantization.md)). Implies ``straight_through``.",
        flag=Flag("Quantization-aware training of a quantized model: integer weights and their scales."),
    )
    recompute: tuple[str, ...] = option(
        (),
        "Glob patterns of names of nodes whose outputs are recomputed in the backward pass (activation "
        'checkpointing): takes time, saves memory, changes no result. ``"layers"`` recomputes every '
        "numbered layer from its input.",
        _patterns,
        flag=Flag(
            "Recompute the outputs of nodes of such names in the backward pass (activation checkpointing): "
            "saves memory. May be repeated.",
            group="Memory",
        ),
    )
    dynamic_batch: bool = option(
        False,
        "Train a model of a fixed batch size on batches of any size, by :func:`onnxtrain.dynamic_batch`; "
        "the saved file keeps its own.",
        flag=Flag("Train a model of a fixed batch size on batches of --batch-size."),
    )
    lora: Adaptation | None = option(
        None,
        "Adapters to train beside frozen weights, :class:`onnxtrain.Lora`. Then ``train`` names the "
        "initializers that are trained in full beside them, by default none.",
        _adaptation,
    )
    seed: int = option(
        0,
        "Seed of shuffling and of dropout.",
        flag=Flag("Seed of shuffling and of dropout.", group="Training", common=True),
    )
    threads: int | None = option(None, "Threads within an operator; default one per core.")
    runtime: RuntimeOptions = option(
        MISSING,
        "Options of the ONNX Runtime sessions, :class:`onnxtrain.RuntimeOptions`.",
        lambda given: given or RuntimeOptions(),
        factory=RuntimeOptions,
    )
    precision: Precision = option(
        MISSING,
        'Number formats of computation, states and weights, :class:`onnxtrain.Precision`, or text: ``"bfloat16"``.',
        choose_precision,
        flag=Flag(
            "Number formats: bfloat16 rounds the operands of linear layers, attention and convolutions "
            "(faster with AVX512-BF16); 'states=bfloat16' or 'states=8bit' stores the optimizer's states in fewer "
            "bytes, rounded stochastically; 'master_weights=false' holds bfloat16 weights as the file does.",
            group="Memory",
            kind=str | None,
            metavar="FORMATS",
        ),
        factory=Precision,
    )
    distributed: Distributed = option(
        MISSING,
        "Data-parallel training with other processes: a communicator such as ``onnxtrain.distributed.MPI()``, "
        '``"mpi"``, or :class:`onnxtrain.Distributed`; ``parallel=`` is the same argument.',
        choose_distributed,
        factory=Distributed,
    )
    forms: Forms | None = None
    """The kind and shape of targets by loss, as the data show them; ``None`` before any data."""
    weighted: bool = False
    """True where the data have one weight per example."""
    packed: bool = False
    """True where the data are packed rows of documents."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise OptionError(f"accumulate is {self.accumulate}; it needs a number of micro-batches of at least 1.")
        if self.targets not in (None, "indices", "values"):
            raise OptionError(f"targets is {self.targets!r}; it is 'indices' or 'values'.")
        if self.ema is not None and not self.precision.master_weights:
            raise OptionError(
                "ema keeps averages of weights in float32, and master_weights=False has none in it; "
                "leave one of them out."
            )
        if isinstance(self.loss, JointLoss) and (self.output is not None or self.targets is not None):
            raise OptionError("output and targets are for one loss; a mapping of losses names the outputs.")
        _ = self.modes, self.clipping  # which check their own fields
        if self.synchronized and not self.runtime.uses_kernels():
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
        """Read the model and convert a caller's arguments."""
        fields: dict[str, Any] = {
            "model": untied(
                ModelFile.load(model, lent=True),
                options.get("untie", False),
                lambda file: _trained(file, options.get("train")),
            ),
            "loss": resolve_losses(loss),
            "optimizer": choose_optimizer(optimizer),
        }
        for name, value in options.items():
            convert = cls.__dataclass_fields__[name].metadata["convert"]
            fields[name] = value if convert is None else convert(value)
        if fields.get("qat"):
            fields["straight_through"] = True
        if (threads := options.get("threads")) is not None:
            fields["runtime"] = dataclasses.replace(fields.get("runtime", RuntimeOptions()), threads=threads)
        return cls(**fields)

    @property
    def parallel(self) -> Communicator | None:
        """The communicator of the processes that train together, if any."""
        return self.distributed.processes

    @property
    def modes(self) -> Modes:
        """Modes of batch normalization and Dropout; each rank draws its own dropout masks."""
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
        """Clipping of the gradients before the update."""
        return Clipping(self.clip_value, self.clip_norm)

    @property
    def gradients(self) -> GradientOptions:
        """Options of the construction of gradients."""
        return GradientOptions(self.straight_through, self.recompute, self.precision.compute)
