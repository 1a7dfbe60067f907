"""``onnxtrain fit``: train a model on data and write it with its new weights."""

from __future__ import annotations

import contextlib
import io
import shlex
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from onnxtrain.cli import flags, paths
from onnxtrain.cli.configuration import TOKENS, Config, as_toml
from onnxtrain.cli.distributed import DistributedFlags
from onnxtrain.cli.flags import COMMON, LOGGING, MEMORY, RESULTS, RUNNING, TRAINING, WEIGHTS, flag, grouped
from onnxtrain.cli.messages import in_flags
from onnxtrain.cli.plugin_flags import AddedFlags, ReaderFlags, added_callbacks
from onnxtrain.cli.process import quiet_on_request, unattended
from onnxtrain.cli.training_flags import Loop, LoraFlags, LossFlags, OptimizerFlags, OptimizerSettings, Training
from onnxtrain.errors import DataError, OptionError, TrainingHint

if TYPE_CHECKING:
    import numpy as np
    from onnx import ModelProto

    from onnxtrain.training.callbacks import Callback
    from onnxtrain.training.run_folder import RunFolder
    from onnxtrain.training.trainer import Trainer

HELP = "Train a model on data; the result differs from it in the trained weights and in nothing else."

EXAMPLES = """\
Examples

  Images, in one folder per class; a new last layer for seven classes:
    onnxtrain fit model.onnx --data photos --loss softmax_cross_entropy \\
        --new-head 7 --validation 0.1 --metrics accuracy --epochs 5

  A table, with the column to predict:
    onnxtrain fit model.onnx --data sales.csv --target price \\
        --loss mean_squared_error --epochs 20 --output tuned.onnx

  Text: an adapter of a language model, of chats, its tokenizer beside it:
    onnxtrain fit folder --data chat.jsonl --loss next_token --lora 8 \\
        --batch-size 4 --output tuned.onnx_adapter
"""

MORE_EXAMPLES = """
  Arrays. train.npz holds an array named like the model's input, and the labels
  under any other name:
    onnxtrain fit model.onnx --data train.npz --loss softmax_cross_entropy \\
        --epochs 10 --output tuned.onnx

  Only the last layer; a tenth of the data is held out and says when to stop:
    onnxtrain fit model.onnx --data train.npz --loss softmax_cross_entropy \\
        --train 'classifier.*' --validation 0.1 --metrics accuracy \\
        --epochs 50 --early-stopping 5

  Adapters beside frozen weights, for ONNX Runtime or PEFT (see adapter --help):
    onnxtrain fit model.onnx --data train.npz --loss softmax_cross_entropy \\
        --lora 8 --lora-targets '*.{q,v}_proj' --output tuned.onnx_adapter

  Nesterov's momentum with a schedule and checkpoints; the same line goes on
  after an interruption:
    onnxtrain fit model.onnx --data train.npz --loss mean_squared_error \\
        --optimizer momentum --mode nesterov --learning-rate 0.1 \\
        --schedule 'warmup(100)+cosine' --checkpoint checkpoints --resume

  Everything in one folder, and the same again, bit for bit:
    onnxtrain fit model.onnx --data train.npz --loss softmax_cross_entropy \\
        --run runs/first
    onnxtrain fit --config runs/first/config.toml --run runs/again

  Longer than planned at first; the terminal may be closed meanwhile:
    onnxtrain fit model.onnx --data train.npz --loss mean_squared_error \\
        --epochs 20 --schedule cosine --checkpoint checkpoints --resume \\
        --change epochs &
"""


@grouped(RESULTS)
@dataclass(frozen=True)
class Results:
    """Output files of the training."""

    output: Path | None = flag(
        None,
        "The trained model, or with --lora the adapter.  [default: MODEL-trained.onnx, here]",
        name=["--output", "-o"],
        metavar="FILE",
        common=True,
    )
    in_place: flags.InPlace = False
    curve: Path | None = flag(None, "The training curve, as .png (needs matplotlib) or .svg.", metavar="FILE")
    history: Path | None = flag(None, "One row per epoch, as .json or .csv.", metavar="FILE")
    run: Path | None = flag(
        None,
        "Write a report, metrics and all settings to this folder. It gets metrics.csv, curves.svg, "
        "report.html and config.toml, and the model if --output is not given.",
        metavar="FOLDER",
        common=True,
    )


