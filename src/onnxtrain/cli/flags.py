"""Flags that several commands have: what is trained, the optimizer, where messages go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from onnxtrain.errors import OptionError
from onnxtrain.operators.optimizer import Optimizer, as_fields, setting_names
from onnxtrain.training.optimizers import optimizers_by_name, read_optimizer

if TYPE_CHECKING:
    from onnxtrain.runtime.options import RuntimeOptions

LOSS_HELP = (
    "What to minimise: softmax_cross_entropy, binary_cross_entropy, mean_squared_error, mean_absolute_error, huber, "
    "focal, binary_focal, dice, ctc, triplet, info_nce, 'distillation(teacher=FILE)', each with arguments as in "
    "'huber(delta=0.5)'; "
    "output:NAME for a scalar output of the model, or the path of an ONNX model of (prediction, target)."
)

MODEL = Group("Model", sort_key=0)
DATA = Group("Data", sort_key=1)
LOSS = Group("Loss", sort_key=2)
TRAINED = Group("What is trained", sort_key=3)
OPTIMIZER = Group("Optimizer", sort_key=4)
COURSE = Group("Course of the training", sort_key=5)
RESULTS = Group("Results", sort_key=6)
RUNNING = Group("Running", sort_key=7)

SWITCH = Parameter(negative=(), show_default=False)
_PATTERNS = Parameter(negative=(), metavar="PATTERN")

ModelPath = Annotated[Path, Parameter(group=MODEL, help="The ONNX model. It is never changed.")]
TunedModelPath = Annotated[
    Path, Parameter(group=MODEL, help="The ONNX model. It is changed only where --in-place says so.")
]
InPlace = Annotated[
    bool,
    SWITCH,
    Parameter(group=RESULTS, help="Write the result onto the model itself, instead of --output."),
]
Data = Annotated[
    str,
    Parameter(
        group=DATA,
        metavar="PATH",
        help="A .npz or .safetensors file or a folder of .npy files: arrays named like the model's inputs, and the "
        "target. Or a .csv or .parquet file with --target, a folder with one folder of pictures per class, or a .tar "
        "file.",
    ),
]
Target = Annotated[
    str | None,
    Parameter(group=DATA, metavar="NAME", help="Name of the target: the array, where several are left, or the column."),
]
Loss = Annotated[str, Parameter(group=LOSS, metavar="NAME", help=LOSS_HELP)]


@Parameter(name="*", group=LOSS)
@dataclass(frozen=True)
class LossFlags:
    """Arguments of the loss that have a flag of their own."""

    axis: Annotated[
        int | None,
        Parameter(help="Class axis of the logits, for softmax_cross_entropy.  [default: as the labels' shape tells]"),
    ] = None
    ignore_index: Annotated[
        int | None, Parameter(help="Label that does not count, for softmax_cross_entropy.  [default: -100]")
    ] = None
    class_weights: Annotated[
        str | None,
        Parameter(metavar="NUMBERS", help="One weight per class, for softmax_cross_entropy: 1,1,3."),
    ] = None
    label_smoothing: Annotated[
        float | None, Parameter(help="Share of every label that is spread over all classes, in [0, 1).  [default: 0]")
    ] = None
    chunk: Annotated[
        int | None,
        Parameter(
            metavar="ROWS",
            help="Rows (tokens) of logits there are at once, for softmax_cross_entropy and next_token: less memory for "
            "large vocabularies.  [default: all]",
        ),
    ] = None
    check_targets: Annotated[
        bool, Parameter(help="Refuse targets outside of 0 to 1, and distributions that do not sum to 1.")
    ] = True

    def of(self, loss: str) -> Any:
        """The loss with these arguments.

        Raises:
            OptionError: It has no such argument.
        """
        given: dict[str, Any] = {"axis": self.axis, "ignore_index": self.ignore_index}
        given["class_weights"] = None if self.class_weights is None else _numbers(self.class_weights)
        given["label_smoothing"], given["chunk"] = self.label_smoothing, self.chunk
        given["check_targets"] = None if self.check_targets else False
        options = {name: value for name, value in given.items() if value is not None}
        if not options:
            return loss
        from onnxtrain.losses.loss_choice import resolve_loss

        return resolve_loss(loss, **options)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--class-weights is {text!r}; it needs numbers with commas between them: 1,1,3.") from None


Prediction = Annotated[
    str | None,
    Parameter(
        group=LOSS,
        metavar="NAME",
        help="Output of the model that the loss is built on.  [default: the first floating one]",
    ),
]
Metrics = Annotated[
    list[str] | None,
    Parameter(
        group=DATA,
        negative=(),
        metavar="NAME",
        help="What to measure, with commas between: accuracy,f1,auc,top_k(5),r2 ..., or a loss by its name.",
    ),
]
Ema = Annotated[
    float | None,
    Parameter(
        group=TRAINED,
        metavar="DECAY",
        help="Keep a moving average of the weights with this decay, such as 0.999; fit writes it as the model.",
    ),
]
Threads = Annotated[int | None, Parameter(group=RUNNING, help="Threads within an operator.  [default: one per core]")]
Provider = Annotated[
    list[str] | None,
    Parameter(
        name="--provider",
        group=RUNNING,
        negative=(),
        metavar="NAME",
        help="Execution provider, such as cuda or openvino; the processor runs what it does not. May be repeated, the "
        "preferred one first.  [default: cpu]",
    ),
]
Debug = Annotated[bool, SWITCH, Parameter(group=RUNNING, help="Show the traceback of an error.")]
Quiet = Annotated[bool, SWITCH, Parameter(group=RUNNING, help="Print nothing but errors.")]
Json = Annotated[bool, SWITCH, Parameter(group=RESULTS, help="Print JSON instead of tables.")]


def runtime(threads: int | None, provider: list[str] | None) -> RuntimeOptions:
    """The options of the sessions.

    Raises:
        OptionError: There is no such provider here.
    """
    from onnxtrain.runtime.options import RuntimeOptions

    options = RuntimeOptions(threads=threads, providers=provider) if provider else RuntimeOptions(threads=threads)
    options.provider_list()
    return options


@Parameter(name="*", group=TRAINED)
@dataclass(frozen=True)
class Training:
    """Trainable parameters and the training mode of layers: arguments of :class:`onnxtrain.Trainer`."""

    prediction: Prediction = None
    targets: Annotated[
        Literal["indices", "values"] | None,
        Parameter(
            group=LOSS, help="Targets are class indices or values, where the loss takes both.  [default: as the data]"
        ),
    ] = None
    train: Annotated[
        list[str] | None, _PATTERNS, Parameter(help="Train only what matches, such as 'classifier.*'. May be repeated.")
    ] = None
    freeze: Annotated[list[str] | None, _PATTERNS, Parameter(help="Keep what matches as it is. May be repeated.")] = (
        None
    )
    groups: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="GROUP",
            help="Other settings of the optimizer for what matches: '*.bias|*norm*, weight_decay=0', or lr_scale=0.1. "
            "The first group that matches counts. May be repeated.",
        ),
    ] = None
    batch_norm: Annotated[
        Literal["frozen", "train", "sync"],
        Parameter(
            help="Batch normalization: statistics as the file has them, or of the batch, then written back, or of the "
            "batch over all processes."
        ),
    ] = "frozen"
    dropout: Annotated[bool, SWITCH, Parameter(help="Let Dropout nodes drop while training.")] = False
    untie: Annotated[
        bool,
        SWITCH,
        Parameter(help="Give every node its own copy of vectors that an exporter merged because they were equal."),
    ] = False
    tie: Annotated[
        bool,
        SWITCH,
        Parameter(help="Train weights that the model holds twice, such as a transposed embedding, as one."),
    ] = False
    clip_value: Annotated[float | None, Parameter(help="Clip every element of the gradients to [-FLOAT, FLOAT].")] = (
        None
    )
    clip_norm: Annotated[
        float | None, Parameter(help="Scale the gradients so that their global norm is at most this.")
    ] = None
    state_dtype: Annotated[
        Literal["bfloat16", "8bit"] | None,
        Parameter(
            help="Keep the optimizer's states in fewer bits, rounded at random: half the bytes of float32 with "
            "bfloat16, a quarter with 8bit."
        ),
    ] = None
    compute: Annotated[
        Literal["float32", "bfloat16"],
        Parameter(help="Round the factors of products with weights to bfloat16: faster with AVX512-BF16."),
    ] = "float32"
    master_weights: Annotated[
        bool,
        Parameter(
            negative="--no-master-weights",
            help="Hold trained weights of 16 bits in float32, rounded when they are saved; --no-master-weights holds "
            "those in bfloat16 as the file does, rounded at random in every update.",
        ),
    ] = True
    straight_through: Annotated[
        bool,
        SWITCH,
        Parameter(help="Train through operators that round or quantize as if they did not."),
    ] = False
    qat: Annotated[
        bool,
        SWITCH,
        Parameter(help="Train a quantized model as it is quantized: weights in integers, and their scales."),
    ] = False
    recompute: Annotated[
        list[str] | None,
        _PATTERNS,
        Parameter(
            help="Compute what nodes of such names give again in the backward pass: saves memory. May be repeated."
        ),
    ] = None
    free_batch: Annotated[
        bool, SWITCH, Parameter(help="Train a model of a fixed batch size on batches of --batch-size.")
    ] = False
    seed: Annotated[int, Parameter(help="Seed of the order of the data and of dropout.")] = 0

    def arguments(self) -> dict[str, Any]:
        """These flags as arguments of :class:`onnxtrain.Trainer`."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["output"] = given.pop("prediction")
        given["recompute"] = given["recompute"] or ()
        if given["groups"]:
            from onnxtrain.weights.groups import read_group

            given["groups"] = tuple(map(read_group, given["groups"]))
        else:
            given["groups"] = ()
        return given


