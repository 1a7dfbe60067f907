"""Ctrl-C, also where it comes while modules load."""

from __future__ import annotations


def interrupted(error: BaseException | None) -> bool:
    """Whether an error began as Ctrl-C: modules in C turn one that comes while they load into an ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
