"""Flags of several commands: data, loss, trainable parameters, adapters, optimizer, output."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from onnxtrain.config import Options, Precision, TrainingConfig, choose_precision
from onnxtrain.errors import DataError, OptionError
from onnxtrain.operators.choice import optimizers_by_name, read_optimizer
from onnxtrain.operators.optimizer import Optimizer, as_fields, setting_names
from onnxtrain.renamed import warn_renamed
from onnxtrain.weights.groups import read_group

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Lora
    from onnxtrain.runtime.options import RuntimeOptions

LOSS_HELP = (
    "The loss: softmax_cross_entropy, binary_cross_entropy, mean_squared_error, mean_absolute_error, huber, "
    "focal, binary_focal, dice, ctc, transducer, yolo, detr, triplet, info_nce, arcface, cosface, next_token, "
    "'distillation(teacher=FILE)'; of rows to compare dpo, orpo, kto, reward, multiple_negatives, listnet, ranknet; "
    "each with arguments as in 'huber(delta=0.5)'; "
    "output:NAME for a scalar output of the model, or the path of an ONNX model of (prediction, target)."
)

MODEL = Group("Model", sort_key=0)
DATA = Group("Data", sort_key=1)
READING = Group("Reading data", sort_key=1.5)
LOSS = Group("Loss", sort_key=2)
TRAINED = Group("Trainable parameters", sort_key=3)
ADAPTERS = Group("Adapters", sort_key=3)
OPTIMIZER = Group("Optimizer", sort_key=4)
LOOP = Group("Training loop", sort_key=5)
RESULTS = Group("Results", sort_key=6)
RUNNING = Group("Running", sort_key=7)

SWITCH = Parameter(negative=(), show_default=False)

ModelPath = Annotated[Path, Parameter(group=MODEL, help="The ONNX model. It is never changed.")]
TunedModelPath = Annotated[
    Path, Parameter(group=MODEL, help="The ONNX model. It is changed only where --in-place says so.")
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
        group=DATA,
        metavar="PATH",
        help="A .npz or .safetensors file or a folder of .npy files: arrays named like the model's inputs, and the "
        "target. Or a .csv or .parquet file with --target, a folder with one folder of images per class, a .tar file, "
        "or for next_token a .jsonl, .txt, .csv or .parquet file of chats or texts, as for losses that compare rows.",
    ),
]
Target = Annotated[
    str | None,
    Parameter(group=DATA, metavar="NAME", help="Name of the target: the array, where several are left, or the column."),
]
Validation = Annotated[
    str | None,
    Parameter(group=DATA, metavar="PATH", help="Data to evaluate on, or the fraction to hold out: 0.1."),
]
Loss = Annotated[str, Parameter(group=LOSS, metavar="NAME", help=LOSS_HELP)]


@Parameter(name="*", group=LOSS)
@dataclass(frozen=True)
class LossFlags:
    """Flags for arguments of the loss."""

    axis: Annotated[
        int | None,
        Parameter(help="Class axis of the logits, for softmax_cross_entropy.  [default: by the labels' shape]"),
    ] = None
    ignore_index: Annotated[
        int | None, Parameter(help="Label that the loss ignores, for softmax_cross_entropy.  [default: -100]")
    ] = None
    class_weights: Annotated[
        str | None,
        Parameter(metavar="NUMBERS", help="One weight per class, for softmax_cross_entropy: 1,1,3."),
    ] = None
    label_smoothing: Annotated[
        float | None, Parameter(help="Share of every label to spread over all classes, in [0, 1).  [default: 0]")
    ] = None
    chunk: Annotated[
        int | None,
        Parameter(
            metavar="ROWS",
            help="Rows (tokens) of logits to compute at a time, for softmax_cross_entropy, next_token, dpo, orpo and "
            "kto: saves memory with large vocabularies.  [default: all]",
        ),
    ] = None
    check_targets: Annotated[
        bool, Parameter(help="Refuse targets outside 0 to 1, and distributions that do not sum to 1.")
    ] = True

    def of(self, loss: str) -> Any:
        """Return the loss with these arguments.

        Raises:
            OptionError: The loss has no such argument.
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
        help=TrainingConfig.__dataclass_fields__["output"].metadata["flag"],
    ),
]
Metrics = Annotated[
    list[str] | None,
    Parameter(
        group=DATA,
        negative=(),
        metavar="NAME",
        help="Metrics to measure: accuracy,f1,auc,top_k(5),r2 ..., or a loss by its name.",
    ),
]
Ema = Annotated[
    float | None,
    Parameter(
        group=TRAINED,
        metavar="DECAY",
        help="Keep a moving average of the weights with this decay, such as 0.999; fit writes the averages.",
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
        help="Execution provider, such as cuda or openvino; the CPU runs the operators that it lacks. May be repeated, "
        "the preferred one first.  [default: cpu]",
    ),
]
Debug = Annotated[bool, SWITCH, Parameter(group=RUNNING, help="Show the traceback of an error.")]
Quiet = Annotated[bool, SWITCH, Parameter(group=RUNNING, help="Print nothing but errors.")]
Json = Annotated[bool, SWITCH, Parameter(group=RESULTS, help="Print JSON instead of tables.")]


