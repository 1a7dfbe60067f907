"""``onnxtrain export``: write the standard's training model, or a step graph for any runtime."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config
from onnxtrain.cli.flags import COMMON, LOSS, RESULTS, SWITCH, WEIGHTS, flag, grouped
from onnxtrain.cli.training_flags import LossFlags, OptimizerSettings, Training
from onnxtrain.cli.web_page import RUNTIME, WEB_FILES, write_page
from onnxtrain.errors import OptionError
from onnxtrain.errors.formatting import plural
from onnxtrain.lowering.portable import Portable
from onnxtrain.training.config import Precision, choose_precision

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

HELP = "Write a training model (ONNX's own TrainingInfoProto), the graph of one step, or the initial states."

EXAMPLES = """\
Examples

  The training in ONNX's own form, to keep, send and resume:
    onnxtrain export model.onnx --loss softmax_cross_entropy --optimizer adam \\
        --training-model training.onnx

  One step as plain ONNX, for C#, Java, C++ or a browser: batch, learning rate
  and states in; loss and new states out:
    onnxtrain export model.onnx --loss mean_squared_error --optimizer momentum \\
        --step-graph step.onnx --states states.safetensors

  The step graph of a training model:
    onnxtrain export training.onnx --step-graph step.onnx

  A web page that trains the model in the browser of whoever opens it:
    onnxtrain export model.onnx --loss softmax_cross_entropy --web page
    python -m http.server --directory page

  The inputs and outputs of a step graph:
    onnxtrain export step.onnx --describe
"""


@grouped(RESULTS)
@dataclass(frozen=True)
class Written:
    """Output files and options of the export."""

    training_model: Path | None = flag(None, "Write the training model here.", common=True, metavar="FILE")
    step_graph: Path | None = flag(None, "Write the step graph here.", common=True, metavar="FILE")
    states: Path | None = flag(None, "Write the initial states here, as safetensors.", common=True, metavar="FILE")
    entry: int | None = flag(None, "Index of the entry of training_info that becomes the step graph.")
    kernels: bool = flag(
        False,
        "Keep the optimizer as one node, for sessions that load onnxtrain's operator library; by default "
        "the step graph has standard operators only.",
    )

    web: Path | None = flag(
        None, "Write a web page here that trains the model in a browser.", metavar="FOLDER", common=True
    )
    web_runtime: str = flag(
        RUNTIME,
        "URL of the dist folder of onnxruntime-web; with a copy of it in the page, give ./dist/ to need no "
        "other server.",
        metavar="URL",
    )
    portable: Portable | None = flag(
        None, "Make the step graph for this provider or runtime, from operators that it has.", common=True
    )
    describe: bool = flag(
        False, "Print the inputs and outputs of the step graph; MODEL may be one already.", common=True
    )
    static: list[str] | None = flag(
        None,
        "Give a dimension of the inputs a fixed size in the step graph, such as N=32. May be repeated.",
        metavar="NAME=SIZE",
    )

    def needs_step(self) -> bool:
        """Return whether any flag needs the step graph."""
        return self.step_graph is not None or self.describe or self.web is not None

    def paths(self, *, tie: bool, precision: Precision) -> dict[str, Path]:
        """Return the output files by content."""
        given = {"training model": self.training_model, "step graph": self.step_graph, "states": self.states}
        found = {what: path for what, path in given.items() if path is not None}
        if not found and not self.describe and self.web is None:
            raise OptionError("export has nothing to write; give --training-model, --step-graph or --states a file.")
        if self.portable is not None and self.kernels:
            raise OptionError("--portable makes a graph of standard operators; leave --kernels out.")
        if self.web is not None and self.kernels:
            raise OptionError("--web needs a step graph of standard operators; leave --kernels out.")
        if self.web is not None and tie:
            raise OptionError(
                "--web writes a page that saves every weight by its own name, and --tie leaves copies out; export the "
                "step graph with --tie, and import its states with import-states --tie."
            )
        if self.web is not None and precision.states is not None:
            raise OptionError(f"--web keeps states in float32, not in {precision.states}; leave it out of --precision.")
        if self.web is not None and not precision.master_weights:
            raise OptionError("--web keeps weights in float32, not in bfloat16; leave it out of --precision.")
        return found


def command(
    model: flags.ModelPath,
    /,
    *,
    loss: Annotated[
        str | None,
        Parameter(group=(LOSS, COMMON), metavar="NAME", help=f"{flags.LOSS_HELP} A training model has its own."),
    ] = None,
    loss_flags: LossFlags = LossFlags(),  # noqa: B008 - frozen
    accumulate: Annotated[
        bool,
        SWITCH,
        Parameter(
            group=WEIGHTS,
            help="Write two entries: one accumulates the gradients of micro-batches, one applies them.",
        ),
    ] = False,
    ema: flags.Ema = None,
    training: Training = Training(),  # noqa: B008 - frozen
    settings: OptimizerSettings = OptimizerSettings(),  # noqa: B008 - frozen
    written: Written = Written(),
    config: Config = None,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain export``."""
    import onnxtrain
    from onnxtrain.lowering.portable import fix_dimensions
    from onnxtrain.model_file.file import ModelFile
    from onnxtrain.model_file.writing import check_writable, write_files

    files = written.paths(tie=training.tie, precision=choose_precision(training.precision))
    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "--loss": paths.loss(loss),
            "--training-model": paths.output(written.training_model, is_model=True),
            "--step-graph": paths.output(written.step_graph, is_model=True),
            "--states": paths.output(written.states),
            "--web": paths.folder(written.web, WEB_FILES),
        }
    )
    for path in files.values():
        check_writable(path)
    file = ModelFile.load(model)
    if written.describe and not files and written.web is None and _is_step(file.proto):
        _describe(terminal.console(), file.proto)
        return
    sizes = flags.sizes_of(written.static)
    if file.proto.training_info:
        if loss is not None:
            raise OptionError(f"{str(model)!r} is a training model with its own loss; leave --loss out.")
        proto = file.whole()
    elif loss is None:
        raise OptionError(f"{str(model)!r} is not a training model; give --loss.")
    else:
        arguments = training.arguments() | {"accumulate": accumulate, "ema": ema}
        proto = onnxtrain.training_model(model, loss=loss_flags.of(loss), optimizer=settings.build(), **arguments)
    fix_dimensions(proto, sizes)
    rows: dict[str, str] = {}
    step = None
    if written.needs_step():  # before the first write: lowering reports operators without a gradient
        step = onnxtrain.lower(
            proto,
            entry=written.entry,
            kernels=written.kernels,
            portable=written.portable,
            folder=file.folder or "",
        )
        rows |= _ports(step)
    if written.training_model is not None:
        ModelFile.load(proto, folder=file.folder).save(written.training_model, {})
    if written.step_graph is not None and step is not None:
        ModelFile.load(step, folder=file.folder).save(written.step_graph, {})
    if written.states is not None:
        write_files({written.states: _states(proto, file.folder)})
    if written.web is not None and step is not None:
        rate, states = settings.build().learning_rate, _states(proto, file.folder)
        write_page(written.web, file, step, states, learning_rate=rate, runtime=written.web_runtime)
        rows["web page"] = f"{written.web}; serve it with python -m http.server --directory {written.web}"
    rows |= {what: terminal.sized(path) for what, path in files.items()}
    console = terminal.console()
    console.print(terminal.facts(rows))
    if written.describe and step is not None:
        _describe(console, step)


