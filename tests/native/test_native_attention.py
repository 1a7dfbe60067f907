"""Attention's kernels: against NumPy in float64, on all instruction sets, for any number of threads."""

from dataclasses import replace

import numpy as np
import pytest
from attention_reference import OUTPUTS, Attention, run, run_both
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import OTHER_TYPES

from onnxtrain.runtime.native import custom_ops_library
from sentences import raises_sentence

PATH = str(custom_ops_library())
TYPES = [np.float32, np.float64]
LAST_PLACES = 16
APART = ("Attention", "AttentionGradient")  # operators of q, k and v in three inputs
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)

# Sizes around the edges of vectors (2 to 16), tiles (6 or 8 rows, up to 64 columns) and blocks (72 queries).
CASES = {
    "one element": Attention(1, 1, 1, 1, 1, 1),
    "tiny": Attention(queries=5, keys=5, size=7, value_size=1),
    "one key": Attention(queries=65, keys=1, size=64, value_size=7),
    "one query": Attention(queries=1, keys=200, size=80, value_size=64, bias=(200,)),
    "vision": Attention(queries=65, keys=65, size=64, value_size=64),
    "text": Attention(queries=128, keys=128, size=64, value_size=64, bias=(2, 1, 1, 128), masked=True),
    "causal": Attention(queries=128, keys=128, bias=(128, 128), causal=True),
    "causal, more keys": Attention(queries=64, keys=200, bias=(2, 3, 64, 200), causal=True),
    "values are wider": Attention(queries=200, keys=64, size=32, value_size=80, bias=(1, 3, 200, 64)),
    "values are narrower": Attention(queries=64, keys=200, size=80, value_size=32, bias=(3, 1, 200)),
    "long": Attention(1, 2, 300, 1100, 8, 8, bias=(1100,), masked=True),
    "a number as bias": Attention(bias=()),
    "a number per query as bias": Attention(queries=9, bias=(3, 9, 1)),
    "masked": Attention(queries=65, keys=128, size=7, value_size=64, bias=(65, 128), masked=True),
    "empty rows": Attention(queries=128, keys=65, bias=(128, 65), masked=True, empty=(0, 3, 127), zero_empty_rows=1),
    "all rows empty": Attention(queries=3, keys=17, bias=(3, 17), empty=(0, 1, 2), zero_empty_rows=1),
    "one head": Attention(1, 1, 256, 64, 16, 16),
    # Short heads, side by side in vectors: groups that are full, and one that is not.
    "columns as tokens": Attention(5, 4, 33, 33, 8, 8),
    "short, a mask per example": Attention(9, 2, 16, 16, 32, 32, bias=(9, 1, 1, 16), masked=True),
    "short, positions": Attention(3, 6, 17, 17, 24, 24, bias=(6, 17, 17)),
    "short, all in one": Attention(7, 3, 20, 30, 12, 5, bias=(7, 3, 20, 30), masked=True),
    "short, causal": Attention(4, 5, 64, 64, 16, 16, bias=(64, 64), causal=True),
    "short, values are wider": Attention(4, 3, 9, 12, 3, 40, bias=(3, 9, 1)),
    "short, empty rows": Attention(6, 3, 18, 20, 8, 8, bias=(18, 20), masked=True, empty=(0, 17), zero_empty_rows=1),
    "short, many queries": Attention(2, 3, 300, 20, 8, 8, bias=(2, 3, 1, 20), masked=True),
    "long, positions": Attention(2, 3, 150, 203, 16, 24, bias=(3, 150, 203)),
    "nothing of a size": Attention(size=0),
    "nothing of a value": Attention(value_size=0),
    "no batch": Attention(batch=0, bias=(5, 5)),
    "no query": Attention(queries=0, bias=(0, 5)),
    "no key": Attention(keys=0, bias=(5, 0)),
    "no head": Attention(heads=0),
}


