"""Every recipe runs in its short form and reaches its figures; a wrong figure or a missing need fails."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import recipes_page

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))

from recipes import run as runner  # noqa: E402
from zoo.mnist_files import write_digits  # noqa: E402

FOLDERS = sorted(path.parent for path in (ROOT / "recipes").glob("*/train.py"))


def recipe(**changes):
    """A recipe without needs, and with one figure."""
    figure = runner.Figure("error, %", 2.0, 0.1, within=0.5, possible=(0.0, 100.0), quick=(0.0, 3.0), published="1.9")
    fields = {"title": "", "about": "", "source": "", "seeds": 2, "seconds": 1, "memory": 10, "figures": (figure,)}
    return runner.Recipe(Path("some"), **fields | changes)


def outcomes(*values):
    return [runner.Outcome({"error, %": value}, 1.0) for value in values]


@pytest.mark.parametrize(
    ("values", "quick", "right"),
    [
        ((1.6, 2.2), False, True),
        ((1.4, 1.5), False, False),
        ((2.0, 3.1), False, False),
        ((0.5,), True, True),
        ((3.1,), True, False),
        ((2.0, math.nan), False, False),
        ((math.inf,), True, False),
    ],
)
def test_means_are_compared_with_the_expected_figures(values, quick, right):
    table, found = recipe().compare(outcomes(*values), quick)
    assert found == right
    assert ("| as recorded |" in table) == right


def test_bounds_are_possible_ones():
    figure = runner.Figure("error, %", 0.3, 0.1, within=0.5, possible=(0.0, 100.0), quick=(-1.0, 200.0))
    assert figure.bounds(quick=False) == (0.0, 0.8)
    assert figure.bounds(quick=True) == (0.0, 100.0)


@pytest.mark.parametrize("values", [(-0.1, 0.7), (math.nan, 0.3), (101.0, -99.0)])
def test_an_impossible_figure_fails_even_where_the_mean_is_right(values):
    figure = runner.Figure("error, %", 0.3, 0.1, within=0.9, possible=(0.0, 100.0), quick=())
    table, right = recipe(figures=(figure,)).compare(outcomes(*values), quick=False)
    assert not right
    assert "| IMPOSSIBLE |" in table


@pytest.mark.parametrize(
    ("published", "mean", "spread", "verdict"),
    [
        ("", 1.0, 0.1, "-"),
        ("2.0", 2.02, 0.0, "yes"),
        ("2.0", 2.03, 0.0, "no, 1.01 times"),
        ("2.0", 2.19, 0.1, "yes"),
        ("2.0", 2.21, 0.1, "no, 1.1 times"),
        ("2.0 ± 0.3", 2.5, 0.1, "yes"),
        ("2.0 ± 0.3", 2.6, 0.1, "no, 1.3 times"),
        ("6.7e-4", 1.23e-3, 3.9e-4, "no, 1.84 times"),
        ("2.0 ± 0.3", 1.3, 0.1, "no, 0.65 times"),
        ("6.7e-4", 0.0332, 0.0, "no, 49.6 times"),
        ("87", 27.53, 8.5, "no, 0.316 times"),
        ("0.14; 0.62", 0.71, 0.07, "yes"),
        ("0.14; 0.62", 0.9, 0.07, "no, 1.45 times"),
        ("-90 ± 6", -84.0, 1.8, "yes"),
        ("-90 ± 6", 84.0, 1.8, "no, -0.933 times"),
        ("below 1e3", 90.0, 0.0, "yes"),
        ("below 1e3", 1200.0, 0.0, "no, 1.2 times"),
        ("close to 1e6", 1273.0, 76.0, "no, 0.00127 times"),
        ("1", math.nan, 0.0, "no, nan times"),
    ],
)
def test_a_published_figure_is_reproduced_from_both_sides(published, mean, spread, verdict):
    figure = runner.Figure("error", mean, spread, within=1.0, possible=(0.0, 1e9), quick=(), published=published)
    assert figure.verdict(mean, spread) == verdict


def test_a_run_says_both_whether_it_is_as_recorded_and_whether_it_reproduces():
    figure = runner.Figure("error, %", 3.0, 0.1, within=0.5, possible=(0.0, 100.0), quick=(0.0, 9.0), published="1.9")
    table, right = recipe(figures=(figure,)).compare(outcomes(3.0, 3.2), quick=False)
    assert right
    assert "| 1.9 | 3.1 | 0.1 | no, 1.63 times | 2.5 to 3.5 | as recorded |" in table
    assert (
        "| 1.9 | 3.1 | 0.1 | - | 0 to 9 | as recorded |"
        in recipe(figures=(figure,)).compare(outcomes(3.0, 3.2), quick=True)[0]
    )  # a short run reproduces nothing


def test_a_package_that_is_missing_or_old_is_named():
    with pytest.raises(runner.MissingError, match=r"some needs no-such-package>=1, which is not installed\."):
        recipe(packages=("no-such-package>=1",)).check_needs(runner.Options(), 1)
    with pytest.raises(
        runner.MissingError, match=rf"some needs numpy>=1000, but numpy {np.__version__} is installed\."
    ):
        recipe(packages=("numpy>=1000",)).check_needs(runner.Options(), 1)


def test_images_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(runner.MissingError, match=r"some needs --mnist FOLDER, the folder of the four files"):
        recipe(data=("mnist",)).check_needs(runner.Options(), 1)
    given = runner.Options(folders={"mnist": tmp_path})
    with pytest.raises(runner.MissingError, match=r"cannot read its images: .* has neither train-images"):
        recipe(data=("mnist",)).check_needs(given, 1)
    write_digits(tmp_path, 20, 10)
    recipe(data=("mnist",)).check_needs(given, 1)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not images")
    with pytest.raises(runner.MissingError, match=r"t10k-labels-idx1-ubyte.gz is not an IDX file"):
        recipe(data=("mnist",)).check_needs(given, 1)


def test_memory_is_checked_for_all_processes(monkeypatch):
    monkeypatch.setattr(runner, "free_memory", lambda: 15.0)
    recipe().check_needs(runner.Options(), 1)
    with pytest.raises(runner.MissingError, match=r"some needs 20 MiB of memory, but 15 MiB are available\."):
        recipe().check_needs(runner.Options(), 2)


def test_an_unknown_recipe_is_refused_with_the_known_ones(capsys):
    assert runner.main(["lecun1998"]) == 2
    assert "lecun1998 has no expected.toml; the recipes are burgers, distillation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0;1"], "seeds are integers that commas separate, such as 0,1,2; got '0;1'"),
        (["--workers", "0"], "argument --workers: invalid choice: 0"),
    ],
)
def test_arguments_are_checked(arguments, message, capsys):
    with pytest.raises(SystemExit):
        runner.main(["grokking", *arguments])
    assert message in capsys.readouterr().err


def test_a_run_records_its_figures(tmp_path):
    lines = [
        'title = "A"',
        'about = "seeds = 7"',
        'source = ""',
        "seeds = 1",
        "seconds = 9",
        "memory = 10",
        "",
        '[figures."error, %"]',
        "ours = 1.0",
        "spread = 0.0",
        "within = 5.0",
        "possible = [0, 100]",
        "quick = [0, 3]",
    ]
    (tmp_path / "expected.toml").write_text("\n".join(lines))
    (tmp_path / "train.py").write_text("def train(options, seed):\n    return {'error, %': 1.25 + seed / 3}\n")
    assert runner.main([str(tmp_path), "--seeds", "1,4", "--workers", "1", "--record"]) == 0
    expected = [*lines[:3], "seeds = 2", "seconds = 0", *lines[5:8], "ours = 2.083", "spread = 0.5", *lines[10:]]
    assert (tmp_path / "expected.toml").read_text().splitlines() == expected


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "recipes" / "run.py"), str(folder), "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_wrong_expected_figure_fails_the_run(tmp_path):
    folder = tmp_path / "constant"
    folder.mkdir()
    (folder / "train.py").write_text("def train(options, seed):\n    return {'figure': 2.0 + seed}\n")
    entries = 'title = ""\nabout = ""\nsource = ""\nseeds = 2\nseconds = 1\nmemory = 10\n'
    figure = '[figures."figure"]\nours = 2.5\nspread = 0.5\nwithin = 0.1\npossible = [0, inf]\nquick = [1.9, 2.1]\n'
    (folder / "expected.toml").write_text(entries + figure)
    result = run(folder)
    assert result.returncode == 0, result.stderr
    assert "| figure | - | 2 | 0 | - | 1.9 to 2.1 | as recorded |" in result.stdout
    (folder / "expected.toml").write_text(entries + figure.replace("[1.9, 2.1]", "[2.1, 3.0]"))
    result = run(folder)
    assert result.returncode == 1
    assert "NOT as recorded" in result.stdout
    (folder / "expected.toml").write_text(entries + figure.replace('"figure"', '"other"'))
    assert "returned ['figure'], but its expected.toml has other figures" in run(folder).stderr


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The options that name folders of made-up images."""
    arguments = []
    for name in runner.DATA_SETS:
        folder = tmp_path_factory.mktemp(name)
        write_digits(folder, 6000, 1000)
        arguments += [f"--{name}", str(folder)]
    return arguments


