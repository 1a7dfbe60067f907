"""Time and peak memory of a training step of LSTM, GRU and RNN against PyTorch, eager and compiled.

    python benchmarks/recurrent.py --output build/benchmarks/recurrent.md
    python benchmarks/recurrent.py --models lstm-256-1 --batch 8 --quick

Networks are those of ``recurrent_models.py``; all else, and the options, are as in ``step.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import step
from recurrent_models import RECURRENT

BATCHES = (1, 8, 32, 128)


def main(arguments: Sequence[str] | None = None) -> int:
    peers = ["onnxtrain", "torch", "torch-compile"]
    return step.main(arguments, known=RECURRENT, peers=peers, batches=BATCHES, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