def runtime(threads: int | None, provider: list[str] | None) -> RuntimeOptions:
    """Return the options of the sessions.

    Raises:
        OptionError: A provider is not available.
    """
    from onnxtrain.runtime.options import RuntimeOptions

    options = RuntimeOptions(threads=threads, providers=provider) if provider else RuntimeOptions(threads=threads)
    options.provider_list()
    return options


class TrainingFlags:
    """Flags of the options of a training: those fields of the configuration that document one."""

    prediction: str | None
    seed: int
    tie: bool
    precision: str | None

    def formats(self) -> Precision:
        """Return the number formats.

        Warns:
            DeprecationWarning: A flag of the version before gives one.
        """
        old = {name: getattr(self, name) for name in ("compute", "state_dtype", "master_weights")}
        given = {name: value for name, value in old.items() if value is not None}
        if not given:
            return choose_precision(self.precision)
        if self.precision is not None:
            raise OptionError(f"{_flag(next(iter(given)))} is an old name for a part of --precision; leave it out.")
        text = ", ".join(f"{'states' if name == 'state_dtype' else name}={value}" for name, value in given.items())
        for name, value in given.items():
            warn_renamed("--no-master-weights" if value is False else _flag(name), f"--precision '{text}'")
        return choose_precision(text)

    def arguments(self) -> dict[str, Any]:
        """Return these flags as arguments of :class:`onnxtrain.Trainer`."""
        given = {name: getattr(self, name) for name in _training_options() if name != "output"}
        given |= {"output": self.prediction, "precision": self.formats(), "recompute": given["recompute"] or ()}
        given["groups"] = tuple(map(read_group, given["groups"] or ()))
        if getattr(self, "free_batch", False):
            warn_renamed("--free-batch", "--dynamic-batch")
            given["dynamic_batch"] = True
        return given


