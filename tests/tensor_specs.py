"""What the models of tests of datasets take: one input, or two of which the second has an axis of any length."""

import numpy as np

from onnxtrain.data import TensorSpec

FLOAT = np.dtype(np.float32)
IMAGE = TensorSpec("image", FLOAT, ("N", 2))
ONE = [IMAGE]
TWO = [IMAGE, TensorSpec("mask", np.dtype(np.int64), ("N", "length"))]

X = np.arange(10, dtype=np.float64).reshape(5, 2)
Y = np.arange(5)
