"""``onnxtrain quantize``: quantize a model for ONNX Runtime and for quantization-aware training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config

HELP = "Quantize a model with ONNX Runtime's quantizer, ready for quantization-aware training."

EXAMPLES = """\
Examples

    onnxtrain quantize model.onnx --data d.npz -o q.onnx
    onnxtrain fit q.onnx --qat --data d.npz --loss cross_entropy -o tuned.onnx

  Weights of 4 bits:
    onnxtrain quantize model.onnx --data d.npz --bits 4 -o q.onnx
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    data: Annotated[str, Parameter(group=flags.DATA, help="Some hundred examples, for the ranges of activations.")],
    output: Annotated[
        Path, Parameter(name=("--output", "-o"), group=flags.RESULTS, metavar="FILE", help="The quantized model.")
    ],
    bits: Annotated[int, Parameter(help="Bits of the weights: 8 or 4.")] = 8,
    per_channel: Annotated[bool, Parameter(help="A scale for each output channel of a weight.")] = True,
    exclude: Annotated[
        list[str] | None, Parameter(negative=(), metavar="NODE", help="Names of nodes that are not quantized.")
    ] = None,
    batch_size: Annotated[int, Parameter(help="Examples at a time.")] = 32,
    config: Config = None,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain quantize``."""
    from onnxtrain.data.data_names import read_names, write_names
    from onnxtrain.editing.quantize import quantize
    from onnxtrain.model_file.file import ModelFile

    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "--data": paths.data(data),
            "--output": paths.output(output, is_model=True),
        },
        in_place=False,
    )
    made = quantize(model, data, bits=bits, per_channel=per_channel, exclude=exclude or (), batch_size=batch_size)
    ModelFile.load(made).save(output, {})
    write_names(output, read_names(ModelFile.load(model)))
    before, after = terminal.file_size(model), terminal.file_size(output)
    terminal.print_facts({"written": f"{output} ({after}; the model given: {before})"})
