"""``onnxtrain demo``: train a small network on handwritten digits, and check the saved file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from onnxtrain.cli import flags, terminal
from onnxtrain.cli.process import unattended
from onnxtrain.errors.formatting import duration

HELP = "Build a convolutional network as ONNX, train it on handwritten digits, check the file: under a minute."

EXAMPLES = """\
Examples

    onnxtrain demo
    onnxtrain demo --folder /tmp/digits
"""


@unattended()
def command(
    *,
    folder: Annotated[
        Path, Parameter(group=flags.RESULTS, metavar="FOLDER", help="Folder of the files; created if missing.")
    ] = Path("onnxtrain-demo"),
    debug: flags.Debug = False,
) -> int:
    """Run ``onnxtrain demo``."""
    from onnxtrain.cli.progress import Progress
    from onnxtrain.model_file.file import ModelFile
    from onnxtrain.training import demo
    from onnxtrain.training.examples import digits_cnn

    began = time.perf_counter()
    console = terminal.console()
    digits = demo.load_digits()
    original, tuned, curve = (folder / name for name in ("digits.onnx", "digits-tuned.onnx", "curve.png"))
    _make(folder, [original, tuned, curve])
    ModelFile.load(digits_cnn()).save(original, {})
    trainer = demo.trainer_for(original)
    console.print(
        f"{len(digits.train_images)} images of handwritten digits to learn from, {len(digits.test_images)} held out"
    )
    progress = Progress(trainer, name=str(original))
    try:
        history = demo.train(trainer, digits, [progress])
    finally:
        progress.close()
    trainer.save(tuned)
    progress.written("original", original)
    progress.written("tuned", tuned)
    progress.curve(history.rows, curve, title="onnxtrain demo: handwritten digits")
    progress.summary(history.rows)
    found = demo.check_file(original, tuned, digits)
    reported = history.rows[-1]["val_accuracy"]
    checks = {
        f"accuracy {found.accuracy:.2%} on held-out images, {demo.GOAL:.0%} needed": found.accuracy >= demo.GOAL,
        f"plain onnxruntime and the training agree ({found.accuracy:.2%}, {reported:.2%})": (
            abs(found.accuracy - reported) < 0.5 / len(digits.test_labels)
        ),
        f"all {len(found.trained)} trained initializers changed, and nothing else in the file": (
            found.unchanged and set(found.trained) == set(trainer.parameters)
        ),
    }
    for what, holds in checks.items():
        mark = Text("ok    ", style="bold green") if holds else Text("FAILED", style="bold red")
        console.print(Text.assemble(mark, " ", what))
    console.print(f"Done in {duration(time.perf_counter() - began)}.")
    if all(checks.values()):
        return 0
    terminal.console(stderr=True).print("The demonstration did not reach its goal; see FAILED above.")
    return 1


def _make(folder: Path, paths: list[Path]) -> None:
    from onnxtrain.errors import ModelError
    from onnxtrain.model_file.writing import check_writable

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"--folder is {str(folder)!r}, which cannot be made: {error.strerror}; choose another."
        ) from error
    for path in paths:
        check_writable(path)
