"""The documentation's commands that start from a model and data, run literally."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import onnx

import onnxtrain
from onnxtrain.cli import main

PAGE = Path(__file__).parent.parent / "docs" / "command_line.md"
SHAPES = ("cross", "disc", "square")
SPECIES = ("setosa", "versicolor", "virginica")


def commands(kind: str) -> list[list[str]]:
    """The commands of the block that trains on pictures, or on flowers."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if f"--run runs/{kind}" in block)
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines]


def run(kind: str, folder: Path) -> tuple[Path, list[str]]:
    """Make model and data in a folder, which is the present one, and run the commands.

    Returns:
        The folder of the run, and what is true of the unseen examples in their order.
    """
    truth = pictures(folder) if kind == "pictures" else flowers(folder)
    found = commands(kind)
    assert len(found) == 2, "two commands"
    for arguments in found:
        assert main(arguments) == 0
    return folder / "runs" / kind, truth


def pictures(folder: Path) -> list[str]:
    """Grey shapes at random places, in folders by class and, for later, in one."""
    from PIL import Image, ImageDraw

    onnx.save(onnxtrain.examples.lenet5(), folder / "model.onnx")
    rng = np.random.default_rng(0)
    truth = []
    for index in range(225):
        shape = SHAPES[index % 3]
        image = Image.new("L", (32, 32), int(rng.integers(0, 60)))
        draw = ImageDraw.Draw(image)
        x, y, size, ink = *rng.integers(6, 14, 2).tolist(), int(rng.integers(10, 15)), int(rng.integers(150, 255))
        box = (x, y, x + size, y + size)
        if shape == "disc":
            draw.ellipse(box, fill=ink)
        elif shape == "square":
            draw.rectangle(box, outline=ink, width=2)
        else:
            draw.line(box, fill=ink, width=3)
            draw.line((x, y + size, x + size, y), fill=ink, width=3)
        unseen = index >= 195
        place = folder / "unseen" if unseen else folder / "pictures" / shape
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{index:03d}.png")
        truth += [shape] if unseen else []
    return truth


def flowers(folder: Path) -> list[str]:
    """Measurements of flowers of three kinds, with a decimal comma, and unseen ones without their kind."""
    onnx.save(onnxtrain.examples.mlp((4, 16, 3)), folder / "model.onnx")
    rng = np.random.default_rng(0)
    centres = np.array([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    kinds = rng.integers(0, 3, 180)
    rows = (centres[kinds] + rng.normal(scale=0.25, size=(180, 4))).round(2)
    lines = [";".join(str(value).replace(".", ",") for value in row) for row in rows]
    header = "sepal length;sepal width;petal length;petal width"
    known = [f"{line};{SPECIES[kind]}" for line, kind in zip(lines[:150], kinds[:150], strict=True)]
    (folder / "flowers.csv").write_text("\n".join([f"{header};species", *known]))
    (folder / "unseen.csv").write_text("\n".join([header, *lines[150:]]))
    return [SPECIES[kind] for kind in kinds[150:]]
