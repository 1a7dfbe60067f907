"""Every argument of every function in `onnxtrain.kernels`, with invalid values: refused in one sentence."""

import contextlib
import ctypes
import inspect
import math

import numpy as np
import pytest

from onnxtrain import kernels
from onnxtrain.errors import OperatorError
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.runtime import native
from sentences import raises_sentence

pytestmark = pytest.mark.sampled(1)  # each case is cheap

FUNCTIONS = {name: getattr(kernels, name) for name in kernels.__all__ if name.endswith("_")}
STATES = {
    f"{name.lower()}_": sum(state.used(entry.settings().node_attributes()) for state in entry.schema.states)
    for name, entry in OPTIMIZERS.items()
}
HUGE = 10**5000  # Python refuses to write it in decimal


def call(name, **changed):
    """One step with sensible arguments but for those that are changed; the arrays it was given."""
    arrays = {
        "parameters": [np.ones(3, np.float32)],
        "gradients": [np.ones(3, np.float32)],
        "states": [np.ones(3, np.float32) for _ in range(STATES[name])],
    }
    given = {"learning_rate": 0.1, "alpha": 0.9, "beta": 0.9, "step": 1}
    if name == "ssgd_":
        given["alpha"] = 0.0
    known = inspect.signature(FUNCTIONS[name]).parameters
    FUNCTIONS[name](**{**arrays, **{key: value for key, value in given.items() if key in known}, **changed})


def arguments(name, kind):
    """The arguments of a function whose annotation is `kind`."""
    found = inspect.signature(FUNCTIONS[name], eval_str=True).parameters.values()
    return [argument.name for argument in found if argument.annotation is kind]


def every(kind):
    return [(name, argument) for name in FUNCTIONS for argument in arguments(name, kind)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sensible_arguments_are_taken(name):
    call(name)


INTEGERS = [
    (2**63, r"is 9223372036854775808: it must be at most 2\*\*"),
    (2**64 + 1, r"is an integer of 65 bits: it must be at most 2\*\*"),
    (HUGE, r"is an integer of 16610 bits: it must be at most 2\*\*"),
    (-HUGE, r"is an integer of 16610 bits: it must be (1|-2\*\*63) or more"),
    (math.nan, "is nan: it must be an integer from"),
    (1.0, "is 1.0: it must be an integer from"),
    (True, "is True: it must be an integer from"),
    (np.True_, r"is (np\.)?True_?: it must be an integer from"),
    ("1", "is '1': it must be an integer from"),
    (None, "is None: it must be an integer from"),
    ([1], "is of type list: it must be an integer from"),
    (np.ones(2, np.int64), "is of type ndarray: it must be an integer from"),
]


@pytest.mark.parametrize(("value", "sentence"), INTEGERS, ids=range(len(INTEGERS)))
@pytest.mark.parametrize(("name", "argument"), every(int))
def test_integers(name, argument, value, sentence):
    with pytest.raises(OperatorError, match=f"^{name[:-1]}: {argument} {sentence}"):
        call(name, **{argument: value})


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("threads", [2**31, 2**32 + 1, 2**40])
def test_threads_do_not_wrap(name, threads):
    with pytest.raises(OperatorError, match=rf"threads is {threads}: it must be at most 2\*\*31 - 1\."):
        call(name, threads=threads)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("threads", [0, -1, -(2**31), -(2**63)])
def test_threads_are_at_least_one(name, threads):
    with pytest.raises(OperatorError, match=rf"threads is {threads}: it must be 1 or more\."):
        call(name, threads=threads)


@pytest.mark.parametrize("threads", [1, np.int64(2), np.uint8(3), 2**31 - 1])
def test_any_number_of_threads_gives_the_same(threads):
    x, y = (np.linspace(-1, 1, 300_001, dtype=np.float32) for _ in range(2))
    kernels.ssgd_([x], [np.ones_like(x)], learning_rate=0.1, threads=threads)
    kernels.ssgd_([y], [np.ones_like(y)], learning_rate=0.1)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("name", "argument"), [pair for pair in every(int) if pair[1] == "step"])
