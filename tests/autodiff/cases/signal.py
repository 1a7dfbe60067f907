"""DFT and STFT of real and complex signals."""

import numpy as np

from autodiff.case import case, fixed, normal

RANKS = ("static", "dynamic")


def dft(shape, length=None, axis=None, opset=20, label="", **attributes):
    inputs = [normal(*shape), None if length is None else np.array(length)]
    if axis is not None and opset >= 20:
        inputs.append(np.array(axis))
    elif axis is not None:
        attributes["axis"] = axis
    while inputs[-1] is None:
        inputs.pop()
    name = f"{shape}-{length}-{axis}-{'-'.join(attributes)}-{opset}{label}"
    # The axis has to be known.
    row = case("DFT", *inputs, label=name, wrt=["a"], opset=opset, **attributes)
    return fixed(row) if len(inputs) > 1 else row


def stft(shape, step, window=None, length=None, **more):
    inputs = [normal(*shape), np.array(step), window, None if length is None else np.array(length)]
    while inputs[-1] is None:
        inputs.pop()
    label = f"{shape}-{step}-{window is not None}-{length}-{'-'.join(more)}"
    row = case("STFT", *inputs, label=label, wrt=["a"] if window is None else ["a", "c"], shapes=RANKS, **more)
    return row, fixed(row)


CASES = [
    dft((2, 6, 1)),
    dft((2, 5, 2)),
    dft((2, 5, 2), inverse=1),
    dft((2, 6, 1), onesided=1),
    dft((2, 5, 1), onesided=1),
    dft((2, 6, 1), length=4, onesided=1),
    dft((2, 6, 1), length=9, onesided=1),
    dft((2, 6, 2), length=4),
    dft((2, 6, 2), length=8, inverse=1),
    dft((2, 6, 3, 1), axis=1),
    dft((2, 6, 3, 2), axis=-3, inverse=1),
    dft((2, 6, 3, 1), axis=1, onesided=1, length=7),
    dft((2, 6, 3, 1), axis=2, opset=18),
    dft((2, 6, 1), opset=19, onesided=1),
    dft((2, 5, 2), length=7, inverse=1, opset=18),
    *stft((2, 16, 1), 3, normal(5, seed=1), 5),
    *stft((2, 16, 1), 4, normal(8, seed=1)),
    *stft((1, 12, 1), 2, None, 6),
    *stft((1, 12, 1), 3, normal(6, seed=1), 6, onesided=0),
]
