"""``onnxtrain predict``: write the outputs of a model for data to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config
from onnxtrain.cli.plugin_flags import ReaderFlags
from onnxtrain.errors import OptionError
from onnxtrain.errors.formatting import count

HELP = "Write the outputs of a model for data; a target in the data is ignored."

EXAMPLES = """\
Examples

    onnxtrain predict model.onnx --data test.npz --output predictions.npz
    onnxtrain predict model.onnx --data images.npy --output logits.npy

  A line for each image, with its file, its label and all probabilities:
    onnxtrain predict tuned.onnx --data pictures --output found.csv

  The model with an adapter, which is not merged:
    onnxtrain predict model.onnx --data test.npz --output predictions.npz \\
        --lora-adapter tuned.onnx_adapter
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    lora_adapter: flags.AdapterPath = None,
    data: flags.Data,
    target: flags.Target = None,
    reading: ReaderFlags = ReaderFlags(),  # noqa: B008 - frozen
    output: Annotated[
        Path,
        Parameter(
            name=["--output", "-o"],
            group=flags.RESULTS,
            metavar="FILE",
            help="A .csv or .parquet file with a line for each example; a .npz file with every output under its name, "
            "or a .npy file for a model with one output.",
        ),
    ],
    probabilities: Annotated[
        bool,
        flags.SWITCH,
        Parameter(
            group=flags.RESULTS,
            help="Write labels and probabilities, of the outputs that were trained on text labels, else of the first "
            "floating one. The default after such a training.",
        ),
    ] = False,
    batch_size: Annotated[int, Parameter(group=flags.DATA, help="Examples per batch.")] = 256,
    threads: flags.Threads = None,
    provider: flags.Provider = None,
    config: Config = None,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain predict``."""
    from onnxtrain.data.conversion import kind_of
    from onnxtrain.data.data_names import read_names
    from onnxtrain.model_file.file import ModelFile
    from onnxtrain.model_file.writing import AtomicFiles, check_writable
    from onnxtrain.training.inference.forward import kind_of_output, predict_all
    from onnxtrain.training.inference.prediction_table import TABLE_SUFFIXES, check_table, prediction_table, write_table

    suffixes = (*TABLE_SUFFIXES, ".npz", ".npy")
    if output.suffix not in suffixes:
        raise OptionError(f"--output is {str(output)!r}; it needs a file that ends in {', '.join(suffixes)}.")
    if probabilities and output.suffix not in TABLE_SUFFIXES:
        raise OptionError(f"--probabilities go to a .csv or .parquet file, but --output is {str(output)!r}.")
    check_table(output)
    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "--lora-adapter": paths.Given(lora_adapter),
            "--data": paths.data(data),
            "--output": paths.output(output),
        }
    )
    check_writable(output)
    source = reading.source(data)
    runtime = flags.runtime(threads, provider)
    lora = flags.adapter_of(lora_adapter)
    arrays = predict_all(model, source, target=target, batch_size=batch_size, lora=lora, runtime=runtime)
    if output.suffix == ".npy" and len(arrays) > 1:
        raise OptionError(
            f"--output is {str(output)!r}, but the model has {len(arrays)} outputs ({', '.join(arrays)}); "
            "give a .npz file."
        )
    if output.suffix in TABLE_SUFFIXES:
        size = len(next(iter(arrays.values())))
        loaded = ModelFile.load(model)
        names = read_names(loaded, lora_adapter)
        floating = (name for name, array in arrays.items() if kind_of(array.dtype) == "float")
        scores = names.output if names.output in arrays else next(floating, next(iter(arrays)))
        by_output = isinstance(names.labels, Mapping)
        classified = names.labels is not None or probabilities
        table = prediction_table(
            arrays,
            examples=getattr(source, "examples_read", None),
            labels=names.labels,
            probabilities=probabilities,
            kind={name: kind_of_output(loaded, name) for name in names.labels or () if name in arrays}
            if by_output
            else kind_of_output(loaded, scores)
            if classified
            else None,
            output=scores,
            targets=names.targets,
        )
        write_table(output, table)
        rows = {"lines": count(size), "columns": ", ".join([*table][:8]) + (" ..." if len(table) > 8 else "")}
    else:
        # Strings are Python objects, which only pickle could write.
        arrays = {name: array.astype(np.str_) if array.dtype.hasobject else array for name, array in arrays.items()}
        with AtomicFiles() as files, files.create(output) as file:
            if output.suffix == ".npy":
                np.save(file, next(iter(arrays.values())), allow_pickle=False)
            else:
                np.savez(file, allow_pickle=False, **arrays)
        rows = {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}
    terminal.print_facts({**rows, "written": terminal.sized(output)})
