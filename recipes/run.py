"""Repeats a published result: trains with several seeds and compares the means with the recipe's expected figures.

    python recipes/run.py NAME [--mnist FOLDER] [--fashion FOLDER] [--seeds 0,1,2] [--workers 2] [--quick | --record]

NAME is a folder of recipes/, or the path of another one. `train.py` in it has a function `train(options, seed)`, which
returns a figure by name; `expected.toml` has the figures to compare with, their sources, and the recipe's needs. Two
questions have two answers: is a mean the one that was recorded, and does it reproduce the published one. The exit code
is 1 where a mean is not the recorded one or a figure is impossible, 2 where a package, a file or memory is missing.
--quick runs a form of seconds, with bounds of its own. --record writes means, deviations, seeds and seconds into
`expected.toml`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and scikit-learn read it: a seed takes one thread

import numpy as np
from packaging.requirements import Requirement

RECIPES = Path(__file__).resolve().parent
sys.path.append(str(RECIPES.parent / "benchmarks"))

from idx import read_digits  # noqa: E402

DATA_SETS = ("mnist", "fashion")


class MissingError(Exception):
    """Something that a recipe needs is missing; the message is one sentence."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        quick: True for the form of seconds.
        folders: Folders of the data sets of :data:`DATA_SETS` that were given.
    """

    quick: bool = False
    folders: Mapping[str, Path] = field(default_factory=dict)

    def images(self, name: str, part: str, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Read the first images [N, 1, 28, 28] in [0, 1] and labels of a data set; ``part`` is "train" or "t10k"."""
        images, labels = read_digits(self.folders[name], part)
        return images[:count], labels[:count]


@dataclass(frozen=True)
class Outcome:
    """Figures of a seed, and the seconds of CPU time that they took."""

    figures: Mapping[str, float]
    seconds: float


NEAR = 0.01
"""A mean within this share of the published figure reproduces it."""

DEVIATIONS = 2.0
"""So does a mean within so many standard deviations: of the published figure and of ours between seeds, together ..."""

FARTHEST = 0.25
"""... but never one that is farther away than this share: much noise reproduces nothing."""


class Published(NamedTuple):
    """A published figure.

    Attributes:
        value: The number.
        spread: Its standard deviation, as published; 0 where there is none.
        at_most: True where the source only says that it is below ``value``.
    """

    value: float
    spread: float = 0.0
    at_most: bool = False

    @classmethod
    def read(cls, text: str) -> list[Published]:
        """Read texts such as "0.14; 0.62", "492 ± 13", "below 1e3" and "close to 1e6".

        >>> Published.read("below 1e3; -90 ± 6")
        [Published(value=1000.0, spread=0.0, at_most=True), Published(value=-90.0, spread=6.0, at_most=False)]
        """
        found = []
        for part in filter(None, text.split("; ")):
            at_most = part.startswith("below ")
            value, _, spread = part.removeprefix("below ").removeprefix("close to ").partition(" ± ")
            found.append(cls(float(value), float(spread or 0), at_most))
        return found

    def is_reproduced(self, mean: float, spread: float) -> bool:
        """Return whether a mean with a deviation between seeds is this figure."""
        if self.at_most:
            return mean <= self.value
        noise = min(DEVIATIONS * math.hypot(spread, self.spread), FARTHEST * abs(self.value))
        return abs(mean - self.value) <= max(NEAR * abs(self.value), noise) * (1 + 1e-9)


