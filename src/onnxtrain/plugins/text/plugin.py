"""Register texts."""

from onnxtrain.errors.registries import (
    register_callback,
    register_flags,
    register_loss,
    register_metric,
    register_reader,
)

_HERE = "onnxtrain.plugins.text"


def register() -> None:
    """Add readers and flags of texts, losses that compare them, metrics of rewards, and samples."""
    register_reader("texts", f"{_HERE}.reading:read_texts")
    for name, loss in {"dpo": "DPO", "orpo": "ORPO", "kto": "KTO", "reward": "Reward"}.items():
        register_loss(name, f"{_HERE}.preference_losses:{loss}")
    for name, loss in {"multiple_negatives": "MultipleNegatives", "listnet": "ListNet", "ranknet": "RankNet"}.items():
        register_loss(name, f"{_HERE}.ranking_losses:{loss}")
    for metric in ("chosen", "rejected", "margins", "accuracies"):
        register_metric(f"rewards/{metric}", f"{_HERE}.preference_losses:{metric.upper()}")
    register_callback("samples", f"{_HERE}.samples:Samples")
    register_flags("texts", f"{_HERE}.flags:TextFlags", of="data")
    register_flags("samples", f"{_HERE}.flags:SampleFlags", of="fit")
