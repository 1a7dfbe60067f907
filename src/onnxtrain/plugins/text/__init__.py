"""Texts to train language models on: chats, prompts with completions, instructions, plain texts; texts to compare."""

import lazy_loader

from onnxtrain.errors.registries import (
    register_callback,
    register_command,
    register_flags,
    register_loss,
    register_metric,
    register_reader,
)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Add readers and flags of texts, losses that compare them, metrics of rewards, and samples."""
    register_reader("texts", f"{__name__}.reading:read_texts")
    for name, loss in {"dpo": "DPO", "orpo": "ORPO", "kto": "KTO", "reward": "Reward"}.items():
        register_loss(name, f"{__name__}.preference_losses:{loss}")
    for name, loss in {"multiple_negatives": "MultipleNegatives", "listnet": "ListNet", "ranknet": "RankNet"}.items():
        register_loss(name, f"{__name__}.ranking_losses:{loss}")
    register_loss("grpo", f"{__name__}.policy_loss:GRPO")
    for metric in ("chosen", "rejected", "margins", "accuracies"):
        register_metric(f"rewards/{metric}", f"{__name__}.preference_losses:{metric.upper()}")
    register_command("checkpoint", f"{__name__}.checkpoint_command")
    register_callback("samples", f"{__name__}.samples:Samples")
    register_flags("texts", f"{__name__}.flags:TextFlags", of="data")
    register_flags("samples", f"{__name__}.flags:SampleFlags", of="fit")