@dataclass(frozen=True)
class Figure:
    """A figure of a recipe.

    Attributes:
        name: What is measured, with its unit.
        ours: Mean over the seeds.
        spread: Standard deviation between the seeds.
        within: Largest accepted difference between a mean and ``ours``.
        possible: Smallest and largest value that such a figure can have.
        quick: Smallest and largest accepted value of the quick form; empty where that has no such figure.
        published: The published figures.
    """

    name: str
    ours: float
    spread: float
    within: float
    possible: tuple[float, float]
    quick: tuple[float, ...]
    published: str = ""

    def bounds(self, quick: bool) -> tuple[float, ...]:
        """Smallest and largest accepted mean, both possible."""
        low, high = self.quick if quick else (self.ours - self.within, self.ours + self.within)
        return max(low, self.possible[0]), min(high, self.possible[1])

    def verdict(self, mean: float, spread: float) -> str:
        """Return whether a mean reproduces a published figure: "yes", or "no" with the factor; "-" without one."""
        known = Published.read(self.published)
        if not known:
            return "-"
        if any(each.is_reproduced(mean, spread) for each in known):
            return "yes"
        factors = [mean / each.value for each in known]
        nearest = min(factors, key=lambda factor: abs(math.log(factor)) if 0 < factor < math.inf else math.inf)
        return f"no, {nearest:.3g} times"