def _training_options() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of the configuration that have flags."""
    return {field.name: field for field in dataclasses.fields(TrainingConfig) if field.metadata.get("flag")}


def _training_flags() -> type[TrainingFlags]:
    """Return the class of the flags: an option becomes one by the ``flag`` text of its field."""
    hints = typing.get_type_hints(Options)
    special: dict[str, Any] = {
        "batch_norm": Literal["frozen", "train", "sync"],
        "groups": list[str] | None,
        "masks": Literal["keep"] | None,
        "precision": str | None,
    }
    fields: list[tuple[str, Any, Any]] = []
    for name, field in _training_options().items():
        kinds = {*typing.get_args(hints[name]), hints[name]}
        kind = special.get(name) or (bool if bool in kinds else list[str] | None if str in kinds else hints[name])
        if name == "output":
            fields.append(("prediction", Prediction, dataclasses.field(default=None)))
            continue
        parameter = Parameter(
            group=LOSS if name == "targets" else TRAINED,
            negative=(),
            show_default=False if kind is bool else None,
            metavar={"groups": "GROUP", "precision": "FORMATS"}.get(
                name, "PATTERN" if kind == list[str] | None else None
            ),
            help=field.metadata["flag"],
        )
        default = None if name in special and name != "batch_norm" else field.default
        default = None if default == () else default
        fields.append((name, Annotated[kind, parameter], dataclasses.field(default=default)))
    hidden = Parameter(show=False)
    for name, kind in (("state_dtype", str | None), ("compute", str | None), ("master_weights", bool | None)):
        fields.append((name, Annotated[kind, hidden], dataclasses.field(default=None)))
    fields.append(("free_batch", Annotated[bool, SWITCH, hidden], dataclasses.field(default=False)))
    made = dataclasses.make_dataclass("Training", fields, bases=(TrainingFlags,), frozen=True)
    made.__module__ = __name__  # cyclopts looks for the annotations there
    result: type[TrainingFlags] = Parameter(name="*", group=TRAINED)(made)
    return result


@Parameter(name="*", group=READING)
@dataclass(frozen=True)
class ReaderFlags:
    """Settings of the readers in :mod:`onnxtrain.data`, for all data of a command."""

    mean: Annotated[
        str | None, Parameter(metavar="NUMBERS", help="Images: subtract this, one number or 0.49,0.46,0.41.")
    ] = None
    std: Annotated[
        str | None, Parameter(metavar="NUMBERS", help="Images: divide by this, one number or 0.23,0.22,0.23.")
    ] = None
    skip_broken: Annotated[bool, SWITCH, Parameter(help="Images: skip those that cannot be read.")] = False
    delimiter: Annotated[
        str | None, Parameter(metavar="MARK", help="CSV: separator of cells.  [default: detected]")
    ] = None
    encoding: Annotated[
        str | None, Parameter(metavar="NAME", help="CSV: the encoding of the text.  [default: detected]")
    ] = None
    decimal: Annotated[str | None, Parameter(metavar="MARK", help="CSV: the decimal sign.  [default: detected]")] = None
    tokenizer: Annotated[
        Path | None,
        Parameter(
            metavar="FILE",
            help="Text: a tokenizer.json, for a column of texts or for chats.  [default for chats: beside the model]",
        ),
    ] = None
    text: Annotated[str, Parameter(metavar="NAME", help="Text: the column.")] = "text"
    length: Annotated[
        int | None,
        Parameter(metavar="TOKENS", help="Text: tokens per example.  [default: the model's or longest]"),
    ] = None

    train_on: Annotated[
        Literal["answers", "all"],
        Parameter(help="Chats, with next_token: learn the answers, or all tokens."),
    ] = "answers"
    max_length: Annotated[
        int | None,
        Parameter(metavar="TOKENS", help="Chats: cut rows at this length.  [default: the model's, or 1024]"),
    ] = None
    pack: Annotated[
        int | None,
        Parameter(metavar="TOKENS", help="Chats: put several rows into one of this length, kept apart."),
    ] = None
    chat_template: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Chats: a template in Jinja.  [default: the tokenizer's]"),
    ] = None

    def source(self, path: str, loss: str | None = None) -> Any:
        """Return the data of a path, read with these settings.

        Args:
            path: The data.
            loss: The loss as given; with ``next_token`` texts are rows of a language model, with others they are
                compared.

        Raises:
            OptionError: A setting is for another kind of data.
        """
        from onnxtrain.data import CsvFile, ImageFolder, TarFile, TextFile
        from onnxtrain.data.csv_file import CSV_SUFFIXES
        from onnxtrain.data.images import is_image_folder
        from onnxtrain.data.tar_file import is_tar
        from onnxtrain.text import ChatData, ComparisonData
        from onnxtrain.text.rows import holds_texts, is_json_lines

        image_settings = {"mean": _channel_values("mean", self.mean), "std": _channel_values("std", self.std)}
        compared = _compares_rows(loss) and holds_texts(path)
        rows = holds_texts(path) and (loss or "").partition("(")[0] == "next_token"
        if rows or compared or is_json_lines(path):
            reading = ("delimiter", "encoding", "decimal") if Path(path).suffix.lower() in CSV_SUFFIXES else ()
            own = ("tokenizer", "max_length", "chat_template", *(() if compared else ("train_on", "pack")))
            self._only(*own, *reading, kind="texts to compare" if compared else "chats or texts", path=path)
            opened = CsvFile(path, self.delimiter, self.encoding, self.decimal) if reading else path
            return (ComparisonData if compared else ChatData)(opened, **{name: getattr(self, name) for name in own})
        if self.tokenizer is not None:
            self._only("tokenizer", "text", "length", kind="texts", path=path)
            return TextFile(path, self.tokenizer, self.text, self.length)
        if is_tar(path) or is_image_folder(Path(path)):
            self._only("mean", "std", "skip_broken", kind="images", path=path)
            reader = TarFile if is_tar(path) else ImageFolder
            return reader(path, **image_settings, skip_broken=self.skip_broken)
        if Path(path).suffix.lower() in CSV_SUFFIXES:
            self._only("delimiter", "encoding", "decimal", kind="a CSV file", path=path)
            return CsvFile(path, self.delimiter, self.encoding, self.decimal)
        self._only(kind="arrays", path=path)
        return path

    def held_out(self, validation: str | None, loss: str | None = None) -> Any:
        """Return validation data with these settings, or the fraction to hold out.

        Raises:
            DataError: The text is neither.
        """
        if validation is None:
            return None
        if Path(validation).exists():
            return self.source(validation, loss)
        try:
            return float(validation)
        except ValueError:
            raise DataError(
                f"There is no file {validation!r}; --validation needs a file or folder of data, or a fraction such as "
                "0.1."
            ) from None

    def _only(self, *names: str, kind: str, path: str) -> None:
        """Raise OptionError for settings that are not for this kind of data."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in names and value != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                shown = flag if value is True else f"{flag} is {str(value)!r}"
                raise OptionError(f"{shown}, but {path!r} is read as {kind}; leave it out.")


