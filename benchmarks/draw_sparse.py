"""Draws the figures of docs/pruning.md from the tables of its benchmarks.

    python benchmarks/draw_sparse.py [--folder docs/pictures]

The tables are those of benchmarks/pages/sparse_forms.md, sparse.md and structures.md. Each PNG file holds the checksum
of the rows that it shows.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parent / "pages"
DOCS = Path(__file__).resolve().parents[1] / "docs"
COLOURS = {"single": "#2563eb", "4x1": "#ea580c", "16x1": "#16a34a", "1x4": "#9333ea"}
COLOURS |= {"channels": "#be123c", "2:4": "#ca8a04"}
FORMS = {"1x1": "single", "4x1": "4x1", "16x1": "16x1"}  # of the column of sparse.md
INT8, PEER, GREY = "#111827", "#0891b2", "#94a3b8"

Row = dict[str, str]


def table(page: str, columns: str, title: str = "", pages: Path = PAGES) -> list[Row]:
    """Return the rows of the first table of a page whose header begins with these columns, after this title.

    Raises:
        SystemExit: The page has no such table.
    """
    path = pages / page
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    found = not title
    for line in lines:
        found = found or line.startswith(title)
        if found and line.startswith(columns):
            names = cells(line)
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(names, cells(row), strict=True)))
            return rows
    raise SystemExit(f"{path} has no table '{columns} ...'{f' after a line {title}' if title else ''}.")


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(text: str) -> float:
    """The number that a cell begins with."""
    match = re.match(r"[\d.]+", text)
    if match is None:
        raise SystemExit(f"'{text}' does not begin with a number.")
    return float(match[0])


def forms_rows(pages: Path = PAGES) -> dict[str, list[Row]]:
    """The finals of each model by form, and "int8" with a row for each model and the finals' dense error in it."""
    int8 = table("sparse_forms.md", "| model | dense float32, error", pages=pages)
    rows = {"int8": int8}
    page = (pages / "sparse_forms.md").read_text(encoding="utf-8")
    for row in int8:
        title = f"{row['model']}, finals"
        rows[row["model"]] = table("sparse_forms.md", "| form | method", title, pages)
        row["dense, mean"] = re.findall(rf"^{title}:.*; dense ([\d.]+) %:$", page, re.MULTILINE)[0]
    return rows


def speed_rows(pages: Path = PAGES) -> dict[str, list[Row]]:
    """The rows of models whose names have a share of zeros and a form."""
    rows = table("sparse.md", "| model | threads | dense, ms", pages=pages)
    return {"": [row for row in rows if re.search(r", \d+%, \d+x1$", row["model"])]}


def structure_rows(pages: Path = PAGES) -> dict[str, list[Row]]:
    """The architectures by library."""
    found: dict[str, list[Row]] = {}
    for row in table("structures.md", "| architecture | library", pages=pages):
        found.setdefault(row["library"], []).append(row)
    return found