class OptimizerFlags:
    """Flags of the optimizers: the name, and every setting under each of its names."""

    optimizer: str

    def build(self, default: Optimizer | None = None) -> Optimizer:
        """Return the optimizer that the flags describe.

        Args:
            default: Settings that no flag gives, where the optimizer is of the same class.

        Raises:
            OptionError: The optimizer has no such setting, or the value is outside its range.
        """
        settings, given = read_optimizer(self.optimizer)
        known = setting_names(settings)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name == "optimizer" or value is None:
                continue
            if field.name not in known:
                flags = ", ".join(_flag(name) for name in known if name not in ("lr", "sparsity"))
                raise OptionError(
                    f"{_flag(field.name)} is {value}, but {settings.__name__.lower()} has no such setting; it has "
                    f"{flags}."
                )
            if field.name in given:
                raise OptionError(f"{_flag(field.name)} is given twice, by the flag and in {self.optimizer!r}.")
            given[field.name] = value
        if isinstance(default, settings):
            return dataclasses.replace(default, **as_fields(default, given))
        return settings(**given)

    def resolved(self) -> dict[str, Any]:
        """Return values of these flags that give the same optimizer, also where defaults change."""
        optimizer = self.build()
        none = dict.fromkeys(field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        given = {"optimizer": type(optimizer).__name__.lower(), "learning_rate": optimizer.learning_rate}
        return {**none, **given, **optimizer.node_attributes()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _show(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _setting_help(name: str) -> str:
    """Return the help of a setting, with the optimizers that have it and their defaults."""
    texts: dict[str, list[str]] = {}
    for optimizer, settings in optimizers_by_name().items():
        defaults = settings().node_attributes()
        for attribute in settings.schema.attributes:
            field, _, index = attribute.familiar.partition("[")
            default = f"{optimizer}: {_show(defaults[attribute.name])}"
            if name == attribute.name and (not field or index or attribute.kind is str):
                texts.setdefault(attribute.doc, []).append(default)
            elif name == attribute.name:
                also = field.replace("1 - ", "1 - --") if " " in field else _flag(field)
                texts.setdefault(f"ONNX's name of {also}.", []).append(default)
            elif name == field and index == "0]":
                texts.setdefault("--alpha and --beta as a pair, 0.9,0.999.", []).append(optimizer)
            elif name == field and not index and attribute.kind is str:
                texts.setdefault(f"{_flag(attribute.name)} {attribute.choices[1]}.", []).append(optimizer)
            elif name == field and not index:
                texts.setdefault(attribute.doc, []).append(default)
            elif field == f"1 - {name}":
                texts.setdefault(f"1 - {_flag(attribute.name)}.", []).append(optimizer)
    return " ".join(f"{doc} [{', '.join(who)}]" for doc, who in texts.items())


def _pair(_: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    """Convert ``0.9,0.999``, or an array of TOML."""
    text = ",".join(token.value for token in tokens)
    try:
        return tuple(float(part) for part in text.strip("()").split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a pair of numbers such as 0.9,0.999") from None


def _optimizer_flags(default: str) -> type[OptimizerFlags]:
    """Return the class of all flags: an optimizer adds its settings by being registered."""
    optimizers = optimizers_by_name()
    rates = ", ".join(f"{name}: {settings().learning_rate:g}" for name, settings in optimizers.items())
    names: dict[str, Any] = {
        "optimizer": Annotated[
            Literal[tuple(optimizers)] | str,
            Parameter(metavar="NAME", help="The update rule, with settings as in 'adam(lr=1e-3)', or by flags."),
        ],
        "learning_rate": Annotated[
            float | None,
            Parameter(
                name=["--learning-rate", "--lr"],
                help=f"Learning rate, the highest one of a schedule. [{rates}]",
            ),
        ],
    }
    kinds = {attribute.name: attribute.kind for each in optimizers.values() for attribute in each.schema.attributes}
    for settings in optimizers.values():
        for name in setting_names(settings):
            if name in ("lr", "sparsity") or name in names:
                continue
            if name == "betas":
                pair = Parameter(negative=(), n_tokens=1, converter=_pair, metavar="A,B", help=_setting_help(name))
                names[name] = Annotated[tuple[float, ...] | None, pair]
            elif name == "nesterov":
                names[name] = Annotated[bool | None, Parameter(negative=(), help=_setting_help(name))]
            else:
                kind = kinds.get(name, float)
                names[name] = Annotated[kind | None, Parameter(help=_setting_help(name))]
    fields: list[tuple[str, Any, Any]] = [
        (name, kind, dataclasses.field(default=default if name == "optimizer" else None))
        for name, kind in names.items()
    ]
    made = dataclasses.make_dataclass("OptimizerSettings", fields, bases=(OptimizerFlags,), frozen=True)
    made.__module__ = __name__  # Python 3.11 says "types", where cyclopts would look for the annotations
    result: type[OptimizerFlags] = Parameter(name="*", group=OPTIMIZER)(made)
    return result


if TYPE_CHECKING:
    OptimizerSettings = OptimizerFlags
    PruningOptimizer = OptimizerFlags
else:
    OptimizerSettings, PruningOptimizer = _optimizer_flags("adam"), _optimizer_flags("ssgd")
