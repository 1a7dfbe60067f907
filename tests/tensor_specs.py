"""Input specifications for tests of datasets: one input, or two, the second with a dynamic axis."""

import numpy as np

from onnxtrain.data import TensorSpec

FLOAT = np.dtype(np.float32)
IMAGE = TensorSpec("image", FLOAT, ("N", 2))
ONE = [IMAGE]
TWO = [IMAGE, TensorSpec("mask", np.dtype(np.int64), ("N", "length"))]

X = np.arange(10, dtype=np.float64).reshape(5, 2)
Y = np.arange(5)
