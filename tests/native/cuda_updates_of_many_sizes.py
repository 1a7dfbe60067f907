"""Update tensors of many sizes on a GPU: a program for compute-sanitizer."""

import os

import numpy as np
import test_native_cuda as cases

from onnxtrain.runtime.native import CUDA_VARIABLE

if __name__ == "__main__":
    gpu = cases.Library(os.environ[CUDA_VARIABLE], cases.CUDA)
    shapes = [(size,) for size in cases.SIZES] + [(cases.LOOKERS * cases.CHUNK + 1,)]
    masks = [np.random.default_rng(1).random(shape) < 0.4 for shape in shapes]
    for name, attributes in cases.RULES:
        variables = cases.draw(shapes, name, attributes)
        cases.Call(name, attributes, variables).run(gpu)
        cases.Call(name, attributes, variables, factor=0.37, masks=masks).run(gpu)
    print("all updated")
