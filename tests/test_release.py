"""Releases: versions, the changelog, library names, wheels, and an installation without a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import onnxtrain
import release
from onnxtrain.runtime.native import library_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

CHANGELOG = """# Changelog

## [Unreleased]

{unreleased}## [0.2.0] - 2026-03-01

### Added

- This.

### Fixed

- That.

## [0.1.0] - 2026-01-31

### Added

- All.
"""
ENTRY = "### Added\n\n- More.\n\n"
RELEASED, AHEAD = CHANGELOG.format(unreleased=""), CHANGELOG.format(unreleased=ENTRY)


def test_version_and_changelog_of_this_repository():
    version, web = release.versions()
    assert version == onnxtrain.__version__
    assert release.problems(version, web, (ROOT / "CHANGELOG.md").read_text()) == []
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(("version", "changelog"), [("0.2.0", RELEASED), ("0.2.1", AHEAD), ("1.0.0", AHEAD)])
def test_the_rules_kept(version, changelog):
    assert release.problems(version, version, changelog) == []


@pytest.mark.parametrize(
    ("version", "changelog", "sentence"),
    [
        ("0.2", RELEASED, "The version '0.2' is not of the form 1.2.3."),
        ("0.2.0", AHEAD, "There are changes since 0.2.0, and the version is still 0.2.0: raise it."),
        ("0.10.0", RELEASED, "The version is 0.10.0, and the newest heading 0.2.0: write what changed"),
        ("0.2.0", RELEASED.replace("## [Unreleased]\n\n", ""), "The changelog begins with 0.2.0, not with"),
        ("0.2.0", RELEASED.replace("[0.1.0]", "[0.3.0]"), "0.2.0 of 2026-03-01 stands above 0.3.0 of 2026-01-31."),
        ("0.2.0", RELEASED.replace("03-01", "01-01"), "0.2.0 of 2026-01-01 stands above 0.1.0 of 2026-01-31."),
        ("0.2.0", RELEASED.replace("### Fixed", "### Better"), "[0.2.0] has the parts Added, Better: they must be of"),
        ("0.2.0", RELEASED.replace("## [0.1.0] - 2026", "## 0.1.0 - 2026"), "The heading '## 0.1.0 - 2026-01-31' of"),
    ],
)  # fmt: skip
def test_the_rules_broken(version, changelog, sentence):
    (found,) = release.problems(version, version, changelog)
    assert found.startswith(sentence)


def test_tags_and_the_package_for_browsers():
    assert release.problems("0.2.0", "0.2.0", RELEASED, tag="v0.2.0") == []
    assert "The tag v0.2.1 may not be published" in release.problems("0.2.0", "0.2.0", RELEASED, tag="v0.2.1")[0]
    assert "0.3.0 has 1 entries unreleased" in release.problems("0.3.0", "0.3.0", AHEAD, tag="v0.3.0")[0]
    assert "web/package.json has the version 0.1.0" in release.problems("0.2.0", "0.1.0", RELEASED)[0]


def test_a_release_is_dated():
    changelog = release.dated(AHEAD, "0.3.0", "2026-04-01")
    newest, *others = release.releases(changelog)
    assert (newest.version, newest.entries) == ("", [])
    assert (others[0].version, others[0].date) == ("0.3.0", "2026-04-01")
    assert others[0].entries == ["More."]
    assert release.problems("0.3.0", "0.3.0", changelog, tag="v0.3.0") == []


def test_the_oldest_packages_are_the_lower_bounds():
    bounds = release.oldest('[project]\ndependencies = ["numpy>=2.0", "onnx-ir>=1.0.3", "cyclopts>=5"]')
    assert bounds == ["numpy==2.0.*", "onnx-ir==1.0.3.*", "cyclopts==5.0.*"]
    with pytest.raises(ValueError, match="The dependency 'numpy' is not of the form"):
        release.oldest('[project]\ndependencies = ["numpy"]')
    found = release.oldest((ROOT / "pyproject.toml").read_text())
    assert len(found) == len(PROJECT["project"]["dependencies"]) + 1  # and ONNX Runtime


def test_python_versions_are_the_same_everywhere():
    """Classifiers, the lowest version for tools, and what the wheels are tested with."""
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert PROJECT["tool"]["mypy"]["python_version"] == versions[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + versions[0].replace(".", "")
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow.split("python: [")[1].split("]")[0]) == versions


def test_the_library_has_the_same_names_in_python_and_in_the_build():
    build = (ROOT / "CMakeLists.txt").read_text()
    names = dict(zip(("linux", "darwin", "win32"), re.findall(r"set\(suffix (\.\w+)\)", build), strict=True))
    assert {platform: Path(library_name(platform)).suffix for platform in names} == names
    assert "PREFIX lib SUFFIX ${suffix}" in build


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_a_source_distribution_installs_without_a_compiler(tmp_path):
    """Only what git knows, with every compiler hidden: all is there but the kernels, and one warning says so."""
    pytest.importorskip("pip")
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout knows its files")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    archive = tmp_path / "onnxtrain.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in filter(None, files):
            tar.add(ROOT / name, f"onnxtrain/{name}")
    nothing = tmp_path / "bin"
    nothing.mkdir()
    hidden = {"PATH": str(nothing), "CC": str(nothing / "cc"), "CXX": str(nothing / "c++")}
    build = [
        "-m",
        "pip",
        "wheel",
        "--verbose",
        "--no-deps",
        "--no-cache-dir",
        "--wheel-dir",
        str(tmp_path),
        str(archive),
    ]

    built = python(*build, **hidden)
    if "No matching distribution" in built.stdout + built.stderr:
        pytest.skip("the build's own packages cannot be had here")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "onnxtrain is built without its native kernels" in built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    tried = python(str(ROOT / "tools" / "try_wheel.py"), "--bodies", PYTHONPATH=str(tmp_path / "installed"))
    assert "standard operators train" in tried.stdout, tried.stderr

    refused = python(*build, **hidden, ONNXTRAIN_REQUIRE_KERNELS="1")
    assert refused.returncode != 0
