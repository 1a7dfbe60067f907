"""Tries to break onnxtrain with files and command lines that nobody would write, and counts what comes of it.

    python tests/reliability/run.py --subject models --count 10000 --seed 0
    python tests/reliability/run.py --hours 2 --workers 2 --failures failures

Prints a table of counts, also where it is stopped (Ctrl-C), then the failures by cause. A case can be seen again by its
number: `--first 4711 --count 1 --failures folder` keeps its files. `--table docs/reliability.md` writes the table there.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from reliability.outcome import counts_table
from reliability.runner import run_cases
from reliability.subjects import SUBJECTS


def main() -> int:
    """Run what the command line asks for; returns 1 where anything failed."""
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
    given = parser.parse_args()
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


def replace_table(page: str, table: str) -> str:
    """A page with these rows in the table between its marks; rows of subjects that are not in the table stay."""
    before, begin, rest = page.partition("<!-- counts -->\n")
    old, end, after = rest.partition("<!-- end of counts -->\n")
    if not begin or not end:
        raise SystemExit("the page has no marks <!-- counts --> and <!-- end of counts -->")
    rows = {line.split(" | ")[0]: line for part in (old, table) for line in part.splitlines() if line.startswith("|")}
    return f"{before}{begin}\n" + "\n".join(rows.values()) + f"\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