def test_steps_at_the_ends_of_their_range(name, argument):
    for step in (-(2**63), 2**63 - 1, np.int64(5)):
        call(name, step=step)


NUMBERS = [
    ("0.1", r"is '0\.1': it must be a number that float64 holds"),
    (b"1", "is b'1': it must be a number that float64 holds"),
    (None, "is None: it must be a number that float64 holds"),
    (True, "is True: it must be a number that float64 holds"),
    (1j, "is of type complex: it must be a number"),
    ([0.1], "is of type list: it must be a number"),
    (np.ones(1), "is of type ndarray: it must be a number"),
    (HUGE, "is an integer of 16610 bits: it must be a number that float64 holds"),
    ("x" * 100, r"is 'x{56}\.\.\.: it must be a number"),
]


@pytest.mark.parametrize(("value", "sentence"), NUMBERS, ids=range(len(NUMBERS)))
@pytest.mark.parametrize(("name", "argument"), every(float))
def test_numbers(name, argument, value, sentence):
    with pytest.raises(OperatorError, match=f"^{name[:-1]}: {argument} {sentence}"):
        call(name, **{argument: value})


@pytest.mark.parametrize(("name", "argument"), [pair for pair in every(float) if pair[1] != "learning_rate"])
def test_attributes_that_float32_cannot_hold(name, argument):
    with raises_sentence("argument_magnitude", what=f"{name[:-1]}: {argument}", got=1e300):
        call(name, **{argument: 1e300})


@pytest.mark.parametrize(("name", "argument"), every(float))
def test_numeric_types_and_nan_are_accepted_as_attributes(name, argument):
    for value in (math.nan, math.inf, -math.inf, np.float32(0.5), np.int8(1), 3):
        # Two rules have special ranges; SSGD has a state if alpha is above 0, others with momentum.
        own = name in ("ssgd_", "adagrad_") or argument == "momentum"
        with contextlib.suppress(*((OperatorError,) if own else ())):
            call(name, **{argument: value})


@pytest.mark.parametrize("value", [None, 1, b"l1", ["l1"], 0.5])
@pytest.mark.parametrize(("name", "argument"), every(str))
def test_words(name, argument, value):
    with pytest.raises(OperatorError, match=rf"^{name[:-1]}: {argument} is .*: it must be a string\."):
        call(name, **{argument: value})


@pytest.mark.parametrize(("name", "argument"), every(str))
@pytest.mark.parametrize("value", ["l1\0", "\ud800", "", "x" * 10_000])
def test_words_that_there_are_not(name, argument, value):
    with pytest.raises(OperatorError, match=f"{argument} is "):
        call(name, **{argument: value})


LISTS = [None, 3, 0.5, "abc", b"abc", {"a": np.ones(3)}, {1, 2}, np.float32(1), np.array(1.0)]


