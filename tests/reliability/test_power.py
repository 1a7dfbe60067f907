"""Power failures: a file is flushed before it is renamed, and names before the command ends."""

from __future__ import annotations

import pytest

from reliability.killer import SCENARIOS, Victim, build_faults, find_compiler, undisturbed

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no compiler for the library that logs file operations")


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    library = build_faults(tmp_path_factory.mktemp("faults"))
    assert library is not None
    with Victim(library) as started:
        yield started


@pytest.mark.parametrize("name", SCENARIOS)
def test_files_are_on_the_disk_before_their_names(name, victim, tmp_path):
    found = undisturbed(SCENARIOS[name], tmp_path, victim)
    assert found.operations
    assert unsafe(found.operations) == []


def unsafe(operations: list[list[str]]) -> list[str]:
    """Return renames of unflushed files, and names that may not be on the disk when the command ends."""
    dirty: set[str] = set()
    names: dict[str, str] = {}
    problems = []
    for _, operation, path, other in operations:
        if operation in ("write", "truncate"):
            dirty.add(path)
        elif operation == "fsync":
            # A file's name may have changed since it was written; its folder's names are on the disk too.
            dirty.discard(path)
            names.pop(path, None)
        elif operation == "rename":
            if path in dirty:
                problems.append(f"{path} is renamed before it is on the disk")
                dirty.discard(path)
            names[other.rpartition("/")[0]] = other
    return problems + [f"the name {name} may not be on the disk" for name in names.values()]


def test_the_rule_finds_unsafe_renames():
    write, sync, rename, folder = (
        ["1", "write", "/f/a.tmp", ""],
        ["2", "fsync", "/f/a.tmp", ""],
        ["3", "rename", "/f/a.tmp", "/f/a"],
        ["4", "fsync", "/f", ""],
    )
    assert unsafe([write, sync, rename, folder]) == []
    assert unsafe([write, rename, folder]) == ["/f/a.tmp is renamed before it is on the disk"]
    assert unsafe([write, sync, rename]) == ["the name /f/a may not be on the disk"]
