"""Compare trainings with PyTorch's for some time: ``cd tests && python -m differential --minutes 60``.

Every outcome is a line of the journal. A run goes on where the journal ends, whatever ended the run before; journals of
several machines are one when they are concatenated. With ``--page`` the counts of the journal are written onto a page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOURNAL = Path("differential.jsonl")
KINDS = ("equal", "chaotic", "refused", "hinted", "diverged", "different", "error")
REASONS = (
    "The batch size of the model cannot be freed",
    "cannot be left out of the loss; give whole batches",
)
"""The true refusals: the older exporter wrote the batch size into shapes, or examples lie along another axis."""
BEGIN, END = "<!-- differential counts -->", "<!-- end of differential counts -->"


def read(journal: Path) -> dict[int, dict[str, Any]]:
    """Return the last outcome of each seed; ignore an unfinished line of a killed run."""
    found: dict[int, dict[str, Any]] = {}
    if journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            try:
                outcome = json.loads(line)
                found[int(outcome["seed"])] = outcome
            except (ValueError, KeyError, TypeError):
                continue
    return found


def table(outcomes: dict[int, dict[str, Any]], day: str) -> str:
    """Return the counts as a table for the page."""
    counts = Counter(outcome["kind"] for outcome in outcomes.values())
    models = len({outcome["model"] for outcome in outcomes.values()})
    rows = [
        "| combinations | models | " + " | ".join(KINDS) + " |",
        "|---:|---:" * 1 + "|---:" * len(KINDS) + "|",
        f"| {len(outcomes):,} | {models:,} | " + " | ".join(f"{counts[kind]:,}" for kind in KINDS) + " |",
    ]
    return f"{BEGIN}\n\n" + "\n".join(rows) + f"\n\nThe last run ended on {day}.\n\n{END}"


def write_page(page: Path, text: str) -> None:
    """Write the counts between the page's marks."""
    old = page.read_text(encoding="utf-8")
    before, rest = old.split(BEGIN)
    page.write_text(before + text + rest.split(END)[1], encoding="utf-8")


def chosen(seeds: str, done: set[int], again: bool) -> Iterator[int]:
    """Yield the seeds to run."""
    first, _, end = seeds.partition(":")
    for seed in range(int(first or 0), int(end) if end else int(first) + 1):
        if again or seed not in done:
            yield seed


def main(arguments: list[str] | None = None) -> int:
    """Run combinations; return 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m differential", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:20000", help="A:B, without B; or one seed, which is run again")
    parser.add_argument("--minutes", type=float, help="end after so many minutes")
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    parser.add_argument("--page", type=Path, help="write the counts of the journal onto this page")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    import torch

    from differential.combination import run

    torch.set_num_threads(1)
    done = read(options.journal)
    if done:  # a line that was cut off does not swallow the next one
        with options.journal.open("a", encoding="utf-8") as file:
            file.write("\n")
    end = time.monotonic() + 60 * options.minutes if options.minutes else None
    again = ":" not in options.seeds
    bad = 0
    with options.journal.open("a", encoding="utf-8") as file:
        for seed in chosen(options.seeds, set(done), again):
            if end is not None and time.monotonic() > end:
                break
            try:
                outcome: dict[str, Any] = run(seed)._asdict()
            except Exception:
                outcome = {
                    "seed": seed,
                    "kind": "error",
                    "text": traceback.format_exc()[-900:],
                    "model": "",
                    "runtime": "",
                }
            done[seed] = outcome
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            if outcome["kind"] in ("different", "error") or again:
                bad += outcome["kind"] in ("different", "error")
                print(json.dumps(outcome, indent=1), flush=True)
    counts = Counter(outcome["kind"] for outcome in done.values())
    print(f"{len(done)} combinations in {options.journal}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    if options.page:
        write_page(options.page, table(done, datetime.date.today().isoformat()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
