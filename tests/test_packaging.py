"""The conda recipe, the Dockerfile and the workflows say the same as pyproject.toml, and name files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import onnxtrain

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_conda_recipe_has_the_version_and_the_dependencies() -> None:
    assert f'version: "{onnxtrain.__version__}"' in RECIPE
    run = RECIPE.split("  run:\n")[1].split("\n\n")[0]
    found = {line.strip(" -").replace(" ", "") for line in run.splitlines()}
    assert found == {
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["cpu"],
        f"python{PROJECT['requires-python']}",
    }
    (point,) = PROJECT["scripts"].items()
    assert f"- {point[0]} = {point[1]}" in RECIPE


def test_the_dockerfile_copies_what_exists_and_installs_extras_that_exist() -> None:
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line
    ]
    names = {name for line in copied for name in line}
    assert all((ROOT / name).exists() for name in names)
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert names == shown
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_build_in_the_image_has_all_that_it_reads() -> None:
    """CMakeLists.txt and pyproject.toml name no folder that .dockerignore hides."""
    build = (ROOT / "CMakeLists.txt").read_text()
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    read = {name for name in folders if re.search(rf"\b{name}/", build)} - {"build"}
    assert read <= {"src", "native", "include"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_valid_and_run_what_exists(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= jobs.keys(), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), name
            for script in re.findall(r"python (tools/\w+\.py)", step.get("run", "")):
                assert (ROOT / script).is_file()
    assert workflow["permissions"]["contents"] == ("write" if path.stem == "docs" else "read")


def test_a_release_has_provenance_a_bill_of_materials_and_the_suite() -> None:
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    for part in (
        "attest-build-provenance",
        "attest-sbom",
        "cyclonedx-py environment",
        "conformance.write",
        "gh release create",
    ):
        assert part in text
    page = (ROOT / "docs" / "releases.md").read_text()
    for part in (
        "`conformance.zip`",
        "`sbom.cdx.json`",
        "provenance",
        "`Dockerfile`",
        "`packaging/conda/recipe.yaml`",
        "mike",
    ):
        assert part in page, part


def test_no_build_of_onnxruntime_is_a_dependency() -> None:
    """They replace each other's files, so that a second one would be installed over the user's."""
    assert not [name for name in PROJECT["dependencies"] if name.startswith("onnxruntime")]
    extras = PROJECT["optional-dependencies"]
    builds = [extras[name][0].partition(">")[0] for name in ("cpu", "gpu", "openvino")]
    assert builds == ["onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"]


def test_pages_with_commands_of_pip_say_how_to_install_before_a_release() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        commands = re.findall(r"pip install '?onnxtrain\[([a-z,]+)\]", text)
        assert all(set(extras.split(",")) <= PROJECT["optional-dependencies"].keys() for extras in commands), page
        if commands and page.name != "names.md":
            assert "Before its release on PyPI, install onnxtrain from" in text.partition("onnxtrain[")[0], page
