"""Reductions over axes given as input, left out, or empty."""

import numpy as np
from case import case, normal

AXES = np.array([0, -1])

CASES = [
    case("ReduceSum", normal(2, 3, 4), AXES, label="axes", wrt=["a"]),
    case("ReduceSum", normal(2, 3, 4), AXES, label="axes-nokeep", wrt=["a"], keepdims=0),
    case("ReduceSum", normal(2, 3, 4), label="all"),
    case("ReduceSum", normal(2, 3, 4), label="all-nokeep", keepdims=0),
    case("ReduceSum", normal(2, 3), label="noop", noop_with_empty_axes=1, keepdims=0),
]
