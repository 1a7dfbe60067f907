"""Time and peak memory of a training step of ten models in which one operator decides, against PyTorch.

    python benchmarks/ten_step.py --output build/benchmarks/ten.md
    python benchmarks/ten_step.py --models crnn,wavenet --peers onnxtrain,torch --quick

Options and report are those of ``zoo_step.py``.
"""

from __future__ import annotations

import sys

from ten_models import TEN
from zoo_step import main

if __name__ == "__main__":
    sys.exit(main(models=TEN, description=__doc__))
