"""Try to break onnxtrain with hostile files and command lines, and count the outcomes.

    python tests/reliability/run.py --subject models --count 10000 --seed 0
    python tests/reliability/run.py --hours 2 --workers 2 --failures failures
    python tests/reliability/run.py --campaign --workers 2 --failures failures

Prints a table of counts, also where it is stopped (Ctrl-C), then the failures by cause. A case can be repeated by its
number: `--first 4711 --count 1 --failures folder` keeps its files. `--table docs/reliability.md` writes the table
there.

`--campaign` works towards a million inputs and a thousand killings, with `--hours` also beyond. It goes on where its
journal ends, notes in it what
every minute has brought (subject, seed, numbers of the cases, counts), and writes the sums of all its runs to
docs/reliability.md. Stop it whenever you like, and give `--hours` to stop by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from reliability.outcome import counts_table
from reliability.runner import run_cases
from reliability.subjects import SUBJECTS

JOURNAL = Path(__file__).with_name("journal.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"

INPUTS, KILLINGS = 1_000_000, 1_000
"""Goals of the campaign."""

SLICE = 60.0
"""Seconds on one subject before the journal is written and the next subject runs."""


def main() -> int:
    """Run the command line; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", choices=[*SUBJECTS], help="what to try; by default everything")
    parser.add_argument("--count", type=int, help="cases of each subject (default 1000, without end with --hours)")
    parser.add_argument("--hours", type=float, help="stop after this long, an equal part for each subject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--failures", type=Path, help="a folder for the files of failed cases")
    parser.add_argument(
        "--table", type=Path, help="a page in whose table of counts the rows of these subjects are replaced"
    )
    parser.add_argument("--seconds", type=float, help="seconds on one subject at a time, with --campaign")
    parser.add_argument("--campaign", action="store_true", help="add to the journal, up to its goals or for --hours")
    given = parser.parse_args()
    if given.campaign:
        return campaign(given)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    counts: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    failures = []
    chosen = given.subject or [*SUBJECTS]
    for subject in chosen:
        count = given.count or (None if given.hours else 1000)
        report = run_cases(
            subject,
            itertools.count(given.first) if count is None else range(given.first, given.first + count),
            seed=given.seed,
            workers=given.workers,
            until=given.hours and time.monotonic() + given.hours * 3600 / len(chosen),
            failures=given.failures,
            stop=stop,
        )
        counts[subject], seconds[subject] = report.counts, report.seconds
        if report.failures:
            failures.append(f"== {subject}\n\n{report.text()}")
    table = counts_table(counts, seconds)
    print(table)
    if given.table is not None:
        given.table.write_text(replace_table(given.table.read_text(encoding="utf-8"), table), encoding="utf-8")
    print("\n" + "\n\n".join(failures))
    return 1 if failures else 0


def campaign(given: argparse.Namespace, journal: Path = JOURNAL, page: Path = PAGE) -> int:
    """Add cases to the journal until its goals are reached, the time is over or the process is stopped."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    end = time.monotonic() + given.hours * 3600 if given.hours else float("inf")
    chosen = itertools.cycle(given.subject or [*SUBJECTS])
    failures = 0
    while not stop.is_set() and time.monotonic() < end:
        entries = read_journal(journal)
        if not given.hours and reached(entries):
            break
        subject = next(chosen)
        if subject == "crafted" and any(entry["subject"] == subject for entry in entries):
            continue  # these are always the same
        first = max(
            (e["first"] + e["count"] for e in entries if (e["subject"], e["seed"]) == (subject, given.seed)), default=0
        )
        until = min(end, time.monotonic() + (given.seconds or SLICE))
        report = run_cases(
            subject, itertools.count(first), seed=given.seed, workers=given.workers, until=until,
            failures=given.failures, stop=stop,
        )  # fmt: skip
        count = sum(report.counts.values())
        entry = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "subject": subject, "seed": given.seed, "first": first,
                 "count": count, "seconds": round(report.seconds, 1), "counts": dict(report.counts)}  # fmt: skip
        if count:
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        failures += len(report.failures)
        if report.failures:
            print(f"== {subject}\n\n{report.text()}\n", flush=True)
        page.write_text(replace_table(page.read_text(encoding="utf-8"), sums(read_journal(journal))), encoding="utf-8")
    print(sums(read_journal(journal)))
    return 1 if failures else 0


def read_journal(journal: Path) -> list[dict[str, Any]]:
    """Return the entries of a journal, without an unfinished line of a killed run."""
    entries = []
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def reached(entries: list[dict[str, Any]]) -> bool:
    """Return whether a journal has a million inputs and a thousand killings."""
    killings = sum(entry["count"] for entry in entries if entry["subject"] == "killings")
    inputs = sum(entry["count"] for entry in entries if entry["subject"] not in ("killings", "interrupts"))
    return inputs >= INPUTS and killings >= KILLINGS


def sums(entries: list[dict[str, Any]]) -> str:
    """Return the table of the sums of all runs."""
    counts: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    for subject in SUBJECTS:
        found = [entry for entry in entries if entry["subject"] == subject]
        if found:
            counts[subject] = sum((Counter(entry["counts"]) for entry in found), Counter())
            seconds[subject] = sum(entry["seconds"] for entry in found)
    return counts_table(counts, seconds)


def replace_table(page: str, table: str) -> str:
    """Replace rows of the table between a page's marks; rows of other subjects stay."""
    before, begin, rest = page.partition("<!-- counts -->\n")
    old, end, after = rest.partition("<!-- end of counts -->\n")
    if not begin or not end:
        raise SystemExit("the page has no marks <!-- counts --> and <!-- end of counts -->")
    rows = {line.split(" | ")[0]: line for part in (old, table) for line in part.splitlines() if line.startswith("|")}
    return f"{before}{begin}\n" + "\n".join(rows.values()) + f"\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
