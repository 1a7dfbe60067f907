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

from autodiff.case import all_rows  # noqa: E402
from autodiff.sweep import tables as sweep_tables  # noqa: E402
from autodiff.sweep.outcome import Outcome  # noqa: E402
from autodiff.sweep.run import sweep_all  # noqa: E402
from autodiff.sweep.subjects import node_tests, refusal  # noqa: E402

BEGIN = "<!-- generated: python tools/operators_page.py --conventions -->"
END = "<!-- end of the generated part -->"

_HEAD = """# Operators and their gradients

Written by `python tools/operators_page.py`; do not edit.

The operators of ONNX's default domain up to opset {newest}, and the operators of other domains that have a rule or a
body in standard operators.
Each node test of ONNX's backend suite with a floating-point input and output is a gradient check: at its own opset
with static shapes, with known ranks, with unknown shapes and with its integer inputs as constants; then at the
opsets {opsets}, if it can be converted. The forward results must not change, the gradient along random
directions must equal central differences in float64 by ONNX's reference evaluator, and ONNX Runtime must agree in
float32 if it has the operator.

- **versions**: the opsets at which the operator changed. Models below opset 18 are upgraded to it first.
- **by**: a rule (with its versions if limited), or the body: the function by which ONNX defines it.
- **tests**: the number of ONNX's tests that are used. **rows**: the number of test cases of this project.
- **checks** and **opsets**: the number of comparisons, and their opsets.
- **worst error**: the largest one relative to the gradient's norm (or to one, if that is larger); in float32
  if marked with an asterisk.
- **PyTorch**: the largest difference from PyTorch's gradient in float64, relative to the largest value, if PyTorch
  has the operator.
- **needs**: requirements of the gradient: a known rank (by shape inference), constants (computed axes are refused).
- **twice**: whether the gradient of the gradient is also checked.

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
    tests = Counter(test.operator for test in node_tests())
    used = Counter(test.operator for test in node_tests() if refusal(test) is None)
    rows = Counter(operator for case in all_rows() for operator in case.operators)
    lines = []
    for name in (name for name in names if ways[name]):
        found = [outcome for outcome in outcomes if outcome.operator == name]
        counts = f"{used[name]} of {tests[name]}" if tests[name] else "none"
        cells = [f"`{name}`", versions(name), ways[name], counts, str(rows["", name]), *_figures(name, found)]
        lines.append(_row(cells))
    titles = ["operator", "versions", "by", "tests", "rows"]
    titles += ["checks", "opsets", "worst error", "PyTorch", "needs", "twice"]
    text = _HEAD.format(
        newest=sweep_tables.NEWEST, opsets=", ".join(map(str, sweep_tables.OPSETS)), summary=_summary(outcomes, ways)
    )
    text += "## Differentiable\n\n" + _table(titles, lines)
    text += "\n## Of other domains\n\n" + _table(["operator", "domain", "by", "rows"], _other_domains(rows))
    text += "\n## Without a gradient\n\n" + no_gradient_table()
    return text + "\n## Exceptions of the sweep\n\n" + _exceptions()


def versions(operator: str) -> str:
    """The opsets at which a standard operator changed."""
    history = {s.since_version for s in defs.get_all_schemas_with_history() if not s.domain and s.name == operator}
    return ", ".join(str(version) for version in sorted(history) if version <= sweep_tables.NEWEST)


def _figures(operator: str, outcomes: Sequence[Outcome]) -> list[str]:
    measured = [outcome for outcome in outcomes if not math.isnan(outcome.worst)]
    first = [outcome for outcome in measured if outcome.variant not in ("second order", "PyTorch")]
    opsets = sorted({outcome.opset for outcome in first})
    single = operator in sweep_tables.SINGLE or any(
        sweep_tables.matching(sweep_tables.BY_RUNTIME, outcome.test) for outcome in first
    )
    worst = f"{max(outcome.worst for outcome in first):.0e}{'*' if single else ''}" if first else ""
    beside = [outcome.worst for outcome in measured if outcome.variant == "PyTorch"]
    difference = f"{max(beside):.0e}{'*' if single else ''}" if beside else ""
    needs = ", ".join(sorted({outcome.excuse for outcome in outcomes if outcome.excuse}))
    failures = sum(bool(outcome.failure) for outcome in outcomes)
    twice = any(outcome.variant == "second order" and not outcome.failure for outcome in outcomes)
    checks = f"{len(first)}" + (f", {failures} fail" if failures else "")
    places = ", ".join(map(str, opsets))
    return [checks if outcomes else "", places, worst, difference, needs, "yes" if twice else ""]


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


def _other_domains(rows: Counter[tuple[str, str]]) -> list[str]:
    from test_quantized import COVERED  # these import ONNX Runtime

    from autodiff.microsoft_rows import ROWS

    counts = rows + Counter((row.values[3], row.values[0]) for row in ROWS) + Counter(COVERED)
    listed = {(e.domain, e.operator) for e in registry.entries() if e.function is None}
    bodies = [
        key for key in registry.registered_bodies() if key[0] != ONNXTRAIN_DOMAIN and key not in listed
    ]  # operators of onnxtrain have a separate page
    ways = dict.fromkeys(bodies, "body")
    rules = [entry for entry in registry.entries() if entry.function is not None]
    ways |= {(e.domain, e.operator): "rule" for e in rules if e.domain not in ("", ONNXTRAIN_DOMAIN)}
    found = sorted(ways.items(), key=lambda item: (item[0][1].lower(), item[0][0]))
    return [
        _row([f"`{name}`", f"`{domain or 'ai.onnx'}`", way, str(counts[domain, name])]) for (domain, name), way in found
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


def _exceptions() -> str:
    refused = Counter(why for test in node_tests() if (why := refusal(test)) is not None)
    text = "Tests that are not gradient checks:\n\n"
    text += _table(["tests", "why"], [_row([str(count), why]) for why, count in refused.most_common()])
    text += "\nTests that are excluded by name:\n\n" + _patterns(sweep_tables.SKIPPED.items())
    text += "\nInputs that are moved away from discontinuities of the derivative, or replaced:\n\n"
    moves = [(pattern, move.reason) for pattern, move in sweep_tables.MOVED.items()]
    text += _patterns([*moves, *sweep_tables.REPLACED.items()])
    text += "\nFloating-point inputs and outputs without a gradient:\n\n"
    pairs = (*sweep_tables.CONFIGURATION.items(), *sweep_tables.SILENT.items())
    text += _table(["operator", "value", "why"], [_row([f"`{o}`", v, why]) for (o, v), why in pairs])
    text += "\nChecks without float64 by ONNX's reference evaluator, or without a comparison with ONNX Runtime:\n\n"
    missing = [(f"{o} at opset {v}", why) for (o, v), why in sweep_tables.WITHOUT_EVALUATOR.items()]
    tables = (sweep_tables.SINGLE, sweep_tables.BY_RUNTIME, sweep_tables.NOT_BY_RUNTIME)
    return text + _patterns([*(item for table in tables for item in table.items()), *missing])


def _patterns(items: Iterable[tuple[str, str]]) -> str:
    return _table(["name", "why"], [_row([f"`{name.replace('|', chr(92) + '|')}`", why]) for name, why in items])


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
