"""Versions, the changelog, and the oldest packages that pyproject.toml allows.

    python tools/release.py check              # check version and changelog against the rules
    python tools/release.py check --tag v0.2.0 # also check that this tag may be published
    python tools/release.py write              # date the entries under [Unreleased] as the version of the package
    python tools/release.py oldest             # print the oldest allowed packages as pip constraints

The rules: if [Unreleased] is empty, the newest dated heading of CHANGELOG.md is the version of
``src/onnxtrain/__init__.py``; otherwise that version is later. Headings are in descending order of version and date,
and their parts are the ones of Keep a Changelog, in its order.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
UNRELEASED = "## [Unreleased]"


@dataclass(frozen=True)
class Release:
    """A heading of the changelog with its text; ``version`` and ``date`` are empty for [Unreleased]."""

    version: str
    date: str
    text: str

    @property
    def parts(self) -> list[str]:
        """The headings below it."""
        return re.findall(r"^### (.*)$", self.text, re.MULTILINE)

    @property
    def entries(self) -> list[str]:
        """The first lines of its entries."""
        return re.findall(r"^- (.*)$", self.text, re.MULTILINE)


def number(version: str) -> tuple[int, ...]:
    """``"0.2.0"`` as (0, 2, 0)."""
    return tuple(int(part) for part in version.split("."))


def releases(changelog: str) -> list[Release]:
    """The headings of the changelog, the newest first."""
    found = []
    for block in re.split(r"^(?=## )", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = block.partition("\n")
        dated = re.fullmatch(r"## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})", heading)
        if dated is None and heading != UNRELEASED:
            raise ValueError(
                f"The heading {heading!r} of the changelog is neither {UNRELEASED!r} nor '## [1.2.3] - 2026-01-31'."
            )
        found.append(Release(*dated.groups(), text) if dated else Release("", "", text))
    return found


def problems(version: str, web_version: str, changelog: str, tag: str = "") -> list[str]:
    """Return the violations of the rules, one sentence each."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"The version {version!r} is not of the form 1.2.3."]
    try:
        first, *dated = releases(changelog)
    except ValueError as error:
        return [str(error)]
    found = []
    if first.version:
        found.append(f"The changelog begins with {first.version}, not with [Unreleased].")
    if web_version != version:
        found.append(f"web/package.json has the version {web_version}, and src/onnxtrain/__init__.py {version}.")
    for release in [first, *dated]:
        name = release.version or "Unreleased"
        if release.parts != [part for part in PARTS if part in release.parts]:
            found.append(
                f"[{name}] has the parts {', '.join(release.parts)}: they must be of {', '.join(PARTS)}, in this order."
            )
    for newer, older in itertools.pairwise(dated):
        if number(newer.version) <= number(older.version) or newer.date < older.date:
            found.append(f"{newer.version} of {newer.date} stands above {older.version} of {older.date}.")
    newest = dated[0].version if dated else "0.0.0"
    if first.entries and number(version) <= number(newest):
        found.append(f"There are changes since {newest}, and the version is still {version}: raise it.")
    if not first.entries and version != newest:
        found.append(
            f"The version is {version}, and the newest heading {newest}: write what changed under [Unreleased]."
        )
    if tag and (tag != f"v{version}" or first.entries):
        found.append(f"The tag {tag} may not be published: {version} has {len(first.entries)} entries unreleased.")
    return found


def dated(changelog: str, version: str, date: str) -> str:
    """Return the changelog with the entries of [Unreleased] under a dated heading."""
    return changelog.replace(UNRELEASED, f"{UNRELEASED}\n\n## [{version}] - {date}", 1)


def oldest(project: str) -> list[str]:
    """The lower bounds of the dependencies in pyproject.toml, as ``name==version``."""
    bounds = []
    known = tomllib.loads(project)["project"]
    for requirement in known["dependencies"] + known.get("optional-dependencies", {}).get("cpu", []):
        bound = re.fullmatch(r"([\w-]+)>=(\d+(?:\.\d+)*)", requirement)
        if bound is None:
            raise ValueError(f"The dependency {requirement!r} is not of the form name>=1.2.")
        bounds.append(f"{bound[1]}=={bound[2] if '.' in bound[2] else bound[2] + '.0'}.*")
    return bounds


def versions() -> tuple[str, str]:
    """The versions of the package and of web/."""
    patterns = {"src/onnxtrain/__init__.py": r'__version__ = "(.*)"', "web/package.json": r'^  "version": "(.*)"'}
    package, web = (re.search(pattern, (ROOT / path).read_text(), re.MULTILINE) for path, pattern in patterns.items())
    assert package
    assert web
    return package[1], web[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "write", "oldest"))
    parser.add_argument("--tag", default="", help="a tag that is about to be published")
    options = parser.parse_args(arguments)
    path = ROOT / "CHANGELOG.md"
    if options.what == "oldest":
        print("\n".join(oldest((ROOT / "pyproject.toml").read_text())))
        return 0
    version, web = versions()
    if options.what == "write":
        today = datetime.date.today().isoformat()
        path.write_text(dated(path.read_text(), version, today))
    found = problems(version, web, path.read_text(), options.tag)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