def _compares_rows(loss: str | None) -> bool:
    """Return whether a loss, as given, compares rows of texts."""
    from onnxtrain.aliases import ALIASES
    from onnxtrain.call_text import name_of
    from onnxtrain.losses import LOSSES
    from onnxtrain.losses.groups import GroupLoss

    found = LOSSES.get(ALIASES.get(name_of(loss), name_of(loss)))
    return found is not None and issubclass(found, GroupLoss)


def _channel_values(name: str, given: str | None) -> float | Sequence[float] | None:
    if given is None:
        return None
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        raise OptionError(f"--{name} is {given!r}; it needs numbers such as 0.5 or 0.49,0.46,0.41.") from None
    return found[0] if len(found) == 1 else found


def _by_pattern(
    flag: str, unit: str, given: list[str] | None, number: type[int] | type[float]
) -> dict[str, float] | None:
    """Parse PATTERN=NUMBER; the last equals sign separates, since names may have some."""
    found = {}
    for text in given or ():
        pattern, equals, value = text.rpartition("=")
        try:
            found[pattern] = number(value)
        except ValueError:
            equals = ""
        if not equals or not pattern:
            raise OptionError(f"{flag} is {text!r}; it needs PATTERN={unit}, such as '*.v_proj=16'.")
    return found or None


