"""Convolutions of any geometry, for property tests."""

from __future__ import annotations

from convolution_reference import Convolution
from hypothesis import strategies as st


@st.composite
def convolutions(draw, inputs, outputs, *, groups):
    """Draw a convolution of at most so many channels, of several groups only where that is asked for."""
    rank = draw(st.integers(1, 3))
    grouped = groups and draw(st.booleans())
    sizes = st.integers(1, {1: 60, 2: 17, 3: 7}[rank])
    few = st.integers(1, 3)

    def each(numbers, count=rank):
        return tuple(draw(st.lists(numbers, min_size=count, max_size=count)))

    return Convolution(
        batch=draw(st.integers(0, 4)),
        group=draw(st.integers(2, 20)) if grouped else 1,
        inputs=draw(few if grouped else st.integers(1, inputs)),
        outputs=draw(few if grouped else st.integers(1, outputs)),
        size=each(sizes),
        kernel=each(few),
        strides=each(few),
        dilations=each(st.integers(1, 2)),
        pads=each(st.integers(0, 3), 2 * rank),
        bias=draw(st.booleans()),
    )