@pytest.mark.thorough
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_short_form_reaches_its_figures(folder, images):
    for text in runner.Recipe.load(folder).packages:
        wanted = Requirement(text)
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{wanted.name} is not installed")
        if not wanted.specifier.contains(version, prereleases=True):
            pytest.skip(f"{wanted.name} {version} is installed, not {text}")
    result = run(folder, *images)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_recipe_is_complete(folder):
    loaded = runner.Recipe.load(folder)
    assert loaded.title
    assert loaded.about.endswith(".")
    assert loaded.source
    assert min(loaded.seeds, loaded.seconds, loaded.memory) > 0
    assert set(loaded.data) <= set(runner.DATA_SETS)
    assert any(figure.quick for figure in loaded.figures)
    verdicts = [figure.verdict(figure.ours, figure.spread) for figure in loaded.figures]
    assert loaded.why or not any(verdict.startswith("no") for verdict in verdicts), "say why it is not reproduced"
    for figure in loaded.figures:
        assert 0 < figure.within < math.inf or figure.ours == 0, figure.name
        assert figure.spread <= figure.within, figure.name
        low, high = figure.possible
        assert low <= figure.ours <= high, figure.name
        assert all(low <= bound <= high for bound in figure.quick), figure.name
        assert runner.Published.read(figure.published) or not figure.published


