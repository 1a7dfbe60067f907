"""The server of a federation: average the clients' weights and write them as the user's ONNX model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from onnxtrain.editing.working import Model
from onnxtrain.errors import DataError, OptionError
from onnxtrain.interop.flower.messages import CLIENT_FAILED, EXAMPLES, flower, from_record, to_record
from onnxtrain.losses.heads import check_numbers
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.writing import check_writable, write_files
from onnxtrain.training.config import Options
from onnxtrain.training.trainer import Trainer


class CheckedGrid:
    """Wrapper of Flower's grid that turns invalid weights into errors, so that strategies exclude these clients."""

    def __init__(self, grid: Any, like: Mapping[str, np.ndarray]) -> None:
        self._grid = grid
        self._like = like
        self.failures: dict[int, str] = {}
        """First reason for excluding each client since the dictionary was last cleared, by node id."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send messages and wait for the answers; clients that do not answer in time are excluded."""
        sent = list(messages)
        found = list(self._grid.send_and_receive(sent, timeout=timeout))
        # Flower answers for a dead client under its own id; the message id identifies the client.
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
            self._exclude(node, f"The client {node} did not answer{waited}.")
        return answers

    def _checked(self, answer: Any, asked: Any) -> Any:
        """Return the answer, or an error with the client's id."""
        node = asked.metadata.dst_node_id
        if answer.has_error():
            code, reason = answer.error.code, answer.error.reason
            self._exclude(node, f"The client {node} failed: {reason}")
        else:
            try:
                self._check(answer.content, f"The client {node}")
            except DataError as error:
                code, reason = CLIENT_FAILED, str(error)
                self._exclude(node, reason)
            else:
                return answer
        app = flower("flwr.app")
        return app.Message(app.Error(code, reason), reply_to=asked)

    def _exclude(self, node: int, reason: str) -> None:
        """Record why a client is excluded; only the first reason of a round is kept."""
        self.failures.setdefault(node, reason)

    def _check(self, content: Any, sender: str) -> None:
        for record in content.metric_records.values():
            examples = record.get(EXAMPLES, 1)
            if not isinstance(examples, int | float) or not math.isfinite(examples) or examples <= 0:
                raise DataError(f"{sender} sent {examples!r} as its number of examples; it needs a number above 0.")
        for name, record in content.array_records.items():
            if not name.startswith("fitres.") and len(record):  # masked weights cannot be checked
                from_record(record, self._like, sender)