@dataclass(frozen=True)
class Recipe:
    """`expected.toml` of a folder.

    Attributes:
        folder: The folder.
        title: What is repeated.
        about: What is trained on what, in a few sentences.
        source: Where the published figures stand, in Markdown.
        why: Why ours differ from them; empty where they do not.
        seeds: Number of seeds of the expected figures.
        seconds: CPU time of a seed.
        memory: Memory of a seed in MiB.
        figures: The expected figures.
        packages: Requirements beside onnxtrain's own.
        data: Names in :data:`DATA_SETS`.
    """

    folder: Path
    title: str
    about: str
    source: str
    seeds: int
    seconds: int
    memory: int
    figures: tuple[Figure, ...]
    why: str = ""
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Recipe:
        """Read a folder.

        Raises:
            MissingError: It is no recipe.
        """
        for name in ("expected.toml", "train.py"):
            if not (folder / name).is_file():
                known = ", ".join(sorted(path.parent.name for path in RECIPES.glob("*/train.py")))
                raise MissingError(f"{folder} has no {name}; the recipes are {known}.")
        fields = tomllib.loads((folder / "expected.toml").read_text())
        figures = tuple(Figure(name, **entries) for name, entries in fields.pop("figures").items())
        return cls(folder, figures=figures, **fields)

    def check_needs(self, options: Options, workers: int) -> None:
        """Check everything that the recipe needs before it starts.

        Raises:
            MissingError: The first thing that is missing.
        """
        for text in self.packages:
            wanted = Requirement(text)
            try:
                version = importlib.metadata.version(wanted.name)
            except importlib.metadata.PackageNotFoundError:
                raise MissingError(f"{self.folder.name} needs {text}, which is not installed.") from None
            if not wanted.specifier.contains(version, prereleases=True):
                raise MissingError(f"{self.folder.name} needs {text}, but {wanted.name} {version} is installed.")
        for name in self.data:
            if name not in options.folders:
                raise MissingError(
                    f"{self.folder.name} needs --{name} FOLDER, the folder of the four files of its images."
                )
            try:
                for part in ("train", "t10k"):
                    options.images(name, part)
            except (OSError, ValueError) as error:
                raise MissingError(f"{self.folder.name} cannot read its images: {error}") from None
        needed, free = self.memory * workers, free_memory()
        if free < needed:
            raise MissingError(f"{self.folder.name} needs {needed} MiB of memory, but {free:.0f} MiB are available.")

    def train(self, options: Options, seed: int) -> Outcome:
        """Run the recipe with a seed.

        Raises:
            ValueError: Its figures are not those of `expected.toml`.
        """
        spec = importlib.util.spec_from_file_location(f"recipe_{self.folder.name}", self.folder / "train.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        begin = time.process_time()
        found: dict[str, float] = module.train(options, seed)
        seconds = time.process_time() - begin
        if list(found) != [figure.name for figure in self.figures_of(options.quick)]:
            raise ValueError(f"{self.folder.name} returned {list(found)}, but its expected.toml has other figures.")
        return Outcome(found, seconds)

    def figures_of(self, quick: bool) -> list[Figure]:
        """The figures of a run."""
        return [figure for figure in self.figures if figure.quick or not quick]

    def compare(self, outcomes: Sequence[Outcome], quick: bool) -> tuple[str, bool]:
        """Return a table of the figures, and whether all figures are possible and all means within their bounds."""
        lines = [
            "| figure | published | mean | deviation | reproduced | accepted | |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        right = True
        for figure in self.figures_of(quick):
            values = np.array([outcome.figures[figure.name] for outcome in outcomes])
            low, high = figure.bounds(quick)
            with np.errstate(invalid="ignore"):  # a figure may be infinite, as steps to what is never reached
                deviation = values.std()
            possible = bool(((figure.possible[0] <= values) & (values <= figure.possible[1])).all())  # false for NaN
            good = possible and bool(low <= values.mean() <= high)
            right &= good
            said = "as recorded" if good else "NOT as recorded" if possible else "IMPOSSIBLE"
            lines.append(
                f"| {figure.name} | {figure.published or '-'} | {values.mean():.4g} | {deviation:.2g} | "
                f"{'-' if quick else figure.verdict(float(values.mean()), float(deviation))} | "
                f"{low:.4g} to {high:.4g} | {said} |"
            )
        return "\n".join(lines), right

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Write means, deviations, seeds and seconds into `expected.toml`, and leave the rest of it."""

        def written(text: str, **values: float) -> str:
            for key, value in values.items():
                text = re.sub(rf"^{key} = .*$", f"{key} = {value:.4g}", text, count=1, flags=re.MULTILINE)
            return text

        path = self.folder / "expected.toml"
        head, *sections = path.read_text().split("\n[figures.")
        parts = [written(head, seeds=len(outcomes), seconds=round(np.mean([o.seconds for o in outcomes])))]
        for figure, section in zip(self.figures, sections, strict=True):
            values = [outcome.figures[figure.name] for outcome in outcomes]
            parts.append(written(section, ours=float(np.mean(values)), spread=float(f"{np.std(values):.2g}")))
        path.write_text("\n[figures.".join(parts))


def free_memory() -> float:
    """Available memory in MiB; infinite where the system does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:")), math.inf)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a folder of recipes/")
    for name in DATA_SETS:
        parser.add_argument(
            f"--{name}", type=Path, help="folder of train-images-idx3-ubyte.gz and the other three files"
        )
    parser.add_argument(
        "--seeds", type=seed_list, help="such as 0,1,2; by default the recipe's, with --quick the first"
    )
    parser.add_argument(
        "--workers", type=int, choices=range(1, 65), default=2, help="seeds at a time, one thread each", metavar="N"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    form.add_argument("--record", action="store_true", help="make what is found the recorded figures")
    given = parser.parse_args(arguments)
    folders = {name: getattr(given, name) for name in DATA_SETS if getattr(given, name)}
    options = Options(given.quick, folders)
    try:
        recipe = Recipe.load(RECIPES / given.recipe)
        seeds = given.seeds or range(1 if given.quick else recipe.seeds)
        workers = min(given.workers, len(seeds))
        recipe.check_needs(options, workers)
    except MissingError as error:
        print(error, file=sys.stderr)
        return 2
    if workers == 1:
        outcomes = shown(seeds, (recipe.train(options, seed) for seed in seeds))
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            outcomes = shown(seeds, pool.map(recipe.train, [options] * len(seeds), seeds))
    table, right = recipe.compare(outcomes, options.quick)
    print(f"\n{table}\n\n{len(outcomes)} seeds, {np.mean([o.seconds for o in outcomes]):.0f} s of CPU time each")
    if given.record:
        recipe.record(outcomes)
    return 0 if right else 1


def seed_list(text: str) -> list[int]:
    """Read seeds that commas separate."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"seeds are integers that commas separate, such as 0,1,2; got {text!r}"
        ) from None


def shown(seeds: Sequence[int], results: Iterable[Outcome]) -> list[Outcome]:
    """Print results as they come, and return them."""
    outcomes = []
    for seed, outcome in zip(seeds, results, strict=True):
        said = ", ".join(f"{name}: {value:.4g}" for name, value in outcome.figures.items())
        print(f"seed {seed}: {said} ({outcome.seconds:.0f} s)", flush=True)
        outcomes.append(outcome)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
