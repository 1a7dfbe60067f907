"""Conformance suite for training: models, inputs and expected outputs for any runtime that runs ONNX.

| file | purpose |
|---|---|
| ``subject.py`` | one case: its model as written, its data sets, its source and tolerance |
| ``oracle.py`` | derivatives by differences in float64, which say how sure they are |
| ``gradients.py``, ``losses.py``, ``optimizers.py``, ``trainings.py`` | the cases |
| ``write.py`` | writes the suite: ``python -m conformance.write FOLDER`` |
| ``run.py`` | runs it on a runtime of Python; needs numpy, onnx and that runtime, and nothing of onnxtrain |
| ``run_web.mjs``, ``run.cpp`` | run it on onnxruntime-web and on ONNX Runtime from C++ |
| ``scoreboard.py`` | writes the tables of ``docs/conformance.md`` from ``results/`` |
| ``offer.md`` | an offer of the suite to ONNX, which is ready to send |

The inputs of gradients are those of ``tests/autodiff/cases``; the formulas of optimizers those of
``tests/operators/operator_pages.py``, which know nothing of onnxtrain.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "operators")]