@Parameter(name="*", group=ADAPTERS)
@dataclass(frozen=True)
class LoraFlags:
    """Adapters to train beside frozen weights."""

    lora: Annotated[
        int | None,
        Parameter(
            metavar="RANK",
            help="Train adapters of this rank beside frozen weights. The output is then an adapter (.onnx_adapter, or "
            "a folder for PEFT), or a model (.onnx) into which it is merged.",
        ),
    ] = None
    lora_alpha: Annotated[float | None, Parameter(help="Adapters are scaled by alpha / rank.  [default: 16]")] = None
    lora_targets: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="PATTERN",
            help="The layers to adapt: names that 'inspect --adaptable' lists, or all-linear. May be "
            "repeated.  [default: attention's, else all-linear]",
        ),
    ] = None
    lora_dropout: Annotated[float | None, Parameter(help="Dropout of the adapters' inputs.  [default: 0]")] = None
    lora_init: Annotated[
        Literal["kaiming", "gaussian", "pissa", "loftq"] | None,
        Parameter(
            help="Initial values of adapters: random, the weight's principal singular values (pissa), or the error of "
            "quantization (loftq).  [default: kaiming]"
        ),
    ] = None
    lora_original: Annotated[
        Path | None,
        Parameter(metavar="PATH", help="For loftq: the float model that the quantized MODEL was made from."),
    ] = None
    lora_rank_pattern: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="PATTERN=RANK",
            help="Another rank for the layers that match, such as '*.v_proj=16'. May be repeated; the first applies.",
        ),
    ] = None
    lora_alpha_pattern: Annotated[
        list[str] | None,
        Parameter(negative=(), metavar="PATTERN=ALPHA", help="Another alpha for the layers that match, likewise."),
    ] = None
    lora_lr_ratio: Annotated[
        float | None,
        Parameter(help="The learning rate of B divided by that of A (LoRA+), such as 16.  [default: 1]"),
    ] = None
    lora_adapter: Annotated[
        Path | None,
        Parameter(metavar="PATH", help="Continue with this .onnx_adapter file or PEFT folder, instead of --lora."),
    ] = None
    dora: Annotated[bool, SWITCH, Parameter(help="Train the magnitudes of columns, too (DoRA).")] = False
    rslora: Annotated[bool, SWITCH, Parameter(help="Scale adapters by alpha / sqrt(rank) (rsLoRA).")] = False

    @property
    def given(self) -> bool:
        """Return whether any flag asks for adapters."""
        return self.lora is not None or self.lora_adapter is not None

    def build(self) -> Lora | None:
        """Return the settings of the adapters, if any.

        Raises:
            OptionError: A setting is given without adapters, or is invalid.
        """
        named: dict[str, Any] = {"alpha": self.lora_alpha, "targets": self.lora_targets, "dropout": self.lora_dropout}
        named |= {"init": self.lora_init, "adapter": self.lora_adapter, "original": self.lora_original}
        named |= {"rank_pattern": _by_pattern("--lora-rank-pattern", "RANK", self.lora_rank_pattern, int)}
        named |= {"alpha_pattern": _by_pattern("--lora-alpha-pattern", "ALPHA", self.lora_alpha_pattern, float)}
        named |= {"lr_ratio": self.lora_lr_ratio}
        settings = {name: value for name, value in named.items() if value is not None}
        if not self.given:
            flags = [f"--lora-{name.replace('_', '-')}" for name in settings]
            flags += [f"--{name}" for name in ("dora", "rslora") if getattr(self, name)]
            if flags:
                raise OptionError(f"{flags[0]} is for adapters, but there are none; give their rank: --lora 8.")
            return None
        from onnxtrain.adapters.lora import Lora

        if self.lora is not None and self.lora_adapter is not None:
            raise OptionError(
                f"--lora {self.lora} begins new adapters of this rank, but --lora-adapter {self.lora_adapter} "
                "continues with those of a file and their ranks; leave one of the two out."
            )
        if self.lora is not None:
            settings["rank"] = self.lora
        return Lora(**settings, dora=self.dora, rslora=self.rslora)


def adapter_of(path: Path | None) -> Lora | None:
    """Return the adapter to compute with; ``None`` without a path."""
    if path is None:
        return None
    from onnxtrain.adapters.lora import Lora

    return Lora(adapter=path)


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
    if isinstance(value, tuple):
        return "1,1"  # of blocks of one weight
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


def _integers(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Convert ``4,1``, or an array of TOML."""
    text = ",".join(token.value for token in tokens)
    try:
        return tuple(int(part) for part in text.strip("()").split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a pair of integers such as 4,1") from None


IntegerPair = Annotated[tuple[int, ...] | None, Parameter(negative=(), n_tokens=1, converter=_integers, metavar="A,B")]


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
            if name in ("lr", "sparsity") or name in names or (name == "block" and default == "ssgd"):
                continue  # prune has a --block of its own
            if name == "betas":
                pair = Parameter(negative=(), n_tokens=1, converter=_pair, metavar="A,B", help=_setting_help(name))
                names[name] = Annotated[tuple[float, ...] | None, pair]
            elif name == "block":
                names[name] = Annotated[IntegerPair, Parameter(metavar="OUT,IN", help=_setting_help(name))]
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
    Training = TrainingFlags
    OptimizerSettings = OptimizerFlags
    PruningOptimizer = OptimizerFlags
else:
    Training = _training_flags()
    OptimizerSettings, PruningOptimizer = _optimizer_flags("adam"), _optimizer_flags("ssgd")
