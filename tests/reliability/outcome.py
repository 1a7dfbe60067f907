"""Outcomes of cases, and the table of their counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = {
    "ok": "did what it was asked for",
    "refused": "an error of onnxtrain's own, in one sentence",
    "runtime": "crash, hang or memory, but plain onnxruntime does the same with the file",
    "defect": "another exception, or a message that is no sentence",
    "wrong": "numbers or files that are not what they have to be: a mixed or lost file, another prediction",
    "memory": "more than four times the memory of plain onnxruntime, or more than the limit",
    "hang": "more than half a minute of computing, or three minutes without",
    "crash": "ended by a signal",
}
"""From the best to the worst; the first three are not failures."""

FAILURES = tuple(KINDS)[3:]


class WrongError(AssertionError):
    """A property is violated: values or files are wrong.

    Args:
        message: The violation.
        cause: Key that all cases with this violation share.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case.

    Attributes:
        kind: One of `KINDS`.
        operation: The operation: "gradient", "save".
        signature: Key that failures with one cause share: the exception and its stack.
        detail: The traceback, or other details.
    """

    kind: str
    operation: str = ""
    signature: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the outcome is a defect."""
        return self.kind in FAILURES

    def as_dict(self) -> dict[str, str]:
        """Return the outcome as a dictionary, to send it between processes."""
        return dataclasses.asdict(self)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst outcome of the operations of one case."""
    order = list(KINDS)
    return max(outcomes, key=lambda outcome: order.index(outcome.kind), default=Outcome("ok"))


def counts_table(counts: dict[str, Counter[str]], seconds: dict[str, float]) -> str:
    """One row per subject, one column per kind."""
    header = ["subject", "cases", "cases/s", *KINDS]
    rows = [
        [
            subject,
            f"{(total := sum(counted.values())):,}",
            f"{total / max(seconds[subject], 1e-9):.1f}",
            *(f"{counted[kind]:,}" for kind in KINDS),
        ]
        for subject, counted in counts.items()
    ]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