def check(path, case, dtype, threads=1):
    """Within some last places of the terms that each number is the sum of."""
    feeds = case.draw(dtype)
    found = run_both(path, case, feeds, threads)
    values, sizes = case.expected(feeds)
    for name, wanted in values.items():
        assert found[name].dtype == dtype
        assert found[name].shape == wanted.shape
        certain = np.isfinite(wanted)
        np.testing.assert_array_equal(found[name][~certain], wanted[~certain], err_msg=name)
        errors = np.abs(found[name][certain] - wanted[certain]) / np.maximum(sizes[name][certain], 1e-30)
        assert errors.max(initial=0) <= LAST_PLACES * np.finfo(dtype).eps, (name, errors.max() / np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(instruction_set, library_path, name, dtype):
    check(library_path, CASES[name], dtype)


@st.composite
def attentions(draw):
    sizes = st.sampled_from([1, 2, 5, 17, 64, 65, 80])
    case = Attention(
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 4)),
        queries=draw(st.integers(1, 150)),
        keys=draw(st.integers(1, 150)),
        size=draw(sizes),
        value_size=draw(sizes),
    )
    full = (case.batch, case.heads, case.queries, case.keys)
    rank = draw(st.integers(-1, 4))
    if rank < 0:
        return case
    bias = tuple(size if draw(st.booleans()) else 1 for size in full[4 - rank :])
    return replace(case, bias=bias, masked=bias[-1:] == (case.keys,))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=attentions(), dtype=st.sampled_from(TYPES))
def test_any_sizes_and_bias(library_path, case, dtype):
    check(library_path, case, dtype)


SHORT = [name for name in CASES if name.startswith("short")]


@pytest.mark.parametrize("name", SHORT)
def test_examples_alone_have_the_bits_of_the_batch(instruction_set, library_path, name):
    """Only the gradient of a bias is a sum over the batch."""
    case = CASES[name]
    feeds = case.draw(np.float32)
    found = run_both(library_path, case, feeds)
    for example in range(case.batch):
        own = {key: array[example : example + 1] for key, array in feeds.items() if key != "bias"}
        if "bias" in feeds:
            by_example = feeds["bias"].ndim == 4 and len(feeds["bias"]) > 1
            own["bias"] = feeds["bias"][example : example + 1] if by_example else feeds["bias"]
        for key, array in run_both(library_path, case, own).items():
            if key != "dbias":
                np.testing.assert_array_equal(array, found[key][example : example + 1], err_msg=key)


@pytest.mark.parametrize(
    "name", ["text", "vision", "causal", "long", "one head", "masked", "tiny", "long, positions", *SHORT]
)
def test_threads_do_not_change_a_bit(name):
    case = CASES[name]
    feeds = case.draw(np.float32)
    one, *others = (run_both(PATH, case, feeds, threads) for threads in (1, 2, 3))
    for other in others:
        for result, array in one.items():
            np.testing.assert_array_equal(array, other[result], err_msg=result)


@pytest.mark.parametrize(("operator", "wanted"), [(name, (result,)) for name in APART for result in OUTPUTS[name]])
def test_unrequested_results_are_left_out(operator, wanted):
    case = CASES["masked"]
    feeds = case.draw(np.float32)
    every = run_both(PATH, case, feeds)
    found = run(PATH, operator, feeds | every, case.attributes, wanted=wanted)
    np.testing.assert_array_equal(found[wanted[0]], every[wanted[0]])


def test_empty_rows_without_the_attribute_are_not_a_number(instruction_set, library_path):
    case = replace(CASES["empty rows"], zero_empty_rows=0)
    feeds = case.draw(np.float32)
    found = run_both(library_path, case, feeds)
    is_empty = np.isin(np.arange(case.queries), case.empty)
    np.testing.assert_array_equal(np.isnan(found["y"]).all((0, 2, 3)), is_empty)
    np.testing.assert_array_equal(np.isnan(found["y"]).any((0, 2, 3)), is_empty)
    np.testing.assert_array_equal(found["log_sum"][..., is_empty], -np.inf)
    np.testing.assert_array_equal(np.isnan(found["dq"]).any((0, 2, 3)), is_empty)
    assert np.isnan(found["dk"]).all()
    assert np.isnan(found["dv"]).all()


