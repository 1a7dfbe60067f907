"""Flags of several commands, and the groups in which help shows them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from onnxtrain.errors.registries import added
from onnxtrain.training.config import TrainingConfig

if TYPE_CHECKING:
    from onnxtrain.runtime.options import RuntimeOptions

LOSS_HELP = (
    "The loss: softmax_cross_entropy, binary_cross_entropy, mean_squared_error, mean_absolute_error, huber, "
    "focal, binary_focal, dice, ctc, transducer, triplet, info_nce, arcface, cosface, next_token, "
    f"'distillation(teacher=FILE)'{''.join(f', {name}' for name in added('loss'))}; "
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


def flag_of(name: str) -> str:
    """Return the flag of a parameter: ``--learning-rate``."""
    return "--" + name.replace("_", "-")
