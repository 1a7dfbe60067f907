"""Flags of several commands, and the groups in which help shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

from cyclopts import Group, Parameter

from onnxtrain.errors import OptionError
from onnxtrain.losses import LOSSES
from onnxtrain.training.config import Flag, TrainingConfig
from onnxtrain.training.fit_options import FitOptions

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Lora
    from onnxtrain.runtime.options import RuntimeOptions

N = TypeVar("N", int, float)
T = TypeVar("T")

LOSS_HELP = (
    "The loss: softmax_cross_entropy, binary_cross_entropy, mean_squared_error or next_token, or another one. All: "
    f"{', '.join(LOSSES)}; with arguments as in 'huber(delta=0.5)' and 'distillation(teacher=FILE)'; "
    "output:NAME for a scalar output of the model, or the path of an ONNX model of (prediction, target)."
)

COMMON = Group("Most used", sort_key=-1)
"""The flags that the help of a long command shows first; each is in a group below, too."""

MODEL = Group("Model", sort_key=0)
DATA = Group("Data", sort_key=1)
READING = Group("Reading", sort_key=2)
LOSS = Group("Loss", sort_key=3)
WEIGHTS = Group("Weights", sort_key=5)
ADAPTERS = Group("Adapters", sort_key=6)
OPTIMIZER = Group("Optimizer", sort_key=7)
TRAINING = Group("Training", sort_key=8)
MEMORY = Group("Memory", sort_key=9)
CHECKPOINTS = Group("Checkpoints", sort_key=10)
RESULTS = Group("Results", sort_key=11)
LOGGING = Group("Logging", sort_key=12)
DISTRIBUTED = Group("Distributed", sort_key=13)
RUNNING = Group("Running", sort_key=14)

RENAMED: Final = {"output": "prediction"}
"""Options with a flag of another name: ``--output`` is the file that a command writes."""

_GROUPS: Final = {
    group.name: group for group in (DATA, LOSS, WEIGHTS, OPTIMIZER, TRAINING, MEMORY, CHECKPOINTS, RESULTS, RUNNING)
}


def group_of(flag: Flag) -> Group:
    """Return the group that shows a flag: one of the above, or one of a plugin, after the loss."""
    return _GROUPS.setdefault(flag.group, Group(flag.group, sort_key=4))


def annotated(
    kind: Any,
    default: Any,
    help: str,
    *,
    group: Group,
    common: bool = False,
    metavar: str | None = None,
    name: Sequence[str] | None = None,
) -> Any:
    """Return the type of a flag for cyclopts; only one that is on, or undecided, by default has a ``--no-`` flag."""
    parameter = Parameter(
        name=name,
        group=(group, COMMON) if common else group,
        negative=None if default is True or kind == bool | None else (),
        show_default=False if default is False else None,
        metavar=metavar,
        help=help,
    )
    return Annotated[kind | None if default is None else kind, parameter]  # where pydantic is, defaults are checked


def flag(default: Any, help: str, **settings: Any) -> Any:
    """Return the field of a flag in a :func:`grouped` class, with settings of :func:`annotated`."""
    return dataclasses.field(default=default, metadata={"help": help, "settings": settings})


def grouped(group: Group) -> Callable[[type[T]], type[T]]:
    """Let the fields of a dataclass be flags of a command, which takes an object of the class."""

    def decorate(made: type[T]) -> type[T]:
        hints = get_type_hints(made, include_extras=True)
        for field in dataclasses.fields(made):  # type: ignore[arg-type]
            if field.name in made.__annotations__ and "help" in (given := field.metadata):
                settings = {"group": group, **given["settings"]}
                hints[field.name] = annotated(hints[field.name], field.default, given["help"], **settings)
        made.__annotations__ = {name: hints[name] for name in made.__annotations__}
        return Parameter(name="*", group=group)(made)

    return decorate


def options_of(source: type) -> dict[str, tuple[dataclasses.Field[Any], Flag]]:
    """Return the fields of a class of options that have flags."""
    fields = dataclasses.fields(source)
    return {field.name: (field, field.metadata["flag"]) for field in fields if field.metadata.get("flag")}


def given(values: object, source: type) -> dict[str, Any]:
    """Return the options that flags give; a flag that is left out stands for the option's default."""
    found = {}
    for name, (field, _) in options_of(source).items():
        value = getattr(values, RENAMED.get(name, name))
        found[name] = field.default if value is None and field.default is not dataclasses.MISSING else value
    return found


def _help_of(source: type, name: str) -> str:
    return options_of(source)[name][1].help


SWITCH = Parameter(negative=(), show_default=False)

