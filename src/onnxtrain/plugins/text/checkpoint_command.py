"""``onnxtrain checkpoint``: write a model as a checkpoint of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal

HELP = "Write a language model as a Hugging Face checkpoint, with an adapter merged into it."

EXAMPLES = """\
Examples

  A model that was trained in full:
    onnxtrain checkpoint tuned.onnx -o checkpoint --base-model original

  A model with an adapter; onnxtrain adapter merge does the same:
    onnxtrain checkpoint model.onnx tuned.onnx_adapter -o checkpoint
"""


def command(
    model: flags.ModelPath,
    adapter: Annotated[
        Path | None,
        Parameter(group=flags.MODEL, help="An .onnx_adapter file, or a folder of PEFT.", show_default=False),
    ] = None,
    /,
    *,
    output: Annotated[
        Path, Parameter(name=("--output", "-o"), group=flags.RESULTS, metavar="FOLDER", help="The folder to write.")
    ],
    base_model: Annotated[
        str | None,
        Parameter(
            metavar="FOLDER",
            help="The checkpoint that the model was exported from, which has config.json.  [default: the adapter's, "
            "else the folder of the model]",
        ),
    ] = None,
    json_output: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain checkpoint``."""
    from onnxtrain.plugins.text.hugging_face import save_checkpoint

    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "ADAPTER": paths.Given(adapter),
            "--output": paths.folder(output, ("config.json", "model.safetensors")),
        }
    )
    save_checkpoint(model, output, adapter=adapter, base_model=base_model)
    if json_output:
        terminal.print_json({"written": str(output)})
    else:
        terminal.print_facts({"written": str(output)})