@grouped(LOGGING)
@dataclass(frozen=True)
class LoggerFlags:
    """Packages that log trainings."""

    tensorboard: Path | None = flag(None, "Write event files for TensorBoard to this folder.", metavar="FOLDER")
    mlflow: bool = flag(False, "Log to a run of MLflow, configured by MLFLOW_TRACKING_URI and others.")
    wandb: bool = flag(False, "Log to a run of Weights & Biases, configured by WANDB_PROJECT and others.")

    def build(self, *, quiet: bool) -> list[Callback]:
        """Return the callbacks that write the logs."""
        from onnxtrain.training.callbacks.loggers import needs

        for name in ("tensorboard", "mlflow", "wandb"):
            if getattr(self, name):
                needs(name, f"--{name}")
        from onnxtrain import callbacks

        found: list[Callback] = []
        if self.tensorboard is not None:
            found.append(callbacks.TensorBoardLogger(self.tensorboard))
        if self.mlflow:
            found.append(callbacks.MLflowLogger())
        if self.wandb:
            found.append(callbacks.WandbLogger(settings={"silent": True}) if quiet else callbacks.WandbLogger())
        return found


@unattended()
@quiet_on_request
def command(
    model: flags.TunedModelPath,
    /,
    *,
    data: flags.Data,
    loss: flags.Loss,
    loss_flags: LossFlags = LossFlags(),  # noqa: B008 - frozen
    reading: ReaderFlags = ReaderFlags(),  # noqa: B008 - frozen
    new_head: Annotated[
        int | None,
        Parameter(
            group=(WEIGHTS, COMMON),
            metavar="CLASSES",
            help="Replace the last layer by a new one for this many classes; its weights are named head.*. With --lora "
            "they are trained unless --train is given, and the model with them goes beside the adapter (*-base.onnx).",
        ),
    ] = None,
    accumulate: Annotated[
        int,
        Parameter(
            group=MEMORY,
            help="Micro-batches per step (gradient accumulation); no result changes.",
        ),
    ] = 1,
    ema: flags.Ema = None,
    training: Training = Training(),  # noqa: B008 - frozen
    adapters: LoraFlags = LoraFlags(),  # noqa: B008 - frozen
    settings: OptimizerSettings = OptimizerSettings(),  # noqa: B008 - frozen
    loop: Loop = Loop(),  # noqa: B008 - frozen
    early_stopping: Annotated[
        int | None,
        Parameter(
            group=(TRAINING, COMMON),
            metavar="PATIENCE",
            help="Stop after this many epochs without a better validation loss; keep the best.",
        ),
    ] = None,
    results: Results = Results(),
    added: AddedFlags = AddedFlags(),  # noqa: B008 - frozen
    loggers: LoggerFlags = LoggerFlags(),
    threads: flags.Threads = None,
    provider: flags.Provider = None,
    distributed: DistributedFlags = DistributedFlags(),  # noqa: B008 - frozen
    progress: Annotated[
        Literal["auto", "lines"],
        Parameter(group=RUNNING, help="lines prints lines in a terminal, too, instead of a bar.", show_default=False),
    ] = "auto",
    quiet: flags.Quiet = False,
    config: Config = None,
    debug: flags.Debug = False,
) -> int:
    """Run ``onnxtrain fit``."""
    arguments = dict(locals())
    from onnxtrain.cli.progress import Progress
    from onnxtrain.data.data_names import names_of_inputs
    from onnxtrain.model_file.file import find_model
    from onnxtrain.model_file.hub import is_on_hub
    from onnxtrain.model_file.saving import current_folder
    from onnxtrain.model_file.writing import only_warns
    from onnxtrain.training.callbacks import EarlyStopping
    from onnxtrain.training.config import Distributed
    from onnxtrain.training.trainer import Trainer

    if distributed.processes is not None or distributed.restarts:
        return distributed.launch(loop.checkpoint)
    logs = loggers.build(quiet=quiet)
    parallel = distributed.communicator()
    root = parallel is None or parallel.rank == 0
    if results.in_place and is_on_hub(model):
        raise OptionError(f"--in-place writes onto the model, but {str(model)!r} is on the Hub; give --output.")
    model = find_model(model)
    folder = results.run
    lora = adapters.build()
    ending = ".onnx" if lora is None or results.in_place else ".onnx_adapter"
    default = f"{model.stem}-trained{ending}" if folder is None else str(folder / f"model{ending}")
    output = paths.output_of(model, results.output, default, in_place=results.in_place)
    base = None if new_head is None or lora is None else _base_beside(output)
    _check_paths(results, loop, output, root=root, adapters=lora is not None)
    if early_stopping is not None and loop.validation is None:
        raise OptionError("--early-stopping watches the validation loss; give --validation a file or a fraction.")
    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "--data": paths.data(data),
            "--validation": paths.data(loop.validation),
            "--sample-weight": paths.data(loop.sample_weight if _is_file(loop.sample_weight) else None),
            "--loss": paths.loss(loss),
            "--checkpoint": paths.Given(loop.checkpoint, written=True, files="checkpoint-*"),
            "--output": paths.output(output, is_model=output.suffix not in ("", ".onnx_adapter")),
            "the model with the new head": paths.output(base, is_model=True),
            "--lora-adapter": paths.Given(adapters.lora_adapter),
            "--lora-original": paths.Given(adapters.lora_original),
            "--curve": paths.output(results.curve),
            "--history": paths.output(results.history),
            "--tensorboard": paths.Given(loggers.tensorboard, written=True, files="events.out.tfevents.*"),
            "--run": paths.Given(folder, written=True, files=paths.RUN_FILES),
        },
        in_place=results.in_place,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingHint)  # Progress prints all hints
        start: Path | ModelProto = model
        if new_head is not None:
            from onnxtrain.editing.head import replace_head

            start = replace_head(model, new_head, output=training.prediction, seed=training.seed)
        options = training.arguments()
        if lora is not None and options["train"] is None and not isinstance(start, Path):
            options["train"] = _new_weights(start, model)
        trainer = Trainer(
            start,
            loss=loss_flags.of(loss),
            optimizer=settings.build(),
            accumulate=accumulate,
            ema=ema,
            lora=lora,
            runtime=flags.runtime(threads, provider),
            distributed=Distributed(parallel, distributed.shard_states, distributed.shard_gradients),
            **options,
        )
        trainer.data_adapter.folder = model.parent  # of the tokenizer, also for a model with a new head in memory
        if new_head is not None and adapters.lora_adapter is None:
            trainer.data_adapter.names = names_of_inputs(model)
    run = None if folder is None else _run_folder(folder, model, arguments, settings, resume=loop.resume)
    if root and (output.parent.is_dir() or folder is None):  # else the run makes it
        _check_output(trainer, output)
        if base is not None:
            trainer.config.model.check_writable(base)
    source, held_out = reading.source(data, loss), reading.held_out(loop.validation, loss)
    weights = _sample_weight(loop.sample_weight)
    start_folder = current_folder()
    shown = Progress(trainer, name=model.name, display=progress)
    stopping = [] if early_stopping is None else [EarlyStopping(patience=early_stopping)]
    with _interruptible(trainer, output, base, start_folder), contextlib.closing(shown):
        history = trainer.fit(
            source,
            callbacks=[shown, *stopping, *added_callbacks(added, reading, shown), *logs],
            run=run,
            **loop.arguments() | {"validation": held_out, "sample_weight": weights},
        )
    try:
        if root:
            what = "model" if lora is None or output.suffix == ".onnx" else "adapter"
            _save(trainer, output, base, start_folder)
            shown.written(what, output)
            if base is not None:
                shown.written("model with the new head, for the adapter", base)
    finally:  # the rest is written, too, where the model had to go elsewhere
        if run is not None:
            run.finish(trainer, ema=ema is not None)
            shown.written("report", run.report)
        if root and results.history is not None:
            with only_warns("There is no history"):
                history.save(results.history)
                shown.written("history", results.history)
        if root and results.curve is not None:
            with only_warns("There is no curve"):
                shown.curve(history.rows, results.curve, title=model.name)
    if root:
        shown.summary(history.rows)
    return 0


