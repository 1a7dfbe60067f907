"""Budget of each part of the package in lines; ``.ci/run`` fails above one.

    python tools/budgets.py

prints the parts that are above their budget. What enters a part names what leaves it. To raise a budget, write a line
into the changelog with the reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onnxtrain"

BUDGETS = {
    "adapters": 4_078,
    "autodiff": 9_154,
    "cli": 3_762,
    "data": 6_109,
    "distributed": 837,
    "editing": 4_210,
    "errors": 788,
    "graph": 5_701,
    "interop": 2_198,
    "losses": 3_806,
    "lowering": 7_987,
    "metrics": 1_538,
    "model_file": 5_524,
    "operators": 2_612,
    "parameters": 3_189,
    "plugins": 18_200,
    "runtime": 2_970,
    "training": 12_078,
}
"""Lines of Python by folder of the package."""


def lines(folder: Path) -> int:
    """Lines of all modules in a folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.py"))


def above(budgets: dict[str, int] = BUDGETS, package: Path = PACKAGE) -> list[str]:
    """A sentence for each folder that is above its budget or has none."""
    folders = sorted(path.name for path in package.iterdir() if any(path.rglob("*.py")))
    return [
        f"{name}/ has {lines(package / name):,} lines; its budget is {budgets.get(name, 0):,}."
        for name in folders
        if lines(package / name) > budgets.get(name, 0)
    ]


if __name__ == "__main__":
    found = above()
    print("\n".join(found) or "Every part is within its budget.")
    sys.exit(bool(found))
