"""Order of the parts of the package, and a check of the imports against it.

    python tools/layers.py

prints every import of a later part by an earlier one, and every import cycle between files.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "onnxtrain"


@dataclass(frozen=True)
class Import:
    """An import between two files of the package.

    Attributes:
        source: The file that imports, as a path below the package.
        target: The file that is imported.
        typed: True if only type checkers execute it.
    """

    source: str
    target: str
    typed: bool


ORDER = (
    "errors/",
    "__init__.py",
    "graph/",
    "operators/",
    "autodiff/",
    "model_file/",
    "lowering/",
    "runtime/",
    "parameters/",
    "distributed/",
    "data/",
    "editing/",
    "metrics/",
    "losses/",
    "adapters/",
    "training/report/",
    "training/schedules.py",
    "training/advice/hints.py",
    "training/advice/",
    "training/config.py",
    "training/objective.py",
    "training/features.py",
    "training/prepare.py",
    "training/description.py",
    "training/data_adapter.py",
    "training/callbacks/",
    "training/inference/",
    "training/checkpoints.py",
    "training/executors/",
    "training/state.py",
    "training/run_folder.py",
    "training/fit_options.py",
    "training/loop.py",
    "training/trained_values.py",
    "training/trained_model.py",
    "training/trainer.py",
    "training/__init__.py",
    "training/examples.py",
    "training/demo.py",
    "cli/",
    "__main__.py",
    "plugins/__init__.py",
    "plugins/step_graphs/",
    "plugins/doctor/",
    "plugins/provider_check/",
    "plugins/tuning/",
    "plugins/audio/",
    "plugins/tables/",
    "plugins/detection/",
    "plugins/images/",
    "plugins/more_losses/",
    "plugins/lbfgs/",
    "plugins/text/",
    "plugins/structures/",
    "plugins/sparse/",
    "plugins/privacy/",
    "plugins/pruning/",
    "interop/",
)
"""The parts from the lowest to the highest: folders with a slash at the end, and single files."""


def part(path: str, parts: Sequence[str]) -> str:
    """The part that a file belongs to: itself, or the innermost folder of the table."""
    found = [name for name in parts if path == name or (name.endswith("/") and path.startswith(name))]
    return max(found, key=len, default=path)


def imports(package: Path = PACKAGE) -> Iterator[Import]:
    """All imports between files of the package, those inside functions too."""
    for path in sorted(package.rglob("*.py")):
        source = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text())
        typed = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            for name in _names(node):
                target = _file(package, name)
                if target is not None and target != source:
                    yield Import(source, target, id(node) in typed)


def upward(parts: Sequence[str], found: list[Import]) -> list[Import]:
    """The imports that go up the list."""
    place = {name: index for index, name in enumerate(parts)}
    if lost := {part(file, parts) for i in found for file in (i.source, i.target)} - set(place):
        raise SystemExit(f"{', '.join(sorted(lost))}: not in ORDER of tools/layers.py.")
    return [i for i in found if place[part(i.target, parts)] > place[part(i.source, parts)]]


def cycles(found: list[Import], *, typed: bool = False) -> list[list[str]]:
    """Return groups of files that import one another at run time, with ``typed`` also for type checkers."""
    graph: dict[str, set[str]] = {}
    for item in found:
        if typed or not item.typed:
            graph.setdefault(item.source, set()).add(item.target)
    reach = {file: _reachable(graph, file) for file in graph}
    groups = {frozenset(other for other in reach[file] if file in reach.get(other, ())) for file in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        for target in graph.get(pending.pop(), ()):
            if target not in seen:
                seen.add(target)
                pending.append(target)
    return seen


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(node: ast.AST) -> list[str]:
    """The modules, and names that may be modules, that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _file(package: Path, name: str) -> str | None:
    """The file of the package that defines a module, or a name of a module."""
    parts = name.split(".")
    if parts[0] != package.name:
        return None
    for end in (len(parts), len(parts) - 1):
        base = package.joinpath(*parts[1:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if end > 1 and path.is_file():
                return path.relative_to(package).as_posix()
    return "__init__.py"


def main() -> int:
    """Print violations of the order; return 1 if there are any."""
    found = list(imports())
    wrong = [f"{i.source} imports {i.target}, which stands above it" for i in upward(ORDER, found)]
    wrong += ["an import cycle: " + ", ".join(group) for group in cycles(found)]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
