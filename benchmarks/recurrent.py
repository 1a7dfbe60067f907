"""Time and peak memory of a training step of LSTM, GRU and RNN against PyTorch, eager and compiled.

    python benchmarks/recurrent.py --output build/benchmarks/recurrent.md
    python benchmarks/recurrent.py --models lstm-256-1 --batch 8 --quick

The networks are those of ``recurrent_models.py``; everything else, options included, is as in ``step.py``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import step
from recurrent_models import RECURRENT

BATCHES = (1, 8, 32, 128)
COMPILED = "torch-compile"


def main(arguments: Sequence[str] | None = None) -> int:
    peers = ["onnxtrain", "torch", COMPILED]
    result = step.main(arguments, known=RECURRENT, peers=peers, batches=BATCHES, description=__doc__)
    if COMPILED in step.parse(arguments, RECURRENT, peers, __doc__).peers:
        print(what_is_compiled())
    return result


def what_is_compiled() -> str:
    """One sentence on torch.compile's treatment of recurrent layers."""
    try:
        config = importlib.import_module("torch._dynamo.config")
    except ImportError:
        return "torch.compile: PyTorch is not installed."
    if getattr(config, "allow_rnn", True):
        return "torch.compile compiles recurrent layers (torch._dynamo.config.allow_rnn)."
    return (
        "torch.compile leaves LSTM, GRU and RNN as they are (torch._dynamo.config.allow_rnn is off): they run eagerly."
    )


if __name__ == "__main__":
    sys.exit(main())
