"""``onnxtrain check``: compare a training step on an execution provider with the CPU's."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.flags import COMMON, DATA, RESULTS, RUNNING
from onnxtrain.cli.training_flags import LossFlags, OptimizerSettings, Training

HELP = "Run one training step on an execution provider and compare it with the CPU's."

EXAMPLES = """\
The exit status is 1 if the step fails or differs; then every operator is
tried alone, with the CPU's inputs.

Examples

    onnxtrain check model.onnx --provider cuda --loss softmax_cross_entropy
    onnxtrain check model.onnx --provider openvino --static N=8 \\
        --loss softmax_cross_entropy --data train.npz
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    provider: Annotated[
        str, Parameter(group=(RUNNING, COMMON), metavar="NAME", help="The provider, such as cuda or openvino.")
    ],
    loss: flags.Loss,
    loss_flags: LossFlags = LossFlags(),  # noqa: B008 - frozen
    data: Annotated[
        str | None,
        Parameter(group=(DATA, COMMON), metavar="PATH", help="Data for the batch.  [default: random values]"),
    ] = None,
    target: flags.Target = None,
    batch_size: Annotated[int, Parameter(group=DATA, help="Examples in the batch.")] = 4,
    static: Annotated[
        list[str] | None,
        Parameter(
            group=DATA,
            negative=(),
            metavar="NAME=SIZE",
            help="Give a dimension of the inputs a fixed size, such as N=4, for providers that want static shapes. "
            "May be repeated.",
        ),
    ] = None,
    training: Training = Training(),  # noqa: B008 - frozen
    settings: OptimizerSettings = OptimizerSettings(),  # noqa: B008 - frozen
    tolerance: Annotated[
        float,
        Parameter(
            group=(RESULTS, COMMON), help="Largest accepted difference, relative to the result's largest element."
        ),
    ] = 1e-3,
    threads: flags.Threads = None,
    json_output: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Run ``onnxtrain check``."""
    from onnxtrain.plugins.provider_check.provider_check import check_provider
    from onnxtrain.runtime.options import RuntimeOptions
    from onnxtrain.training.trainer import Trainer

    paths.check_paths({paths.MODEL: paths.model(model), "--data": paths.data(data), "--loss": paths.loss(loss)})
    RuntimeOptions(providers=[provider]).provider_list()  # before the model is read
    trainer = Trainer(
        model,
        loss=loss_flags.of(loss),
        optimizer=settings.build(),
        runtime=RuntimeOptions(threads=threads, kernels=False),
        **training.arguments(),
    )
    sizes = flags.sizes_of(static)
    report = check_provider(
        trainer, provider, data, target=target, batch_size=batch_size, sizes=sizes, tolerance=tolerance
    )
    if json_output:
        terminal.print_json(dataclasses.asdict(report) | {"agrees": report.agrees})
        return 0 if report.agrees else 1
    console = terminal.console()
    if report.failure:
        console.print(f"{report.provider} cannot run the step: {report.failure}", soft_wrap=True, markup=False)
    for each in report.outputs:
        console.print(f"differs: {each.name} by {each.size:.1e}", soft_wrap=True, markup=False)
    for each in report.nodes:
        why = each.reason or f"differs by {each.size:.1e}"
        console.print(f"operator {each.operator} ({each.name}): {why}", soft_wrap=True, markup=False)
    if not report.agrees and not report.nodes:
        console.print("No operator alone differs.")
    if report.left_out:
        console.print(f"{report.left_out} operators with graphs or sequences were not tried alone.")
    if report.agrees:
        console.print(
            f"{report.provider} runs the step: {report.compared} results differ from the CPU's by at most "
            f"{report.largest:.1e} of their largest element.",
            soft_wrap=True,
        )
    return 0 if report.agrees else 1
