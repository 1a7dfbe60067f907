"""Secure aggregation, as Flower has it: the server learns the average of weights that it cannot see one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.flower.federation import Federation
from onnxtrain.flower.records import flower


def run_securely(
    federation: Federation,
    secure: Any,
    strategy: Any,
    grid: Any,
    context: Any,
    settings: Mapping[str, Any],
    timeout: float,
) -> None:
    """All rounds, with SecAgg+ between the clients.

    Args:
        federation: The model at the server.
        secure: ``True``, or a ``SecAggPlusWorkflow``.
        strategy: ``FedAvg`` or ``FedProx``: who is asked.
        grid: The connection to the clients.
        context: Flower's.
        settings: The clients' settings.
        timeout: Seconds to wait for the clients, where ``secure`` does not say.

    Raises:
        OptionError: The strategy needs to see the weights of single clients.
    """
    server, workflow = flower("flwr.server"), flower("flwr.server.workflow")
    names = list(dict(federation.trainer._trained))

    def take(round_number: int, arrays: Sequence[np.ndarray], _: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        own = dict(federation.trainer._trained)
        given = dict(zip(names, arrays, strict=True))
        weights = {name: given[name].astype(own[name].dtype).reshape(own[name].shape) for name in names}
        measured = federation.take(round_number, weights)
        return measured.pop("loss", 0.0), measured

    if secure is True:
        # A share for every client, of which two thirds restore the mask of one that vanishes.
        secure = workflow.SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.67, timeout=timeout)
    asking = _older_strategy(strategy, settings)
    older = server.strategy.FedAvg(
        **asking,
        initial_parameters=flower("flwr.common").ndarrays_to_parameters(
            [np.array(value) for value in dict(federation.trainer._trained).values()]
        ),
        evaluate_fn=take,
    )
    legacy = server.LegacyContext(context, config=server.ServerConfig(num_rounds=federation.rounds), strategy=older)
    workflow.DefaultWorkflow(fit_workflow=secure)(grid, legacy)


def _older_strategy(strategy: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the older form of a strategy, in which Flower's secure aggregation takes it."""
    kinds = flower("flwr.serverapp.strategy")
    if type(strategy) not in (kinds.FedAvg, kinds.FedProx):
        raise OptionError(
            f"secure aggregation hides the weights of single clients, which {type(strategy).__name__} needs; take "
            "FedAvg or FedProx."
        )
    pull = {"proximal-mu": strategy.proximal_mu} if isinstance(strategy, kinds.FedProx) else {}

    def config(round_number: int) -> dict[str, Any]:
        return {**settings, **pull, "server-round": round_number}

    return {
        "fraction_fit": strategy.fraction_train,
        "fraction_evaluate": strategy.fraction_evaluate,
        "min_fit_clients": strategy.min_train_nodes,
        "min_evaluate_clients": strategy.min_evaluate_nodes,
        "min_available_clients": strategy.min_available_nodes,
        "on_fit_config_fn": config,
    }
