"""``onnxtrain predict``: the outputs of a model for data, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.errors import OptionError

HELP = "Write the outputs of a model for data; a target in the data is not looked at."

EXAMPLES = """\
Examples

    onnxtrain predict model.onnx --data test.npz --output predictions.npz
    onnxtrain predict model.onnx --data images.npy --output logits.npy
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    data: flags.Data,
    target: flags.Target = None,
    output: Annotated[
        Path,
        Parameter(
            name=["--output", "-o"],
            group=flags.RESULTS,
            metavar="FILE",
            help="A .npz file with every output under its name, or a .npy file for a model with one output.",
        ),
    ],
    batch_size: Annotated[int, Parameter(group=flags.DATA, help="Examples per batch.")] = 256,
    threads: flags.Threads = None,
    provider: flags.Provider = None,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain predict``; the flags are described where they are declared."""
    from onnxtrain.model.file import check_writable
    from onnxtrain.model.writing import AtomicFiles
    from onnxtrain.training.forward import outputs

    if output.suffix not in (".npz", ".npy"):
        raise OptionError(f"--output is {str(output)!r}; it needs a file that ends in .npz or .npy.")
    paths.check_paths({paths.MODEL: paths.model(model), "--data": paths.data(data), "--output": paths.output(output)})
    check_writable(output)
    arrays = outputs(model, data, target=target, batch_size=batch_size, options=flags.runtime(threads, provider))
    if output.suffix == ".npy" and len(arrays) > 1:
        raise OptionError(
            f"--output is {str(output)!r}, but the model has {len(arrays)} outputs ({', '.join(arrays)}); "
            "give a .npz file."
        )
    # Text comes as Python objects, which only pickle could write.
    arrays = {name: array.astype(np.str_) if array.dtype.hasobject else array for name, array in arrays.items()}
    with AtomicFiles() as files, files.create(output) as file:
        if output.suffix == ".npy":
            np.save(file, next(iter(arrays.values())), allow_pickle=False)
        else:
            np.savez(file, allow_pickle=False, **arrays)
    rows = {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}
    rows["written"] = f"{output} ({terminal.file_size(output)})"
    terminal.console().print(terminal.facts(rows))
