"""Counter-based dropout as an operator of this project's domain, which a graph pass emits."""

import numpy as np

from autodiff.case import Case, case, normal

COUNT = np.array(2**40 + 5, np.int64)


def dropout(label: str, *shape: int, ratio: float = 0.3, seed: int = 7, count: np.ndarray = COUNT, **options) -> Case:
    share = np.array(ratio)
    return case(
        "CountedDropout",
        normal(*shape),
        share,
        count,
        domain="onnxtrain",
        label=f"fused-{label}",
        seed=seed,
        wrt="a",
        **options,
    )


CASES = [
    dropout("vector", 7),
    dropout("image", 2, 3, 4, 5),
    dropout("large-seed", 20, seed=2**61 + 12345),
    dropout("negative-count", 9, count=np.array([-1], np.int64)),
    dropout("nothing-dropped", 6, ratio=0.0),
    dropout("nearly-all-dropped", 40, ratio=0.9),
    dropout("no-elements", 2, 0, shapes=("dynamic", "unknown")),
]
