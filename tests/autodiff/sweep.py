"""Every usable node test of ONNX's backend suite as gradient checks.

A test is a model of one node with inputs and expected outputs. It becomes a :class:`Subject` at its own opset,
and one at each of the opsets in ``OPSETS`` that it can be brought to; a subject is checked with all sizes known,
with only ranks known, with nothing known, and with its integer inputs as constants. What is left out, and why, is in
``sweep_tables``.

Run it with ``python tests/autodiff/sweep.py [operator ...]``; ``--write docs/operators.md`` writes the table.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, version_converter
from onnx.backend.test.loader import load_model_tests
from sweep_lift import lift
from sweep_tables import CONFIGURATION, NEWEST, OPSETS, ORACLES, SKIPPED, jitter_of, matching

from onnxtrain.autodiff import registry
from onnxtrain.autodiff.expand import standard_body
