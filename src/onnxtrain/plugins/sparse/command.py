"""``onnxtrain sparsify``: compile a pruned model for kernels that skip zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config

HELP = "Compile a pruned model, so that its sparse layers run faster in ONNX Runtime."

EXAMPLES = """\
Examples

  Prune, then skip the zeros:
    onnxtrain prune model.onnx --data train.npz --loss softmax_cross_entropy \\
        --sparsity 0.9 -o pruned.onnx
    onnxtrain sparsify pruned.onnx -o fast.onnx

  For batches of 32 with 128 tokens each:
    onnxtrain sparsify pruned.onnx --static N=32 --static T=128 -o fast.onnx
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    output: Annotated[
        Path, Parameter(name=("--output", "-o"), group=flags.RESULTS, metavar="FILE", help="The compiled model.")
    ],
    static: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="NAME=SIZE",
            help="Size of a dynamic dimension of the inputs for the timing, such as N=32; the written model keeps it "
            "dynamic. May be repeated.",
        ),
    ] = None,
    config: Config = None,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain sparsify``."""
    from onnxtrain.plugins.sparse.compile import compile_sparse

    paths.check_paths({paths.MODEL: paths.model(model), "--output": paths.output(output, is_model=True)})
    result = compile_sparse(model, output, sizes=flags.sizes_of(static))
    console = terminal.console()
    numbers = ("zeros", "block", "speed-up")
    table = terminal.table("layer", "operator", *numbers, "runs", right=numbers)
    for layer in result.layers:
        speedup = "" if layer.speedup is None else f"{layer.speedup:.2f}"
        block = f"{layer.block}x1" if layer.speedup is not None else ""
        runs = "sparse" if layer.compiled else "dense"
        table.add_row(layer.name, layer.operator, f"{layer.sparsity:.1%}", block, speedup, runs)
    console.print(table)
    if not any(layer.compiled for layer in result.layers):
        terminal.lines(console, "No layer has enough zeros to be faster on this machine; all stay dense.")
    if result.removed_units:
        terminal.lines(console, f"{result.removed_units:,} units without effect are taken out.")
    console.print(
        terminal.facts(
            {
                "written": f"{output} ({terminal.file_size(output)}; the model given: {terminal.file_size(model)})",
                "speed-up": f"{result.speedup:.2f} times, on this machine with one thread",
            }
        )
    )