def test_the_extras_have_every_package_that_a_recipe_needs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {Requirement(text).name for extra in ("recipes", "torch") for text in extras[extra]}
    needed = {Requirement(text).name for folder in FOLDERS for text in runner.Recipe.load(folder).packages}
    assert needed <= known
    assert {Requirement(text).name for text in extras["recipes"]} <= needed


def test_every_folder_is_a_recipe():
    folders = {path for path in (ROOT / "recipes").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(FOLDERS)


def test_the_page_is_up_to_date():
    assert recipes_page.PAGE.read_text() == recipes_page.page(), "run python tools/recipes_page.py"


def test_the_page_has_every_figure():
    text = recipes_page.PAGE.read_text()
    for folder in FOLDERS:
        assert f"\n## {folder.name}\n" in text
        for figure in runner.Recipe.load(folder).figures:
            verdict = figure.verdict(figure.ours, figure.spread) if figure.published else ""
            (line,) = [line for line in section_of_rows(text, folder.name) if f"| {figure.name} |" in line]
            assert f"| {verdict} |" in line
            assert f"[{figure.published}](" in line or not figure.published


def section_of_rows(text, recipe):
    """The rows of the table from the one that names a recipe to the next name."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| [{recipe}](#"))
    rest = lines[start + 1 :]
    return [lines[start], *itertools.takewhile(lambda line: not line.startswith("| ["), rest)]
