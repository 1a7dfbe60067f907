"""Writes docs/recipes.md: the recipes with their published and measured figures, from the folders' own expected.toml.

python tools/recipes_page.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "recipes.md"
sys.path += [str(ROOT), str(ROOT / "recipes")]

from recipes.run import RECIPES, Recipe  # noqa: E402

HEAD = """# Recipes

Before its release on PyPI, install onnxtrain from a checkout, `pip install '.[cpu]'`, or from a release's wheel,
`pip install 'FILE.whl[cpu]'`, with the extras that this page names; `gpu` and `openvino` are
[other builds](devices.md#builds-of-onnx-runtime) of ONNX Runtime.

A recipe repeats a published result: a folder of [`recipes`](../recipes/run.py) with the model, the training, and the
recorded figures with their sources. This runs one, says whether its means over the seeds are the recorded ones and
whether they reproduce the published ones, and fails if one is not as recorded, or impossible, such as a negative error:

```sh
pip install 'onnxtrain[cpu,recipes]'
python recipes/run.py lecun1989 --mnist FOLDER
```

`FOLDER` has the four original files of MNIST (`train-images-idx3-ubyte.gz` and so on), and `--fashion` names the folder
of Fashion-MNIST; other data come with packages. The recipe `lora` also needs `onnxtrain[cpu,torch]`. If a package, a
file or memory is missing, the run ends before it starts, with one sentence. `--quick` runs a form of seconds.

## Figures

"Published" figures are quoted from the sources that they link to. "Ours" is the mean over the seeds and the standard
deviation between them; `expected.toml` in the folder of a recipe has the accepted and the possible bounds. A published
figure is "reproduced" by a mean within one percent of it, or within two standard deviations, the published one and ours
together, but at most a quarter of it; of two published figures, one is enough. Otherwise the table has the
factor between ours and the nearest published figure, and the section says what is different. Better is not reproduced
either. "Seconds" are seeds times CPU time of a seed, on one thread of a Xeon with AVX-512 that had other work.

`python recipes/run.py NAME --record` writes new figures to the file, and `python tools/recipes_page.py` this page.
"""


def number(value: float) -> str:
    """Write a number with up to four digits, a small one with two."""
    return f"{value:.4g}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}".replace("e-0", "e-")


def link(recipe: Recipe) -> str:
    """The address of the first source of a recipe."""
    found = re.search(r"\]\(([^)]+)\)", recipe.source)
    assert found is not None, recipe.folder
    return found[1]


def rows(recipe: Recipe) -> list[str]:
    """The rows of a recipe's figures."""
    lines = []
    for figure in recipe.figures:
        first = figure is recipe.figures[0]
        cells = [
            f"[{recipe.folder.name}](#{recipe.folder.name})" if first else "",
            figure.name,
            f"[{figure.published}]({link(recipe)})" if figure.published else "",
            number(figure.ours) + (f" ± {number(figure.spread)}" if recipe.seeds > 1 else ""),
            figure.verdict(figure.ours, figure.spread) if figure.published else "",
            f"{recipe.seeds} x {recipe.seconds}" if first else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def section(recipe: Recipe) -> str:
    """The section of a recipe."""
    needs = "".join(f" --{name} FOLDER" for name in recipe.data)
    parts = [
        f"## {recipe.folder.name}",
        f"**{recipe.title}.** {recipe.about}",
        f"`python recipes/run.py {recipe.folder.name}{needs}`",
        f"Published: {recipe.source}. {recipe.why}".strip(),
    ]
    return "\n\n".join(textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) for part in parts)


def page() -> str:
    """The page as text."""
    recipes = [Recipe.load(path.parent) for path in sorted(RECIPES.glob("*/expected.toml"))]
    table = [
        "| recipe | figure | published | ours | reproduced | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
        *(line for recipe in recipes for line in rows(recipe)),
    ]
    return "\n\n".join([HEAD.rstrip(), "\n".join(table), *map(section, recipes)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
