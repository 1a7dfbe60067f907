"""``onnxtrain evaluate``: measure loss and metrics of a model on data."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config
from onnxtrain.cli.plugin_flags import ReaderFlags
from onnxtrain.cli.training_flags import LossFlags
from onnxtrain.errors.formatting import number

HELP = "Measure the loss and other metrics of a model on data."

EXAMPLES = """\
Examples

    onnxtrain evaluate model.onnx --data test.npz --loss softmax_cross_entropy \\
        --metrics accuracy
    onnxtrain evaluate model.onnx --data test.npz --loss huber --json
    onnxtrain evaluate model.onnx --data test.csv --loss cross_entropy \\
        --metrics accuracy,f1,confusion_matrix

  The model with an adapter, which is not merged:
    onnxtrain evaluate model.onnx --data test.npz --loss cross_entropy \\
        --lora-adapter tuned.onnx_adapter
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    lora_adapter: flags.AdapterPath = None,
    data: flags.Data,
    loss: flags.Loss,
    loss_flags: LossFlags = LossFlags(),  # noqa: B008 - frozen
    target: flags.Target = None,
    reading: ReaderFlags = ReaderFlags(),  # noqa: B008 - frozen
    metrics: flags.Metrics = None,
    prediction: flags.Prediction = None,
    batch_size: Annotated[int, Parameter(group=flags.DATA, help="Examples per batch.")] = 256,
    threads: flags.Threads = None,
    provider: flags.Provider = None,
    json_output: flags.Json = False,
    config: Config = None,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain evaluate``."""
    from onnxtrain.training.inference.forward import evaluate

    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "--lora-adapter": paths.Given(lora_adapter),
            "--data": paths.data(data),
            "--loss": paths.loss(loss),
        }
    )
    measured = evaluate(
        model,
        reading.source(data, loss),
        loss=loss_flags.of(loss),
        target=target,
        metrics=metrics or (),
        batch_size=batch_size,
        output=prediction,
        lora=flags.adapter_of(lora_adapter),
        runtime=flags.runtime(threads, provider),
    )
    if json_output:
        terminal.print_json(measured)
        return
    rows = {
        name.replace("_", " "): number(value) if isinstance(value, float) else str(value)
        for name, value in measured.items()
    }
    terminal.print_facts(rows)
