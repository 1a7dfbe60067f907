"""The server of a federation: averages what clients have learned, and writes it as the user's ONNX model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from onnxtrain.config import Options
from onnxtrain.edit.working import Model
from onnxtrain.errors import OptionError
from onnxtrain.flower.federation import Federation
from onnxtrain.flower.grid import CheckedGrid
from onnxtrain.flower.records import flower, to_record
from onnxtrain.flower.secure import run_securely
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.model_file.writing import check_writable
from onnxtrain.trainer import Trainer


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
    """A Flower ``ServerApp`` that trains an ONNX model on the data of its clients.

    A client that vanishes, that fails, or that sends weights of other names, types or shapes or with NaN, is left out
    of the round's average, and one sentence says so in the log and in the history.

    Args:
        model: A path or a loaded model; its weights are those of the first round.
        strategy: A strategy of ``flwr.serverapp.strategy``, by default ``FedAvg()``. ``FedProx(proximal_mu=0.1)`` gives
            the clients' loss its proximal term.
        loss: What clients minimise; it decides what of the model is trained, and is measured on ``validation``.
        save: Where the model is written after every round, with nothing but its weights changed: an absolute path,
            since Flower starts the server in a folder of its own.
        rounds: How many rounds of training.
        validation: Data at the server to measure the model on after every round.
        metrics: What to measure beside the loss.
        target: Name of the target in a file with several arrays left.
        history: A ``.json`` file for what was measured in each round, and for who was left out.
        timeout: Seconds to wait for the clients in a round.
        train_config: Settings for the clients, such as ``{"epochs": 2}``.
        secure: Secure aggregation: the server sees the sum of the clients' weights and none of them alone. ``True``,
            or a ``SecAggPlusWorkflow`` with settings; clients need ``mods=[secaggplus_mod]``.
        options: All other options of :class:`onnxtrain.Trainer`, as the clients have them.

    Returns:
        A ``flwr.serverapp.ServerApp``.

    Raises:
        OptionError: Flower is not installed, an argument has a value that it cannot have, or the model cannot be
            written there.
        DataError: While the server runs: no client has sent weights that could be averaged, in any round.
    """
    if rounds < 1:
        raise OptionError(f"rounds is {rounds}; it needs a number of at least 1.")
    if metrics and validation is None:
        raise OptionError("metrics are measured on validation data; give validation=.")
    saved, told = _absolute("save", save), None if history is None else _absolute("history", history)
    app = flower("flwr.serverapp").ServerApp()
    chosen = flower("flwr.serverapp.strategy").FedAvg() if strategy is None else strategy

    def main(grid: Any, context: Any) -> None:
        trainer = Trainer(model, loss=loss, **options)
        federation = Federation(trainer, saved, told, rounds)
        if validation is not None:
            federation.validation, federation.metrics, federation.target = validation, metrics, target
        checked = CheckedGrid(grid, trainer.get_weights())
        federation.failures = checked.failures
        settings = dict(train_config or {})
        if secure:
            run_securely(federation, secure, chosen, checked, context, settings, timeout)
        else:
            chosen.start(
                grid=checked,
                initial_arrays=to_record(dict(trainer._trained)),
                num_rounds=rounds,
                timeout=timeout,
                train_config=flower("flwr.app").ConfigRecord(settings),
                evaluate_fn=federation.take_record,
            )
        federation.check_trained()

    app.main()(main)
    return app


def _absolute(name: str, path: str | os.PathLike[str]) -> Path:
    """A path that means the same in every process, and can be written."""
    found = Path(path)
    if not found.is_absolute():
        raise OptionError(
            f"{name} is {str(found)!r}; it needs an absolute path, since Flower chooses the folder that servers run in."
        )
    check_writable(found)
    return found
