"""Log records and warnings while a command runs: one line for each of onnxtrain's, none for those of libraries.

Failures are exceptions, which end in one sentence. Libraries also log (onnx-ir about unusual attributes, NumPy about
overflows); their messages quote names from the user's files and would distract from the sentence. ``--debug`` shows
all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxtrain
from onnxtrain.cli.wording import in_flags
from onnxtrain.errors import TrainingHint
from onnxtrain.report.escaping import visible

_OURS = str(Path(onnxtrain.__file__).parent) + os.sep


class _Notices(logging.Handler):
    """Writes log records as lines on the standard error."""

    def __init__(self, *, everything: bool) -> None:
        super().__init__(logging.WARNING)
        self._everything = everything

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record of onnxtrain; of others, where everything is asked for."""
        if self._everything or record.name.partition(".")[0] == "onnxtrain":
            write_notice(record.getMessage())


def write_notice(text: str) -> None:
    """One line on the standard error, in which everything is shown and nothing obeyed."""
    sys.stderr.write(visible(f"warning: {' '.join(text.split())}") + "\n")


@contextlib.contextmanager
def notices(*, everything: bool) -> Iterator[None]:
    """Let log records and warnings become lines meanwhile.

    Args:
        everything: Whether those of other libraries are shown too.
    """
    handler, root = _Notices(everything=everything), logging.getLogger()

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        if issubclass(category, TrainingHint):
            sys.stderr.write(visible(f"hint: {in_flags(str(message))}") + "\n")
        elif everything or filename.startswith(_OURS):
            write_notice(str(message))

    root.addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrainingHint)
        warnings.showwarning = show
        try:
            yield
        finally:
            root.removeHandler(handler)
