"""A federation in one process: plain calls carry Flower's messages from a server app to client apps."""

from __future__ import annotations

import copy
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

# Messages name their run and node; Flower's processes get both when they start.
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def context(node: int = 0, **config: Any) -> Context:
    return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}, series_id=1)


class LocalGrid:
    """Flower's grid without a network.

    Args:
        clients: The clients' apps by node.
        spoil: Makes another answer of an answer, by node; ``None`` for no answer at all.
    """

    def __init__(
        self,
        clients: Mapping[int, Any],
        spoil: Mapping[int, Callable[[Message], Message | None]] | None = None,
    ) -> None:
        self.clients = clients
        self.spoil = spoil or {}
        self.contexts = {node: context(node) for node in clients}
        self.answers: list[Message] = []
        self.run = types.SimpleNamespace(run_id=1)

    def get_node_ids(self) -> list[int]:
        return list(self.clients)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        found = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())  # as Flower's own grids do
            answer = self.clients[node](copy.deepcopy(message), self.contexts[node])
            answer = self.spoil[node](answer) if node in self.spoil else answer
            if answer is not None:
                found.append(answer)
        self.answers += found
        return found