def _save(trainer: Trainer, output: Path, base: Path | None, start: Path) -> None:
    """Save the model, or the adapter and the model that it is for, elsewhere if not here."""
    from onnxtrain.model_file.saving import save_or_rescue

    save_or_rescue(lambda path: trainer.save(path, ema=trainer.config.ema is not None), output, start)
    if base is not None:
        save_or_rescue(lambda path: trainer.config.model.save(path, {}), base, start)


def _run_folder(
    path: Path, model: Path, arguments: Mapping[str, Any], settings: OptimizerFlags, *, resume: bool
) -> RunFolder:
    """Return the folder of a run, with every flag that repeats it, defaults included."""
    from onnxtrain.training.run_folder import RunFolder

    text = as_toml({**arguments, "settings": None, **settings.resolved()})
    folder = RunFolder(path, title=model.name, command=shlex.join(["onnxtrain", *TOKENS.get()]), settings=text)
    folder.check(resume=resume)
    folder.waits = True
    return folder


def _new_weights(start: ModelProto, model: Path) -> list[str]:
    """Return patterns of the initializers of a new head."""
    from onnxtrain.graph.patterns import escape
    from onnxtrain.model_file.file import ModelFile

    before = set(ModelFile.load(model).names())
    return [escape(tensor.name) for tensor in start.graph.initializer if tensor.name not in before]


