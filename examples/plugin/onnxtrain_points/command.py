"""The command ``onnxtrain points``."""

from pathlib import Path

from onnxtrain_points.reading import read

HELP = "Print how many points a file holds."

EXAMPLES = """\
Examples

    onnxtrain points train.points
"""


def command(path: Path, /) -> None:
    """Run ``onnxtrain points``."""
    rows = read(path)
    print(f"{len(rows)} points of {rows.shape[1] - 1} numbers")