def draw_forms(figure: Any, rows: dict[str, list[Row]]) -> None:
    """Draw the error at 90 % zeros over the multiply-adds that remain: a panel for each model."""
    int8 = rows["int8"]
    figure.set_size_inches(10, 4.1)
    for axes, dense in zip(figure.subplots(1, len(int8)), int8, strict=True):
        best: dict[str, tuple[float, float, float]] = {}
        for row in rows[dense["model"]]:
            text = row["90 %"] or row["50 %"]
            error, spread = (number(part) for part in text.split(" ± "))
            best[row["form"]] = min(
                best.get(row["form"], (1e9, 0, 0)), (error, spread, number(row["multiplications left at 90 %"]))
            )
        for form, (error, spread, left) in best.items():
            label = "single zeros" if form == "single" else f"{form} (50 % zeros)" if form == "2:4" else form
            axes.errorbar(left, error, spread, color=COLOURS[form], marker="o", ms=6, capsize=3, ls="none", label=label)
        axes.axhline(number(dense["dense, mean"]), color=GREY, ls=":", label="dense float32, mean of seeds")
        for kind, fill in (("float32", "white"), ("int8", INT8)):
            error = number(dense[f"dense {kind}, error, %"])
            axes.plot(100, error, "D", color=INT8, mfc=fill, ms=7, ls="none", label=f"dense {kind}, seed 0")
        axes.margins(y=0.12)
        axes.set_xlim(0, 107)
        axes.set_title(dense["model"], loc="left", fontsize=11)
        axes.set_xlabel("multiply-adds left, %")
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("test error, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)


def draw_speed(figure: Any, rows: dict[str, list[Row]]) -> None:
    """Draw a bar of times dense float32 for each row, with the places of dense int8 and DeepSparse."""
    figure.set_size_inches(8, 4.6)
    axes = figure.subplots()
    models: dict[str, list[tuple[str, str, Row]]] = {}
    for row in rows[""]:
        model, zeros, form = row["model"].rsplit(", ", 2)
        models.setdefault(model, []).append((zeros, FORMS[form], row))
    y, names, places = 0.0, [], []
    shown: set[str] = set()

    def label(text: str) -> str | None:  # once for each entry of the legend
        new = text not in shown
        shown.add(text)
        return text if new else None

    for model, own in models.items():
        axes.text(0, y - 0.1, model, fontsize=10, weight="bold", va="center", backgroundcolor="white", zorder=4)
        for zeros, form, row in sorted(own, key=lambda item: item[0]):
            y += 1
            kind = "single zeros" if form == "single" else form
            axes.barh(y, number(row["sparse"]), 0.75, color=COLOURS[form], label=label(kind))
            axes.plot(number(row["dense int8"]), y, "D", color=INT8, ms=6, label=label("dense int8"))
            if row["DeepSparse"]:
                speed = number(row["DeepSparse"])
                axes.plot(speed, y, "^", color=PEER, mec="white", ms=8, label=label("DeepSparse 1.8"))
            names.append(f"{zeros.replace('%', ' %')}, {form}")
            places.append(y)
        y += 1.4
    axes.axvline(1, color=INT8, lw=1, ls=":", label="dense float32")
    axes.set_yticks(places, names, fontsize=9)
    axes.set_ylim(y - 0.6, -0.8)
    axes.set_xlim(0)
    axes.set_xlabel("times dense float32 in ONNX Runtime, one thread")
    axes.set_ylabel("zeros, form")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def draw_structures(figure: Any, rows: dict[str, list[Row]]) -> None:
    """Draw the share of parameters removed from each architecture, and whether Torch-Pruning's result runs."""
    figure.set_size_inches(10, 4.2)
    axes = figure.subplots()
    x, names, places, top = 0.0, [], [], 44
    for library, own in rows.items():
        axes.text(x, top + 4, library, fontsize=10, weight="bold")
        for row in own:
            right, runs = row["onnxtrain"] == "right", row["Torch-Pruning"] == "runs"
            gone = number(row["parameters gone"]) if row["parameters gone"] else 0
            axes.bar(x, gone, 0.75, color=COLOURS["single"] if right else "white", edgecolor=COLOURS["single"])
            axes.plot(x, top, "o" if runs else "x", color=COLOURS["16x1" if runs else "channels"], ms=6)
            names.append(row["architecture"])
            places.append(x)
            x += 1
        x += 0.8
    axes.set_xticks(places, names, rotation=90, fontsize=8)
    axes.set_xlim(-0.8, x - 1)
    axes.set_ylim(0, top + 8)
    axes.set_yticks([0, 10, 20, 30, 40])
    axes.set_ylabel("parameters removed, %")
    axes.set_xlabel("architecture")
    axes.spines[["top", "right"]].set_visible(False)
    for marker, colour, text in (
        ("s", COLOURS["single"], "onnxtrain, equal to the masked original"),
        ("o", COLOURS["16x1"], "Torch-Pruning, defaults: runs"),
        ("x", COLOURS["channels"], "Torch-Pruning, defaults: fails, or removes nothing"),
    ):
        axes.plot([], [], marker, color=colour, label=text)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)


FIGURES: dict[str, tuple[Callable[[Path], dict[str, list[Row]]], Callable[[Any, dict[str, list[Row]]], None]]] = {
    "sparse_forms.png": (forms_rows, draw_forms),
    "sparse_speed.png": (speed_rows, draw_speed),
    "structures.png": (structure_rows, draw_structures),
}


def checksum(rows: dict[str, list[Row]]) -> str:
    """The checksum of the rows of a figure, which stands in its file."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def draw(folder: Path, pages: Path = PAGES) -> None:
    """Write all figures, in few colours so that the files are small."""
    from matplotlib.figure import Figure
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    for name, (read, paint) in FIGURES.items():
        rows = read(pages)
        figure = Figure(layout="constrained")
        paint(figure, rows)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=110)
        note = PngInfo()
        note.add_text("Description", checksum(rows))
        Image.open(drawn).convert("RGB").quantize(64).save(folder / name, optimize=True, pnginfo=note)


def main() -> None:
    """Write the figures of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DOCS / "pictures")
    draw(parser.parse_args().folder)


if __name__ == "__main__":
    main()