@pytest.mark.parametrize("values", LISTS, ids=repr)
@pytest.mark.parametrize("argument", ["parameters", "gradients", "states"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_lists_of_arrays(name, argument, values):
    with pytest.raises(OperatorError, match=f"^{argument} is .*: it must be a list of arrays"):
        call(name, **{argument: values})


THINGS = [
    None,
    3,
    "x",
    [1.0],
    np.ones(3, np.int32),
    np.ones(3, np.float16),
    np.ones(3, np.complex64),
    np.ones(3, object),
    np.ones(3, ">f4"),
    np.array(["a", "b", "c"]),
    np.zeros(3, [("a", np.float32)]),
    np.ones(6, np.float32)[::2],
    np.ones((3, 2), np.float32).T,
    np.ones(13, np.uint8)[1:].view(np.float32),
    np.ones(4, np.float32),
    np.ones((3, 1), np.float32),
    np.float32(1),
]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: f"{type(thing).__name__} {getattr(thing, 'dtype', '')}")
@pytest.mark.parametrize("argument", ["parameters", "gradients", "states"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays(name, argument, thing):
    if argument == "states" and STATES[name] == 0:
        pytest.skip("it has no states")
    wrong = [thing] * (1 if argument != "states" else STATES[name])
    with pytest.raises(OperatorError, match=r"(parameters|gradients|states)\[\d\] (is|has|and)"):
        call(name, **{argument: wrong})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_list_may_be_anything_to_iterate_over(name):
    call(name, parameters=iter([np.ones(3, np.float32)]), gradients=(np.ones(3, np.float32),))


def test_any_error_of_dlpack_is_reported():
    class Odd:
        def __dlpack__(self, **_):
            raise KeyError("odd")

        def __dlpack_device__(self):
            return (1, 0)

    with raises_sentence("no_dlpack", what="parameters[0]"):
        kernels.Bound([Odd()], [np.ones(1)])


def c_call(tensors, count, threads=1):
    return native.library().onnxtrain_update(b"Adam", tensors, count, threads, 0.1, 1, None, 0)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"type": 2}, b"a type is neither 0 (float) nor 1 (double)."),
        ({"type": -1}, b"a type is neither 0 (float) nor 1 (double)."),
        ({"count": -1}, b"an element count is negative or too large."),
        ({"count": 2**63 - 1}, b"an element count is negative or too large."),
        ({"count": -(2**63)}, b"an element count is negative or too large."),
        ({"parameter": None}, b"a buffer is null."),
        ({"gradient": None}, b"a buffer is null."),
        ({"states": (ctypes.c_void_p * 2)()}, b"a buffer is null."),
    ],
)
def test_the_c_functions_refuse_what_cannot_be(changed, sentence):
    arrays = [np.ones(3, np.float32) for _ in range(4)]
    tensors = (native.Tensors * 1)()
    tensors[0].count = 3
    tensors[0].parameter, tensors[0].gradient, *states = (array.ctypes.data for array in arrays)
    tensors[0].states[:] = states
    assert c_call(ctypes.byref(tensors), 1) is None
    for name, value in changed.items():
        setattr(tensors[0], name, value)
    assert c_call(ctypes.byref(tensors), 1) == sentence


@pytest.mark.parametrize(
    ("name", "attribute", "sentence"),
    [
        (b"Nadam", (b"alpha", None, 0.5), b"there is no optimizer 'Nadam'."),
        (b"Adam", (b"aplha", None, 0.5), b"there is no attribute 'aplha'."),
        (b"Adam", (b"alpha", b"0.5", 0.0), b"alpha is a string: it must be a number."),
        (b"SSGD", (b"measure", None, 0.5), b"measure is a number: it must be a string."),
        (b"Momentum", (b"alpha", None, 0.5), b"beta is missing."),
        (b"Adam", (None, None, 0.5), b"a name is null."),
        (None, (b"alpha", None, 0.5), b"a name or a list is null."),
    ],
)
def test_the_c_functions_refuse_attributes_that_there_are_not(name, attribute, sentence):
    given = native.Attribute(*attribute)
    assert native.library().onnxtrain_update(name, None, 0, 1, 0.1, 1, ctypes.byref(given), 1) == sentence


def test_the_c_functions_refuse_no_list_and_no_thread():
    assert c_call(None, 1) == b"the list of tensors is null."
    assert c_call(None, 0) is None
    assert c_call(None, 0, 0) == b"threads is less than 1."
    assert c_call(None, 0, -(2**31)) == b"threads is less than 1."


@pytest.mark.parametrize(("arrays", "threads", "passes"), [(0, 1, 1), (4, 1, 1), (2**40, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_streaming_refuses_what_cannot_be(arrays, threads, passes):
    assert native.library().onnxtrain_stream(None, None, arrays, 0, threads, passes) == -1
