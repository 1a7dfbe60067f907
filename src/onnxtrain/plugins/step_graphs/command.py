"""``onnxtrain import-states``: write the trained weights of a step graph back into the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.errors.formatting import plural

HELP = "Write a model with weights that a browser or another program has trained."

EXAMPLES = """\
Examples

    onnxtrain import-states model.onnx states.safetensors -o tuned.onnx

  After an export with --untie or --tie:
    onnxtrain import-states model.onnx states.safetensors --tie -o tuned.onnx
"""


def command(
    model: flags.ModelPath,
    states: Annotated[Path, Parameter(group=flags.MODEL, help="The states, as safetensors.")],
    /,
    *,
    output: Annotated[
        Path, Parameter(name=("--output", "-o"), group=flags.RESULTS, metavar="FILE", help="The tuned model.")
    ],
    untie: Annotated[bool, flags.SWITCH, Parameter(help="The export had --untie.")] = False,
    tie: Annotated[bool, flags.SWITCH, Parameter(help="The export had --tie.")] = False,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain import-states``."""
    from onnxtrain.plugins.step_graphs.import_states import import_states

    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "STATES": paths.data(str(states)),
            "--output": paths.output(output, is_model=True),
        },
        in_place=False,
    )
    found = import_states(model, states, output, untie=untie, tie=tie)
    rows = {
        "written": terminal.sized(output),
        "weights": plural(len(found.weights), "tensor"),
    }
    if found.others:
        rows["left out"] = f"{plural(len(found.others), 'state')} of the optimizer"
    terminal.print_facts(rows)