ModelPath = Annotated[Path, Parameter(group=(MODEL, COMMON), help="The ONNX model. It is never changed.")]
TunedModelPath = Annotated[
    Path, Parameter(group=(MODEL, COMMON), help="The ONNX model. It is changed only where --in-place says so.")
]
AdapterPath = Annotated[
    Path | None,
    Parameter(
        name="--lora-adapter",
        group=MODEL,
        metavar="PATH",
        help="Use this adapter of the model, an .onnx_adapter file or a PEFT folder.",
    ),
]
InPlace = Annotated[
    bool,
    SWITCH,
    Parameter(group=RESULTS, help="Write the result onto the model itself, instead of --output."),
]
Data = Annotated[
    str,
    Parameter(
        group=(DATA, COMMON),
        metavar="PATH",
        help="A .npz, .csv, .parquet, .jsonl or .tar file, a pattern ('d/*.csv'), or a folder of tables, images, "
        "sounds or arrays. Arrays (also .safetensors, .npy) are named like the inputs, and one is the target. "
        "Tables need --target. Images and sounds lie in a folder per class. Chats and texts, for next_token and "
        "losses that compare rows, are .jsonl, .json, .txt, .csv or .parquet, or several: a.jsonl,b.jsonl=0.5.",
    ),
]
Target = Annotated[
    str | None,
    Parameter(group=(DATA, COMMON), metavar="NAME", help=_help_of(FitOptions, "target")),
]
Validation = Annotated[
    str | None,
    Parameter(group=(DATA, COMMON), metavar="PATH", help=_help_of(FitOptions, "validation")),
]
Loss = Annotated[str, Parameter(group=(LOSS, COMMON), metavar="NAME", help=LOSS_HELP)]


Prediction = Annotated[
    str | None,
    Parameter(
        group=LOSS,
        metavar="NAME",
        help=_help_of(TrainingConfig, "output"),
    ),
]
Metrics = Annotated[
    list[str] | None,
    Parameter(
        group=(DATA, COMMON),
        negative=(),
        metavar="NAME",
        help=_help_of(FitOptions, "metrics"),
    ),
]
Ema = Annotated[
    float | None,
    Parameter(
        group=WEIGHTS,
        metavar="DECAY",
        help="Keep a moving average of the weights with this decay, such as 0.999; fit writes the averages.",
    ),
]
Threads = Annotated[int | None, Parameter(group=RUNNING, help="Threads within an operator.  [default: one per core]")]
Provider = Annotated[
    list[str] | None,
    Parameter(
        name="--provider",
        group=(RUNNING, COMMON),
        negative=(),
        metavar="NAME",
        help="Execution provider, such as cuda or openvino; the CPU runs what it lacks. Several: the preferred first.  "
        "[default: cpu]",
    ),
]
Debug = Annotated[bool, SWITCH, Parameter(group=RUNNING, help="Show the traceback of an error.")]
Quiet = Annotated[bool, SWITCH, Parameter(group=RUNNING, help="Print nothing but errors.")]
Json = Annotated[bool, SWITCH, Parameter(name="--json", group=RESULTS, help="Print JSON instead of tables.")]


def adapter_of(path: Path | None) -> Lora | None:
    """Return the adapter to compute with; ``None`` without a path."""
    if path is None:
        return None
    from onnxtrain.adapters.lora import Lora

    return Lora(adapter=path)


def runtime(threads: int | None, provider: list[str] | None) -> RuntimeOptions:
    """Return the options of the sessions."""
    from onnxtrain.runtime.options import RuntimeOptions

    options = RuntimeOptions(threads=threads, providers=provider) if provider else RuntimeOptions(threads=threads)
    options.provider_list()
    return options


def flag_of(name: str) -> str:
    """Return the flag of an option: ``--learning-rate``."""
    return "--" + RENAMED.get(name, name).replace("_", "-")


def read_numbers(flag: str, text: str, wanted: str) -> list[float]:
    """Parse numbers with commas between them."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{flag} is {text!r}; it needs {wanted}.") from None


def read_pairs(flag: str, given: Sequence[str] | None, number: Callable[[str], N], wanted: str) -> dict[str, N]:
    """Parse texts NAME=NUMBER; the last equals sign separates, since names may have some."""
    found = {}
    for text in given or ():
        name, _, value = text.rpartition("=")
        try:
            found[name] = number(value)
        except ValueError:
            name = ""
        if not name:
            raise OptionError(f"{flag} is {text!r}; it needs {wanted}.")
    return found


def sizes_of(static: Sequence[str] | None) -> dict[str, int]:
    """Return the sizes of ``--static`` by name."""

    def size(text: str) -> int:
        if not text.isascii() or not text.isdigit():
            raise ValueError
        return int(text)

    return read_pairs("--static", static, size, "a name and a size, such as N=32")
