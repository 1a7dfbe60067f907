"""Everyday tasks in onnxtrain and in other tools: lines of code, and whether the results agree.

Every folder of `tasks/` has a script of ours and one of a peer's. Both read the same data and print what they measured,
a name and a number on a line. The peers run with the Python of an environment of their own, so that what they need does
not mix with ours:

    python -m venv peers
    peers/bin/pip install keras torch transformers accelerate lightning scikit-learn pandas
    python benchmarks/compare_tasks.py --peers peers/bin/python
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"

PEERS = {"keras": "Keras", "lightning": "Lightning", "sklearn": "scikit-learn", "transformers": "Hugging Face"}
"""Peers by the suffix of their scripts, ``with_NAME.py``."""

TOLERANCE = {"loss": 0.12, "best": 0.12, "perplexity": 0.3}
"""Allowed difference of two results; both train from random weights on shuffled examples."""

_TOLERANCE = 0.06


def line_count(path: Path) -> int:
    """Count the lines of a script without blank lines, comments and the docstring."""
    text = path.read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    lines = text.splitlines()[first.end_lineno :]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def results(script: Path, python: str) -> dict[str, float]:
    """Return the results that a script prints, by name.

    Raises:
        RuntimeError: The script fails; the message ends with its output.
    """
    environment = os.environ | {"KERAS_BACKEND": "torch", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [python, str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if found.returncode:
        raise RuntimeError(f"{script} failed: {found.stderr.strip()[-2000:]}")
    pairs = [line.split() for line in found.stdout.splitlines() if len(line.split()) == 2]
    return {name: float(value) for name, value in pairs if _is_number(value)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def agree(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    """Return whether all results are close."""
    return ours.keys() == theirs.keys() and all(
        abs(value - theirs[name]) <= TOLERANCE.get(name, _TOLERANCE) for name, value in ours.items()
    )


def shown(values: dict[str, float]) -> str:
    """Format results as a table cell."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def main() -> int:
    """Run the chosen tasks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="folders of tasks/; by default all")
    parser.add_argument("--peers", help="the Python of the peers' environment; without it they are counted only")
    parser.add_argument("--output", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    rows = ["| task | lines | peer | its lines | result | peer's result |", "|---|---|---|---|---|---|"]
    wrong = []
    for folder in sorted(path for path in TASKS.iterdir() if (path / "ours.py").is_file()):
        if arguments.tasks and folder.name not in arguments.tasks:
            continue
        (peer,) = folder.glob("with_*.py")
        ours = results(folder / "ours.py", sys.executable)
        theirs = results(peer, arguments.peers) if arguments.peers else {}
        if theirs and not agree(ours, theirs):
            wrong.append(folder.name)
        name = PEERS[peer.stem.removeprefix("with_")]
        counts = line_count(folder / "ours.py"), line_count(peer)
        title = folder.name.replace("_", " ")
        rows.append(f"| {title} | {counts[0]} | {name} | {counts[1]} | {shown(ours)} | {shown(theirs) or 'not run'} |")
        print(rows[-1], flush=True)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(rows) + "\n", encoding="utf-8")
    if wrong:
        print(f"The results differ in {', '.join(wrong)}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
