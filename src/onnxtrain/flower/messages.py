"""What a client reads in the server's messages, and how it answers: in Flower's records, or in their older form.

Flower's secure aggregation still speaks in the older form, in which arrays have numbers and no names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import DataError
from onnxtrain.flower.records import CLIENT_FAILED, EXAMPLES, flower, from_record, to_record

_OLD_ARRAYS = ("fitins.parameters", "evaluateins.parameters")
_OLD_CONFIGS = ("fitins.config", "evaluateins.config")


def is_old(message: Any) -> bool:
    """Whether a message is in the older form."""
    return any(name in message.content.array_records for name in _OLD_ARRAYS)


def weights_of(message: Any, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that the server has sent.

    Raises:
        DataError: They are not those of this model.
    """
    records = message.content.array_records
    if len(records) != 1:
        raise DataError(f"The server sent {len(records)} records of arrays; a client needs one, with the weights.")
    record = next(iter(records.values()))
    if is_old(message):
        if len(record) != len(like):
            raise DataError(
                f"The server sent {len(record)} arrays, but {len(like)} are trained here; give both sides "
                "the same model and options."
            )
        record = dict(zip(like, record.values(), strict=True))
    return from_record(record, like, "The server", averaged=True)


def settings_of(message: Any) -> Mapping[str, Any]:
    """The server's settings of this round."""
    records = message.content.config_records
    names = [name for name in _OLD_CONFIGS if name in records] or [name for name in records if name == "config"]
    return dict(records[names[0]]) if names else {}


def answer(
    message: Any, measured: Mapping[str, float], examples: int, weights: Mapping[str, np.ndarray] | None = None
) -> Any:
    """The answer to a message.

    Args:
        message: The message.
        measured: Metrics.
        examples: The number of examples, by which the answer counts.
        weights: The weights of this client, where it has trained.
    """
    app = flower("flwr.app")
    if is_old(message):
        content = _old_content(measured, examples, weights)
    else:
        content = app.RecordDict({"metrics": app.MetricRecord({**measured, EXAMPLES: examples})})
        if weights is not None:
            key, sent = next(iter(message.content.array_records.items()))
            content[key] = to_record({name: weights[name] for name in sent})  # in their order, which modifiers rely on
    return app.Message(content, reply_to=message)


def refusal(message: Any, reason: str) -> Any:
    """The answer to a message that went wrong, in one sentence."""
    app = flower("flwr.app")
    return app.Message(app.Error(CLIENT_FAILED, reason), reply_to=message)


def _old_content(measured: Mapping[str, float], examples: int, weights: Mapping[str, np.ndarray] | None) -> Any:
    common, compat = flower("flwr.common"), flower("flwr.compat.common.recorddict_compat")
    status = common.Status(common.Code.OK, "")
    metrics = dict(measured)
    if weights is None:
        return compat.evaluateres_to_recorddict(common.EvaluateRes(status, metrics.pop("loss"), examples, metrics))
    parameters = common.ndarrays_to_parameters([np.array(value) for value in weights.values()])
    return compat.fitres_to_recorddict(common.FitRes(status, parameters, examples, metrics), keep_input=True)
