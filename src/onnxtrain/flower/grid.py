"""The connection to the clients, with a check of what they send: one bad answer must not spoil the average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import DataError
from onnxtrain.flower.records import CLIENT_FAILED, EXAMPLES, flower, from_record


class CheckedGrid:
    """Flower's grid; weights that cannot be averaged become errors of their clients, which strategies leave out.

    Args:
        grid: Flower's own.
        like: Arrays of the names, types and shapes that clients have to send.
    """

    def __init__(self, grid: Any, like: Mapping[str, np.ndarray]) -> None:
        self._grid = grid
        self._like = like
        self.failures: list[str] = []
        """Why answers were left out, since the list was last emptied."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send messages and wait for the answers; who does not answer in time is left out."""
        sent = list(messages)
        asked = {message.metadata.dst_node_id: message for message in sent}
        answers = [self._checked(found, asked) for found in self._grid.send_and_receive(sent, timeout=timeout)]
        silent = asked.keys() - {found.metadata.src_node_id for found in answers}
        self.failures += [f"The client {node} did not answer within {timeout:g} seconds." for node in sorted(silent)]
        return answers

    def _checked(self, found: Any, asked: Mapping[int, Any]) -> Any:
        """An answer, or the error that it comes to."""
        node = found.metadata.src_node_id
        if found.has_error():
            self.failures.append(f"The client {node} failed: {found.error.reason}")
            return found
        try:
            self._check(found.content, f"The client {node}")
        except DataError as error:
            self.failures.append(str(error))
            app = flower("flwr.app")
            return app.Message(app.Error(CLIENT_FAILED, str(error)), reply_to=asked[node])
        return found

    def _check(self, content: Any, sender: str) -> None:
        for record in content.metric_records.values():
            examples = record.get(EXAMPLES, 1)
            if not isinstance(examples, int | float) or not math.isfinite(examples) or examples <= 0:
                raise DataError(f"{sender} sent {examples!r} as its number of examples; it needs a number above 0.")
        for name, record in content.array_records.items():
            if not name.startswith("fitres.") and len(record):  # masked ones are nobody's to check
                from_record(record, self._like, sender)