@dataclass
class Federation:
    """The server's model over the rounds."""

    trainer: Trainer
    path: Path
    history: Path | None
    rounds: int
    validation: Any
    metrics: str | Sequence[Any]
    target: str | None
    failures: dict[int, str]
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _trained: bool = False

    def take_record(self, round_number: int, record: Any) -> Any:
        """Load the weights of a round from Flower's record; return the metrics as a record, if there are any."""
        own = dict(self.trainer.weights)
        measured = self.take(round_number, from_record(record, own, "The strategy", averaged=True))
        return flower("flwr.app").MetricRecord(measured) if measured else None

    def take(self, round_number: int, weights: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Load the weights of a round, evaluate them, and write the model and the history."""
        own = dict(self.trainer.weights)
        changed = any(not np.array_equal(own[name], value) for name, value in weights.items())
        self._trained = self._trained or changed
        self.trainer.set_weights(weights)
        measured = {}
        if self.validation is not None:
            metrics = self.trainer.objective.resolve_metrics(self.metrics)
            check_numbers(metrics)
            measured = self.trainer.evaluate(self.validation, target=self.target, metrics=metrics)
        self._rows.append({"round": round_number, **measured, "left_out": list(self.failures.values())})
        for reason in self.failures.values():
            flower("flwr.supercore").log(30, "%s", reason)
        self.failures.clear()
        if round_number:
            self.trainer.save(self.path)
        if self.history is not None:
            write_files({self.history: json.dumps(self._rows, indent=1).encode()})
        return measured

    def check_trained(self) -> None:
        """Refuse a training that changed nothing."""
        if not self._trained:
            reasons = dict.fromkeys(reason for row in self._rows for reason in row["left_out"])
            raise DataError(
                f"No client sent valid weights in {self.rounds} rounds; the model is unchanged. "
                f"{' '.join(list(reasons)[:3])}".strip()
            )


def run_securely(
    federation: Federation,
    secure: Any,
    strategy: Any,
    grid: Any,
    context: Any,
    settings: Mapping[str, Any],
    timeout: float,
) -> None:
    """Run all rounds with SecAgg+ between the clients."""
    server, workflow = flower("flwr.server"), flower("flwr.server.workflow")
    names = list(federation.trainer.weights)

    def take(round_number: int, arrays: Sequence[np.ndarray], _: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        own = dict(federation.trainer.weights)
        given = dict(zip(names, arrays, strict=True))
        weights = {name: given[name].astype(own[name].dtype).reshape(own[name].shape) for name in names}
        measured = federation.take(round_number, weights)
        return measured.pop("loss", 0.0), measured

    if secure is True:
        # One share per client; two thirds of them restore the mask of a client that vanishes.
        secure = workflow.SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.67, timeout=timeout)
    older_arguments = _older_strategy(strategy, settings)
    older = server.strategy.FedAvg(
        **older_arguments,
        initial_parameters=flower("flwr.common").ndarrays_to_parameters(
            [np.array(value) for value in federation.trainer.weights.values()]
        ),
        evaluate_fn=take,
    )
    legacy = server.LegacyContext(context, config=server.ServerConfig(num_rounds=federation.rounds), strategy=older)
    workflow.DefaultWorkflow(fit_workflow=secure)(grid, legacy)


def _older_strategy(strategy: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the older strategy class that Flower's secure aggregation uses."""
    kinds = flower("flwr.serverapp.strategy")
    if type(strategy) not in (kinds.FedAvg, kinds.FedProx):
        raise OptionError(
            f"Secure aggregation hides the weights of single clients, which {type(strategy).__name__} needs; use "
            "FedAvg or FedProx."
        ).about(type(strategy).__name__)
    proximal = {"proximal-mu": strategy.proximal_mu} if isinstance(strategy, kinds.FedProx) else {}

    def config(round_number: int) -> dict[str, Any]:
        return {**settings, **proximal, "server-round": round_number}

    return {
        "fraction_fit": strategy.fraction_train,
        "fraction_evaluate": strategy.fraction_evaluate,
        "min_fit_clients": strategy.min_train_nodes,
        "min_evaluate_clients": strategy.min_evaluate_nodes,
        "min_available_clients": strategy.min_available_nodes,
        "on_fit_config_fn": config,
    }


def server_app(
    model: Model,
    strategy: Any = None,
    *,
    loss: LossLike,
    save: str | os.PathLike[str],
    rounds: int = 3,
    validation: Any = None,
    metrics: str | Sequence[Any] = (),
    target: str | None = None,
    history: str | os.PathLike[str] | None = None,
    timeout: float = 3600.0,
    train_config: Mapping[str, Any] | None = None,
    secure: Any = False,
    **options: Unpack[Options],
) -> Any:
    """Make a Flower ``ServerApp`` that trains an ONNX model on the data of its clients.

    A client that vanishes, fails, or sends weights of other names, types or shapes or with NaN is excluded from the
    round's average, with one sentence in the log and in the history.

    Args:
        model: A path or a loaded model with the initial weights.
        strategy: A strategy of ``flwr.serverapp.strategy``, by default ``FedAvg()``. ``FedProx(proximal_mu=0.1)`` adds
            the proximal term to the clients' loss.
        loss: The clients' loss; it determines the trainable parameters, and is evaluated on ``validation``.
        save: Path of the model after every round, with only its weights changed. It must be absolute, since Flower
            starts the server in a folder of its own.
        rounds: Number of rounds of training.
        validation: Data at the server for evaluating the model after every round.
        metrics: Metrics beside the loss.
        target: Name of the target in a file with several remaining arrays.
        history: A ``.json`` file for the metrics and the excluded clients of each round.
        timeout: Seconds to wait for the clients in a round.
        train_config: Settings for the clients, such as ``{"epochs": 2}``.
        secure: Secure aggregation: the server sees only the sum of the clients' weights. ``True``, or a
            ``SecAggPlusWorkflow`` with settings; clients need ``mods=[secaggplus_mod]``.
        options: All other options of :class:`onnxtrain.Trainer`, which must be the clients'.

    Returns:
        A ``flwr.serverapp.ServerApp``.

    Raises:
        OptionError: Flower is not installed, an argument is invalid, or the model cannot be
            written.
        DataError: While the server runs: no client sent valid weights in any round.
    """
    if rounds < 1:
        raise OptionError(f"rounds is {rounds}; it needs a number of at least 1.")
    if metrics and validation is None:
        raise OptionError("Metrics are measured on validation data; give validation=.")
    saved, history_path = _absolute("save", save), None if history is None else _absolute("history", history)
    app = flower("flwr.serverapp").ServerApp()
    chosen = flower("flwr.serverapp.strategy").FedAvg() if strategy is None else strategy

    def main(grid: Any, context: Any) -> None:
        trainer = Trainer(model, loss=loss, **options)
        checked = CheckedGrid(grid, trainer.get_weights())
        federation = Federation(trainer, saved, history_path, rounds, validation, metrics, target, checked.failures)
        settings = dict(train_config or {})
        if secure:
            run_securely(federation, secure, chosen, checked, context, settings, timeout)
        else:
            chosen.start(
                grid=checked,
                initial_arrays=to_record(dict(trainer.weights)),
                num_rounds=rounds,
                timeout=timeout,
                train_config=flower("flwr.app").ConfigRecord(settings),
                evaluate_fn=federation.take_record,
            )
        federation.check_trained()

    app.main()(main)
    return app


def _absolute(name: str, path: str | os.PathLike[str]) -> Path:
    """Check that a path is absolute and can be written."""
    found = Path(path)
    if not found.is_absolute():
        raise OptionError(
            f"{name} is {str(found)!r}; it needs an absolute path, since Flower chooses the folder that servers run in."
        )
    check_writable(found)
    return found