def _is_step(model: ModelProto) -> bool:
    from onnxtrain.lowering.description import STEP_KEY

    return any(entry.key == STEP_KEY for entry in model.metadata_props)


def _ports(step: ModelProto) -> dict[str, str]:
    """Describe the inputs and outputs of a step graph."""
    from onnxtrain.lowering.description import STATES_KEY

    states = json.loads(next(item.value for item in step.metadata_props if item.key == STATES_KEY))
    feeds = [value.name for value in step.graph.input if value.name not in states]
    results = [value.name for value in step.graph.output if value.name not in states.values()]
    return {
        "inputs": f"{', '.join(feeds)}, and {plural(len(states), 'state')}",
        "outputs": f"{', '.join(results)}, and each state as NAME_new",
    }


def _states(proto: ModelProto, folder: Path | None) -> bytes:
    """Return the initial states, as safetensors."""
    from onnx import numpy_helper
    from safetensors.numpy import save

    from onnxtrain.lowering.training_info.read import state_tensors

    base = "" if folder is None else str(folder)
    return save({name: numpy_helper.to_array(tensor, base) for name, tensor in state_tensors(proto).items()})


def _describe(console: Console, step: ModelProto) -> None:
    """Print the feeds, states and results of a step graph."""
    from onnxtrain.autodiff.options import read_texts
    from onnxtrain.lowering.description import IN_PLACE_KEY, Description, read_states

    metadata = {entry.key: entry.value for entry in step.metadata_props}
    found = Description.read(metadata)
    news = read_states(metadata)
    in_place = set(read_texts(metadata.get(IN_PLACE_KEY, "")) or ())
    inputs = {value.name: value for value in step.graph.input}
    feeds = terminal.table("feed", "what it is", "type", "shape", title=f"step graph, version {found.version}")
    for name, role in found.feeds.items():
        feeds.add_row(name, role.replace("_", " "), *(_port(inputs[name]) if name in inputs else ("", "")))
    states = terminal.table("state", "what it is", "type", "shape", "new value", "in place")
    for name, role in found.states.items():
        port = _port(inputs[name]) if name in inputs else ("", "")
        in_place_text = "yes" if name in in_place else "no" if name in news else ""
        states.add_row(name, role, *port, news.get(name, "never written"), in_place_text)
    results = terminal.table("result", "what it is", "type", "shape")
    for value in step.graph.output:
        if value.name not in news.values():
            role = "loss before the update" if value.name == found.loss else ""
            results.add_row(value.name, role, *_port(value))
    for table in (feeds, states, results):
        console.print(table)


def _port(value: ValueInfoProto) -> tuple[str, str]:
    """Return the type and shape of an input or output."""
    from onnx import TensorProto

    tensor = value.type.tensor_type
    dims: Iterable[str] = (
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim
    )
    return TensorProto.DataType.Name(tensor.elem_type).lower(), f"[{', '.join(dims)}]"
