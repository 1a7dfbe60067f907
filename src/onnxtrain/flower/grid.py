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
        self.failures: dict[int, str] = {}
        """The first reason to leave a client out since the dictionary was last emptied, by the client's node id."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send messages and wait for the answers; who does not answer in time is left out."""
        sent = list(messages)
        found = list(self._grid.send_and_receive(sent, timeout=timeout))
        # Flower answers for a dead client in its own name: the message id tells whom it answers for.
        by_message = {message.metadata.message_id: message for message in sent if message.metadata.message_id}
        by_node = {message.metadata.dst_node_id: message for message in sent}
        answers, silent = [], set(by_node)
        for answer in found:
            metadata = answer.metadata
            asked = by_message.get(metadata.reply_to_message_id, by_node.get(metadata.src_node_id))
            if asked is not None:
                silent.discard(asked.metadata.dst_node_id)
                answers.append(self._checked(answer, asked))
        for node in sorted(silent):
            waited = "" if timeout is None else f" within {timeout:g} seconds"
            self._leave_out(node, f"The client {node} did not answer{waited}.")
        return answers

    def _checked(self, answer: Any, asked: Any) -> Any:
        """An answer, or the error that it comes to; errors bear the id of the client."""
        node = asked.metadata.dst_node_id
        if answer.has_error():
            code, reason = answer.error.code, answer.error.reason
            self._leave_out(node, f"The client {node} failed: {reason}")
        else:
            try:
                self._check(answer.content, f"The client {node}")
            except DataError as error:
                code, reason = CLIENT_FAILED, str(error)
                self._leave_out(node, reason)
            else:
                return answer
        app = flower("flwr.app")
        return app.Message(app.Error(code, reason), reply_to=asked)

    def _leave_out(self, node: int, reason: str) -> None:
        """Note why a client is left out; a round asks it several times, but lists it once."""
        self.failures.setdefault(node, reason)

    def _check(self, content: Any, sender: str) -> None:
        for record in content.metric_records.values():
            examples = record.get(EXAMPLES, 1)
            if not isinstance(examples, int | float) or not math.isfinite(examples) or examples <= 0:
                raise DataError(f"{sender} sent {examples!r} as its number of examples; it needs a number above 0.")
        for name, record in content.array_records.items():
            if not name.startswith("fitres.") and len(record):  # masked ones are nobody's to check
                from_record(record, self._like, sender)
