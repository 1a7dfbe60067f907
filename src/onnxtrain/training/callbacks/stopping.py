"""Handle Ctrl-C and SIGTERM during a training: finish the step, then stop."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from onnxtrain.errors.start import interrupt

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Context that records the first signal instead of raising; a second one interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                found = signal.getsignal(number)
                if found in (signal.default_int_handler, signal.SIG_DFL, interrupt):
                    self._before[number] = found  # type: ignore[assignment]
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__(None, None, None)

    def exception(self, sentence: str) -> BaseException:
        """Return the exception that ends the training; after SIGTERM, which ends the process, log the message."""
        if self.signal == signal.SIGTERM:
            _log.warning(sentence)
            return SystemExit(128 + signal.SIGTERM)
        return KeyboardInterrupt(sentence)
