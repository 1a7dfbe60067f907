"""Read the server's messages and answer them, as Flower's records or in their older format.

Weights travel as arrays under the names of the initializers and are checked on arrival. Flower's secure aggregation
still uses the older format, in which arrays have positions but no names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import DataError
from onnxtrain.errors._internal import import_optional

EXAMPLES = "num-examples"
"""Metric by which Flower's strategies weight the clients."""

CLIENT_FAILED = 2
"""Flower's code for an error in a client."""


def flower(module: str) -> Any:
    """Import a module of Flower.

    Raises:
        OptionError: Flower is not installed, or has no such module.
    """
    return import_optional(module, needs="onnxtrain.interop.flower needs Flower 1.41 or newer", packages="flwr")


def to_record(values: Mapping[str, np.ndarray]) -> Any:
    """Make an ``ArrayRecord`` with copies of arrays, by name and in order."""
    app = flower("flwr.app")
    return app.ArrayRecord({name: app.Array(np.array(value)) for name, value in values.items()})


def from_record(
    record: Mapping[str, Any], like: Mapping[str, np.ndarray], sender: str, *, averaged: bool = False
) -> dict[str, np.ndarray]:
    """Read and check the arrays of an ``ArrayRecord``."""
    missing = [name for name in like if name not in record]
    unknown = [name for name in record if name not in like]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"{unknown[0]!r}, which is not trained here"
        raise DataError(
            f"{sender} sent {what}; both sides need the same model and the same trainable parameters "
            f"({', '.join(list(like)[:8])})."
        )
    arrays = {}
    for name, own in like.items():
        array = _array(record[name], name, sender)
        if averaged and array.dtype.kind == "f":
            array = array.astype(own.dtype)
        if array.shape != own.shape or array.dtype != own.dtype:
            raise DataError(
                f"{sender} sent {name!r} as {array.dtype} of shape {array.shape}; it needs {own.dtype} of shape "
                f"{own.shape}."
            )
        if not np.isfinite(array).all():
            raise DataError(f"{sender} sent {name!r} with NaN or infinite values; it needs finite ones.")
        arrays[name] = array
    return arrays


def _array(item: Any, name: str, sender: str) -> np.ndarray:
    """Convert an item of a record, whose bytes are untrusted."""
    try:
        return np.asarray(item.numpy())
    except Exception as error:
        raise DataError(f"{sender} sent {name!r} in a form that is no NumPy array ({error}).") from error


_OLD_ARRAYS = ("fitins.parameters", "evaluateins.parameters")
_OLD_CONFIGS = ("fitins.config", "evaluateins.config")


def is_old(message: Any) -> bool:
    """Return whether a message is in the older format."""
    return any(name in message.content.array_records for name in _OLD_ARRAYS)


def weights_of(message: Any, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Read the weights that the server sent."""
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
    """Read the server's settings of this round."""
    records = message.content.config_records
    names = [name for name in _OLD_CONFIGS if name in records] or [name for name in records if name == "config"]
    return dict(records[names[0]]) if names else {}


def answer(
    message: Any, measured: Mapping[str, float], examples: int, weights: Mapping[str, np.ndarray] | None = None
) -> Any:
    """Make the answer to a message."""
    app = flower("flwr.app")
    if is_old(message):
        content = _old_content(measured, examples, weights)
    else:
        content = app.RecordDict({"metrics": app.MetricRecord({**measured, EXAMPLES: examples})})
        if weights is not None:
            key, sent = next(iter(message.content.array_records.items()))
            content[key] = to_record({name: weights[name] for name in sent})  # modifiers rely on the order
    return app.Message(content, reply_to=message)


def refusal(message: Any, reason: str) -> Any:
    """Make the answer to a message that failed."""
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