def _base_beside(output: Path) -> Path | None:
    """Return the path of the model with the new head that an adapter is for; ``None`` if the output is a model."""
    from onnxtrain.adapters.files import is_adapter_path

    return output.with_name(f"{output.stem}-base.onnx") if is_adapter_path(output) else None


def _check_paths(results: Results, loop: Loop, output: Path, *, root: bool, adapters: bool) -> None:
    """Check before the training what would fail after it."""
    from onnxtrain.adapters.files import check_adapter_path, is_adapter_path
    from onnxtrain.model_file.writing import check_writable
    from onnxtrain.training.callbacks.report import check_curve

    if not root:  # only rank 0 writes
        return
    for path in (output, results.curve, results.history):
        in_run = results.run is not None and path is not None and path.parent == results.run
        if path is None or (in_run and not path.parent.exists()):  # the run makes the folder
            continue
        if adapters and path == output and is_adapter_path(output):
            check_adapter_path(output)
        else:
            check_writable(path)
    if loop.checkpoint:
        folder = Path(loop.checkpoint)
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise OptionError(f"--checkpoint is {loop.checkpoint!r}, but {str(existing)!r} is a file, no folder.")
        check_writable(existing / "checkpoint-0.safetensors")
    if results.curve is not None:
        check_curve(results.curve)
    if results.history is not None and results.history.suffix not in (".json", ".csv"):
        raise OptionError(f"--history is {str(results.history)!r}; it needs a file that ends in .json or .csv.")
    if loop.save_best is not None and not loop.checkpoint:
        raise OptionError("--save-best needs the folder of the checkpoints; give --checkpoint.")


def _check_output(trainer: Trainer, output: Path) -> None:
    """Check before the training that the output can be written, with adapters merged or alone."""
    from onnxtrain.data.data_names import names_file
    from onnxtrain.model_file.writing import check_writable

    objective = trainer.objective
    adapted = objective.adapted
    if adapted is not None and adapted.writes(output):
        trained = [*objective.parameters, *objective.statistics, *(copy.name for copy in objective.copies)]
        adapted.check_writes(output, trainer.config.model, trained)
    else:
        if adapted is not None:
            adapted.check_mergeable()
        trainer.config.model.check_writable(output)
        if (labels := names_file(output)).exists():
            check_writable(labels)


def _is_file(sample_weight: str | None) -> bool:
    """Return whether the sample weights are a file rather than a column of the data."""
    return sample_weight is not None and (
        Path(sample_weight).suffix in (".npy", ".txt", ".csv") or Path(sample_weight).is_file()
    )


_WEIGHTS_LIMIT = 1 << 30
"""Largest text file of weights, in bytes."""


def _sample_weight(given: str | None) -> np.ndarray | str | None:
    """Return the weights of the examples, or the name of their column."""
    if given is None or not _is_file(given):
        return given
    import numpy as np

    from onnxtrain.data.files import read_arrays
    from onnxtrain.model_file.small_files import check_regular_file, read_text

    path = Path(given)
    try:
        if path.suffix == ".npy":
            check_regular_file(path)
            return next(iter(read_arrays(path).values()))
        weights: np.ndarray = np.loadtxt(io.StringIO(read_text(path, _WEIGHTS_LIMIT)), ndmin=1)
    except FileNotFoundError:
        raise DataError(f"There is no file {str(path)!r}; --sample-weight needs a .npy or a text file.") from None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"--sample-weight is {str(path)!r}, which cannot be read: {reason}.") from error
    return weights


@contextlib.contextmanager
def _interruptible(trainer: Trainer, output: Path, base: Path | None, start: Path) -> Iterator[None]:
    """Save the model so far beside the output after Ctrl-C, unless there is a checkpoint of it."""
    from onnxtrain.training.loop import KEPT

    try:
        yield
    except KeyboardInterrupt as error:
        if str(error).endswith(KEPT):
            ending = ".onnx" if trainer.objective.adapted is None else output.suffix
            path = output.with_name(f"{output.stem}-interrupted{ending}")
            _save(trainer, path, base, start)
            raise KeyboardInterrupt(f"Interrupted; the model so far is in {str(path)!r}.") from None
        if not str(error):
            raise
        raise KeyboardInterrupt(in_flags(str(error))) from None
