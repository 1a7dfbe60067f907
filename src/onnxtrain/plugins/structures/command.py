"""``onnxtrain shrink``: remove the channels, heads and hidden units of a model that are zero."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config

HELP = "Remove the channels, attention heads and hidden units whose weights are all zero; the outputs stay the same."

EXAMPLES = """\
Examples

  What other tools have pruned in whole structures:
    onnxtrain shrink pruned.onnx -o small.onnx
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    output: Annotated[
        Path, Parameter(name=("--output", "-o"), group=flags.RESULTS, metavar="FILE", help="The smaller model.")
    ],
    change_outputs: Annotated[
        bool, flags.SWITCH, Parameter(help="Also remove structures that are part of an output of the model.")
    ] = False,
    config: Config = None,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain shrink``."""
    from onnxtrain.data.data_names import read_names, write_names
    from onnxtrain.model_file.file import ModelFile
    from onnxtrain.plugins.structures.shrink import shrink

    paths.check_paths(
        {paths.MODEL: paths.model(model), "--output": paths.output(output, is_model=True)}, in_place=False
    )
    small = shrink(model, change_outputs=change_outputs)
    ModelFile.load(small).save(output, {})
    write_names(output, read_names(ModelFile.load(model)))
    before, after = terminal.file_size(model), terminal.file_size(output)
    terminal.console().print(terminal.facts({"written": f"{output} ({after}; the model given: {before})"}))
