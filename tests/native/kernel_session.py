"""One call of an operator of the native library on ONNX Runtime."""

from __future__ import annotations

import numpy as np
from kernel_cases import Case
from onnx import helper
from optimizer_sessions import element_type, session

from onnxtrain.runtime.native import custom_ops_library


def run(case: Case) -> list[np.ndarray]:
    """The outputs of a case, all of the type of its last floating input."""
    feeds = {name: array for name, array in case.feeds.items() if array is not None}
    names = [name if array is not None else "" for name, array in case.feeds.items()]
    while names[-1] == "":
        names.pop()
    outputs = [f"output{index}" for index in range(case.outputs)]
    kinds = [array for array in feeds.values() if array.dtype.kind == "f"]
    node = helper.make_node(case.operator, names, outputs, domain=case.domain, **case.attributes)
    made = session(
        str(custom_ops_library()),
        [node],
        [(name, element_type(array), None) for name, array in feeds.items()],
        [(name, element_type(kinds[-1]), None) for name in outputs],
        threads=2,
    )
    return made.run(None, feeds)