@pytest.mark.parametrize("zero_empty_rows", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_its_rows(instruction_set, library_path, value, zero_empty_rows):
    case = Attention(queries=70, keys=33, size=16, value_size=16, zero_empty_rows=zero_empty_rows)
    feeds = case.draw(np.float32)
    feeds["q"][1, 13, 2, 5] = value
    found = run_both(library_path, case, feeds)
    reached = np.zeros(found["y"].shape[:3], bool)
    reached[1, 13, 2] = True
    np.testing.assert_array_equal(np.isnan(found["y"]).any(-1), reached & (zero_empty_rows == 0))
    if zero_empty_rows:
        np.testing.assert_array_equal(found["y"][1, 13, 2], 0)
        assert np.isfinite(found["dv"]).all()
    else:
        np.testing.assert_array_equal(np.isnan(found["dq"]).any(-1), reached)


def test_what_a_query_does_not_see_may_be_anything(instruction_set, library_path):
    """Keys behind the last one that a block of queries sees are not read."""
    case = Attention(queries=5, keys=200, bias=(200,))
    feeds = case.draw(np.float32)
    feeds["bias"][60:] = -np.inf
    found = run_both(library_path, case, feeds)
    feeds["v"][:, 64:] = 1e30
    feeds["k"][:, 64:] = 1e10
    for name, array in run_both(library_path, case, feeds).items():
        np.testing.assert_array_equal(array, found[name], err_msg=name)


def test_large_scores_do_not_overflow(instruction_set, library_path):
    case = Attention(queries=20, keys=40, bias=(20, 40))
    feeds = case.draw(np.float32)
    feeds["bias"] *= 1e4
    found, wanted = run_both(library_path, case, feeds), case.expected(feeds)[0]
    for name in ("y", "dv"):
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-2)
    np.testing.assert_allclose(found["log_sum"], wanted["log_sum"], rtol=1e-6)


