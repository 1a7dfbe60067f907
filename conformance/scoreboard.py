"""Write the tables of ``docs/conformance.md`` from the files of ``results/``, which ``run.py --out`` writes.

python -m conformance.scoreboard
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN = "<!-- generated: python -m conformance.scoreboard -->"
END = "<!-- end of the generated part -->"

WORDS = {
    "gradient": "gradients",
    "second_order": "gradients of gradients",
    "loss": "losses with their gradients",
    "optimizer": "optimizers, ten steps",
    "step_graph": "step graphs, ten steps",
    "training_info": "TrainingInfoProto, ten steps",
}


def results() -> list[dict[str, Any]]:
    """All results, those that pass most first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda one: (-sum(c.get("passed", 0) for c in one["counts"].values()), one["runtime"]))


def tables(found: list[dict[str, Any]]) -> str:
    """Passed cases by kind and runtime, then what failed, by runtime and operator."""
    keys = list(dict.fromkeys(key for one in found for key in one["counts"]))
    totals = {key: max(sum(one["counts"].get(key, {}).values()) for one in found) for key in keys}
    lines = []
    for key in keys:
        kind, form = key.split(", ")
        cells = [str(one["counts"][key].get("passed", 0)) if key in one["counts"] else "not run" for one in found]
        lines.append(f"| {WORDS[kind]} | {form} | {totals[key]} | " + " | ".join(cells) + " |")
    titles = [f"{one['runtime']} {one['version']}" for one in found]
    head = "| cases | form | number | " + " | ".join(titles) + " |\n" + "| --- " * (3 + len(found)) + "|\n"
    machines = sorted({one["machine"] for one in found})
    return f"{head}" + "\n".join(lines) + f"\n\nRun on {' and '.join(machines)}.\n\n" + _sections(found)


def _sections(found: list[dict[str, Any]]) -> str:
    """The failures under the runtimes that share them."""
    runtimes: dict[str, list[str]] = {}
    for one in found:
        runtimes.setdefault(failures(one), []).append(f"{one['runtime']} {one['version']}")
    return "\n".join(f"### {', '.join(names)}\n\n{text}" for text, names in runtimes.items())


def failures(one: dict[str, Any]) -> str:
    """Cases that a runtime failed, by verdict and operator, apart from training operators that it lacks altogether."""
    verdicts: dict[str, Counter[str]] = {}
    for case, text in one["failed"].items():
        key, name = case.split("/")
        kind, form = key.split(", ")
        verdict = text.split(" ")[0]
        if form == "as written" and set(one["counts"][key]) == {"refused"}:
            continue  # it does not claim to have these operators
        whole = set(one["counts"][key]) == {"refused"}
        operator = name.removeprefix("test_").split("_")[0] if kind in ("gradient", "second_order") else WORDS[kind]
        verdicts.setdefault(verdict, Counter())[operator] += one["counts"][key]["refused"] if whole else 1
    if not verdicts:
        return "No case failed of the forms that it has operators for.\n"
    text = ""
    for verdict, operators in sorted(verdicts.items()):
        names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(operators.items()))
        text += f"- {sum(operators.values())} {verdict}: {names}.\n"
    return text


def page(text: str, found: list[dict[str, Any]]) -> str:
    """The page with the generated part written again."""
    generated = f"{BEGIN}\n\n{tables(found)}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: generated, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results()), encoding="utf-8")
