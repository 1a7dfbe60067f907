"""Write the pages on operators: their gradient rules with test results, and operators without a gradient.

    python tools/operators_page.py --jobs 2

runs the sweep of ``tests/autodiff/sweep`` and writes ``docs/operators.md``; with ``--conventions`` it only updates the
generated part of ``docs/conventions.md``, without the sweep.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from onnx import defs

from onnxtrain.autodiff import registry
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.rule_registry import NEWEST as NO_END

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "autodiff")]

from autodiff.sweep import tables as sweep_tables  # noqa: E402
from autodiff.sweep.outcome import Outcome  # noqa: E402
from autodiff.sweep.run import sweep_all  # noqa: E402
from autodiff.sweep.subjects import node_tests  # noqa: E402

BEGIN = "<!-- generated: python tools/operators_page.py --conventions -->"
END = "<!-- end of the generated part -->"

_HEAD = """# Operators and their gradients

Written by `python tools/operators_page.py`; do not edit.

The operators of ONNX's default domain up to opset {newest}, and those of other domains with a rule or a body in
standard operators. Models below opset 18 are upgraded to it first.

Each node test of ONNX's backend suite with a floating-point input and output is a gradient check: at its own opset
with static shapes, with known ranks, with unknown shapes and with its integer inputs as constants; then at the
opsets {opsets}, if it can be converted. The forward results must not change, the gradient along random
directions must equal central differences in float64 by ONNX's reference evaluator, and ONNX Runtime must agree in
float32 if it has the operator. [Tables of the test](../tests/autodiff/sweep/tables.py) list the exceptions with their
reasons.

- **worst error**: the largest one relative to the gradient's norm (or to one, if that is larger); in float32
  if marked with an asterisk. Empty if none of ONNX's tests can be used: then only tests of this project check the
  gradient.
- **PyTorch**: the largest difference from PyTorch's gradient in float64, relative to the largest value, if PyTorch
  has the operator.
- **notes**: "body" if the gradient is that of the function by which ONNX defines the operator, else it is a rule, with
  its versions if limited; what the gradient needs: a known rank (by shape inference), constants (computed axes are
  refused); "once" if these tests do not check the gradient of the gradient.

{summary}