GOOD = Attention(batch=2, heads=3, queries=5, keys=7, size=4, value_size=6, bias=(5, 7))


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"q": ones(5, 12)}, r"\(q\) has shape \[5, 12\], and must have four axes: \[batch, queries, heads, size\]"),
        ({"k": ones(2, 7, 12)}, r"\(k\) has shape \[2, 7, 12\], and must have four axes: \[batch, keys, heads, size\]"),
        ({"v": ones(6)}, r"\(v\) has shape \[6\], and must have four axes: \[batch, keys, heads, value size\]"),
        ({"k": ones(2, 7, 3, 5)}, r"\(k\) has shape \[2, 7, 3, 5\], and must have shape \[2, 7, 3, 4\]"),
        ({"v": ones(2, 8, 3, 6)}, r"\(v\) has shape \[2, 8, 3, 6\], and must have shape \[2, 7, 3, 6\]"),
        ({"bias": ones(7, 5)}, r"\(bias\) has shape \[7, 5\], and must broadcast to \[2, 3, 5, 7\]"),
        ({"bias": ones(1, 1, 1, 1, 1)}, r"\(bias\) has shape \[1, 1, 1, 1, 1\], and must broadcast to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("operator", APART)
def test_inputs_that_do_not_fit_are_refused(operator, changed, sentence):
    feeds = GOOD.draw(np.float32)
    feeds |= run(PATH, "Attention", feeds, GOOD.attributes)
    with pytest.raises(REFUSED, match=f"{operator}: input .*{sentence}"):
        run(PATH, operator, feeds | changed, GOOD.attributes)


@pytest.mark.parametrize(
    "changed",
    [
        {"bias": np.ones((5, 7))},
        {"v": np.ones((2, 7, 3, 6))},
        {name: np.ones(1, np.float16) for name in ("q", "k", "v", "bias", "dy", "y", "log_sum")},
    ],
)
@pytest.mark.parametrize("operator", APART)
def test_types_that_no_kernel_has(operator, changed):
    feeds = GOOD.draw(np.float32)
    feeds |= run(PATH, "Attention", feeds, GOOD.attributes)
    with pytest.raises(REFUSED, match=OTHER_TYPES % operator):
        run(PATH, operator, feeds | changed, GOOD.attributes)


@pytest.mark.parametrize("name", ["dy", "y", "log_sum"])
def test_what_the_gradient_gets_must_fit_the_forward_pass(name):
    feeds = GOOD.draw(np.float32)
    feeds |= run(PATH, "Attention", feeds, GOOD.attributes)
    with pytest.raises(REFUSED, match=rf"AttentionGradient: input \d \({name}\) has shape .* and must have shape"):
        run(PATH, "AttentionGradient", feeds | {name: feeds[name][:, :1]}, GOOD.attributes)
    with pytest.raises(REFUSED, match=OTHER_TYPES % "AttentionGradient"):
        run(PATH, "AttentionGradient", feeds | {name: feeds[name].astype(np.float64)}, GOOD.attributes)


def test_the_gradient_of_a_bias_needs_a_bias():
    feeds = GOOD.draw(np.float32)
    del feeds["bias"]
    feeds |= run(PATH, "Attention", feeds, GOOD.attributes)
    with raises_sentence("gradient_of_missing_input", output=3, input=6):
        run(PATH, "AttentionGradient", feeds, GOOD.attributes, wanted=OUTPUTS["AttentionGradient"])


def test_the_scale_is_required():
    with pytest.raises(REFUSED, match=r"Attention: .*scale"):
        run(PATH, "Attention", GOOD.draw(np.float32), {})


PACKED = {
    "one element": Attention(1, 1, 1, 1, 1, 1),
    "vision": Attention(queries=65, keys=65, size=64, value_size=64),
    "causal": Attention(queries=128, keys=128, bias=(128, 128), causal=True),
    "positions": Attention(2, 3, 150, 150, 24, 24, bias=(3, 150, 150)),
    "short, side by side": Attention(5, 4, 33, 33, 8, 8),
    "short, positions": Attention(3, 6, 17, 17, 24, 24, bias=(6, 17, 17)),
    "nothing of a size": Attention(size=0, value_size=0),
    "no batch": Attention(batch=0, bias=(5, 5)),
    "in bfloat16": Attention(2, 3, 80, 80, 32, 32, compute="bfloat16"),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", PACKED)
def test_packed_operands_give_the_same_bits(instruction_set, library_path, name, dtype):
    case = PACKED[name]
    if dtype == np.float64:
        case = replace(case, compute="float32")
    feeds = case.draw(dtype)
    apart = run_both(library_path, case, feeds)
    packed = {key: value for key, value in feeds.items() if key in ("dy", "bias")}
    packed["qkv"] = np.stack([feeds[each] for each in "qkv"], axis=2)
    found = run(library_path, "PackedAttention", packed, case.attributes)
    gradient = run(library_path, "PackedAttentionGradient", packed | found, case.attributes)
    for index, each in enumerate(("dq", "dk", "dv")):
        np.testing.assert_array_equal(gradient["dqkv"][:, :, index], apart[each], err_msg=each)
    for each in ("y", "log_sum", *(["dbias"] if "bias" in feeds else [])):
        np.testing.assert_array_equal((found | gradient)[each], apart[each], err_msg=each)


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 5, 2, 4, 8), (2, 5, 3, 4, 8, 1)])
def test_packed_operands_have_five_axes(shape):
    with raises_sentence("packed_attention_axes"):
        run(PATH, "PackedAttention", {"qkv": np.zeros(shape, np.float32)}, Attention().attributes)