"""


def standard_operators() -> list[str]:
    """The operators of the default domain at the newest opset, and those that it still accepts."""
    names = {schema.name for schema in defs.get_all_schemas_with_history() if not schema.domain}
    return sorted(name for name in names if _schema(name) is not None)


def _schema(name: str) -> defs.OpSchema | None:
    try:
        schema = defs.get_schema(name, sweep_tables.NEWEST)
    except defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def differentiated_by(operator: str) -> str:
    """Say "rule", "body" or "missing" for a standard operator; "" for one that passes no gradient on."""
    entries = [entry for entry in registry.entries() if (entry.domain, entry.operator) == ("", operator)]
    if entries:
        parts = [_range(entry) for entry in entries if entry.function is not None]
        return "rule" + "; ".join(part for part in parts if part) if parts else ""
    schema = _schema(operator)
    assert schema is not None
    return "body" if schema.has_function or schema.has_context_dependent_function else "missing"


def _range(entry: registry.Entry) -> str:
    if entry.until != NO_END:
        return f" ({entry.since} to {entry.until})"
    return f" (from {entry.since})" if entry.since > 18 else ""


def operators_document(outcomes: Sequence[Outcome]) -> str:
    """The whole of ``docs/operators.md``."""
    names = standard_operators()
    ways = {name: differentiated_by(name) for name in names}
    lines = []
    for name in (name for name in names if ways[name]):
        found = [outcome for outcome in outcomes if outcome.operator == name]
        lines.append(_row([f"`{name}`", *_figures(name, ways[name], found)]))
    titles = ["operator", "worst error", "PyTorch", "notes"]
    text = _HEAD.format(
        newest=sweep_tables.NEWEST, opsets=", ".join(map(str, sweep_tables.OPSETS)), summary=_summary(outcomes, ways)
    )
    text += "## Differentiable\n\n" + _table(titles, lines)
    text += "\n## Of other domains\n\n" + _table(["domain", "by", "operators"], _other_domains())
    text += "\n## Without a gradient\n\n" + no_gradient_table()
    return text + "\nFloating-point inputs and outputs without a gradient:\n\n" + _silent_values()


def _figures(operator: str, way: str, outcomes: Sequence[Outcome]) -> list[str]:
    measured = [outcome for outcome in outcomes if not math.isnan(outcome.worst)]
    first = [outcome for outcome in measured if outcome.variant not in ("second order", "PyTorch")]
    single = operator in sweep_tables.SINGLE or any(
        sweep_tables.matching(sweep_tables.BY_RUNTIME, outcome.test) for outcome in first
    )
    worst = f"{max(outcome.worst for outcome in first):.0e}{'*' if single else ''}" if first else ""
    beside = [outcome.worst for outcome in measured if outcome.variant == "PyTorch"]
    difference = f"{max(beside):.0e}{'*' if single else ''}" if beside else ""
    needs = sorted({outcome.excuse for outcome in outcomes if outcome.excuse})
    failures = sum(bool(outcome.failure) for outcome in outcomes)
    twice = any(outcome.variant == "second order" and not outcome.failure for outcome in outcomes)
    if failures:
        worst += f", {failures} fail"
    notes = [*([] if way == "rule" else [way]), *(f"needs {need}" for need in needs), *([] if twice else ["once"])]
    return [worst, difference, ", ".join(notes)]


def _summary(outcomes: Sequence[Outcome], ways: dict[str, str]) -> str:
    by = Counter("none" if not way else way.split(" ")[0] for way in ways.values())
    tests = len({outcome.test for outcome in outcomes})
    text = (
        f"{len(ways)} operators: {by['rule']} with a rule, {by['body']} through their body, {by['none']} without a "
        f"gradient; {len(outcomes)} checks of {tests} of ONNX's tests."
    )
    if by["missing"]:
        missing = ", ".join(f"`{name}`" for name, way in ways.items() if way == "missing")
        text += f"\n\nA rule is missing for {missing}."
    return text


def _other_domains() -> list[str]:
    listed = {(e.domain, e.operator) for e in registry.entries() if e.function is None}
    bodies = [
        key for key in registry.registered_bodies() if key[0] != ONNXTRAIN_DOMAIN and key not in listed
    ]  # operators of onnxtrain have a separate page
    ways = dict.fromkeys(bodies, "body")
    rules = [entry for entry in registry.entries() if entry.function is not None]
    ways |= {(e.domain, e.operator): "rule" for e in rules if e.domain not in ("", ONNXTRAIN_DOMAIN)}
    grouped: dict[tuple[str, str], list[str]] = {}
    for (domain, name), way in ways.items():
        grouped.setdefault((domain, way), []).append(f"`{name}`")
    return [
        _row([f"`{domain or 'ai.onnx'}`", way, ", ".join(sorted(names, key=str.lower))])
        for (domain, way), names in sorted(grouped.items())
    ]


def no_gradient_table() -> str:
    """Format the operators without a gradient by reason."""
    reasons: dict[str, list[str]] = {}
    for entry in registry.entries():
        if entry.function is None:
            name = entry.operator if not entry.domain else f"{entry.domain}::{entry.operator}"
            reasons.setdefault(entry.reason, []).append(f"`{name}`")
    lines = [_row([", ".join(sorted(names)), reason]) for reason, names in sorted(reasons.items(), key=lambda i: i[1])]
    return _table(["operators", "why"], lines)


def with_generated_part(text: str) -> str:
    """Return ``docs/conventions.md`` with the generated part rebuilt from the registry."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{no_gradient_table()}\n{END}{after}"


def _silent_values() -> str:
    pairs = (*sweep_tables.CONFIGURATION.items(), *sweep_tables.SILENT.items())
    return _table(["operator", "value", "why"], [_row([f"`{o}`", v, why]) for (o, v), why in pairs])


def _table(titles: Sequence[str], lines: Iterable[str]) -> str:
    return "\n".join([_row(titles), _row(["---"] * len(titles)), *lines]) + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages; 1 where a check of the sweep fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes; default 1")
    parser.add_argument("--conventions", action="store_true", help="only docs/conventions.md")
    options = parser.parse_args(arguments)
    conventions = DOCS / "conventions.md"
    conventions.write_text(with_generated_part(conventions.read_text(encoding="utf-8")), encoding="utf-8")
    if options.conventions:
        return 0
    outcomes = sweep_all(sorted({test.operator for test in node_tests()}), options.jobs)
    (DOCS / "operators.md").write_text(operators_document(outcomes), encoding="utf-8")
    return 1 if any(outcome.failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
