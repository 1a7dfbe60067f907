"""Attention with operands rounded to bfloat16: against NumPy, with dot products and in tiles, for any number of threads.

A number that is computed before it is rounded, as probabilities are, may differ in its last float32 places from the
reference's and then, seldom, round to the other neighbour, 2^-8 of it away. So errors are compared with those of
float32's attention, which rounds nothing: results are far nearer to the reference that rounds all operands.
"""

from dataclasses import replace

import bfloat16_reference as reference
import numpy as np
import pytest
from attention_reference import Attention, run_both, summed_to
from test_native_attention import CASES, PATH, REFUSED

from onnxtrain.runtime import native

ROUNDING = 2.0**-8  # of a number of eight bits to a neighbour
FLOAT_PLACES = 2.0**-16  # of rounded sums, and of exponentials of sums
KINDS = ("dot products", "tiles")

# Heads that are long enough for these kernels, with sizes around the edges of tiles (16 and 32), panels (64) and blocks
# (32 queries, 64 keys).
LONG = {
    name: replace(case, compute="bfloat16")
    for name, case in CASES.items()
    if min(case.batch, case.heads, case.queries, case.keys) > 0
    and (case.keys > 128 or case.keys * max(case.size, case.value_size) > 1800)
    and not (case.empty and not case.zero_empty_rows)
} | {
    name: replace(case, compute="bfloat16")
    for name, case in {
        "a head of 80": Attention(1, 2, 97, 97, 80, 80),
        "a head of 130": Attention(1, 2, 33, 66, 130, 70),
        "odd": Attention(2, 2, 31, 129, 33, 35, bias=(2, 1, 31, 129)),
        "causal, odd": Attention(1, 3, 161, 161, 32, 32, bias=(161, 161), causal=True),
        "one query, causal keys": Attention(3, 2, 1, 129, 32, 32, bias=(1, 129), masked=True),
    }.items()
}
MASKS = {"causal mask": np.tril(np.ones((200, 200), bool)), "band": np.tri(200, 200, 5, bool) & ~np.tri(200, 200, -70, bool)}


@pytest.fixture(params=KINDS)
def path(request, libraries):
    """A copy of the library that computes with dot products of AVX512-BF16, or in tiles of AMX."""
    if request.param == "tiles":
        return request.getfixturevalue("tiles_path")
    found, library = libraries.get("avx512", (None, None))
    if library is None or not library.onnxtrain_multiplies_bfloat16():
        pytest.skip("this CPU has no instruction for products of bfloat16")
    return str(found)


def expected(case, feeds, found):
    """From the operands' roundings; the gradients from the y and log_sum that were found."""
    values = reference.attention(feeds, case.attributes["scale"])
    if case.zero_empty_rows:
        empty = np.isneginf(feeds["bias"]).all(-1)  # of the queries
        values["log_sum"][..., empty], values["y"][:, empty] = -np.inf, 0
    gradients = reference.attention_gradient(feeds | found, case.attributes["scale"])
    slopes = gradients.pop("slopes")
    if "bias" in feeds:
        gradients["dbias"] = summed_to(slopes, feeds["bias"].shape)
    return values | gradients


def check(path, case, feeds):
    found = run_both(path, case, feeds)
    exact = run_both(path, replace(case, compute="float32"), feeds)
    with np.errstate(all="ignore"):
        wanted = expected(case, feeds, found)
    for name, array in wanted.items():
        assert found[name].dtype == np.float32
        assert found[name].shape == array.shape
        certain = np.isfinite(array)
        np.testing.assert_array_equal(found[name][~certain], array[~certain], err_msg=name)
        errors, apart = found[name][certain] - array[certain], found[name][certain] - exact[name][certain]
        size = np.sqrt(np.mean(np.square(array[certain]))) if certain.any() else 0.0
        assert np.abs(apart).max(initial=0) <= 16 * ROUNDING * max(size, np.abs(array[certain]).max(initial=0)), name
        assert np.abs(errors).max(initial=0) <= ROUNDING * size + 1e-6, name
        assert np.sqrt(np.mean(np.square(errors))) <= 0.1 * np.sqrt(np.mean(np.square(apart))) + FLOAT_PLACES * size, name


@pytest.mark.parametrize("name", LONG)
def test_against_rounded_operands(path, name):
    case = LONG[name]
    if case.zero_empty_rows:
        pytest.skip("the reference has no empty rows")
    check(path, case, case.draw(np.float32))


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("name", MASKS)
def test_masks_skip_what_they_hide(path, name, lowest):
    """The same as without skipping: a mask that is no mask alone has a number other than zero."""
    case = Attention(2, 3, 200, 200, 32, 48, bias=(200, 200), compute="bfloat16")
    feeds = case.draw(np.float32) | {"bias": np.where(MASKS[name], np.float32(0), np.float32(lowest))}
    check(path, case, feeds)
    found = run_both(path, case, feeds)
    other = feeds["bias"].copy()
    other[0, 0] = 1e-30  # adds nothing to a score, and shows every row to be read
    for result, array in run_both(path, case, feeds | {"bias": other}).items():
        np.testing.assert_array_equal(array, found[result], err_msg=result)


@pytest.mark.parametrize("name", LONG)
def test_threads_do_not_change_a_bit(path, name):
    case = LONG[name]
    feeds = case.draw(np.float32)
    one, *others = (run_both(path, case, feeds, threads) for threads in (1, 2, 3))
    for other in others:
        for result, array in one.items():
            np.testing.assert_array_equal(array, other[result], err_msg=result)


@pytest.mark.parametrize("name", ["text", "causal", "causal, odd", "odd", "a head of 80"])
def test_examples_alone_have_the_bits_of_the_batch(path, name):
    """A single example's queries are shared out among more tasks. Only the gradient of a bias is a sum over the batch."""
    case = replace(LONG[name], batch=7)
    if case.bias is not None and len(case.bias) == 4 and case.bias[0] > 1:
        case = replace(case, bias=(7, *case.bias[1:]))
    feeds = case.draw(np.float32)
    found = run_both(path, case, feeds)
    for example in range(case.batch):
        own = {key: array[example : example + 1] for key, array in feeds.items() if key != "bias"}
        if "bias" in feeds:
            by_example = feeds["bias"].ndim == 4 and len(feeds["bias"]) > 1
            own["bias"] = feeds["bias"][example : example + 1] if by_example else feeds["bias"]
        for key, array in run_both(path, case, own).items():
            if key != "dbias":
                np.testing.assert_array_equal(array, found[key][example : example + 1], err_msg=key)


def test_empty_rows_are_zero_or_not_a_number(path):
    case = LONG["empty rows"]
    feeds = case.draw(np.float32)
    empty = np.isin(np.arange(case.queries), case.empty)
    found = run_both(path, case, feeds)
    assert all(np.isfinite(array).all() for name, array in found.items() if name != "log_sum")
    np.testing.assert_array_equal(found["y"][:, empty], 0)
    np.testing.assert_array_equal(found["dq"][:, empty], 0)
    np.testing.assert_array_equal(found["log_sum"][..., empty], -np.inf)
    found = run_both(path, replace(case, zero_empty_rows=0), feeds)
    np.testing.assert_array_equal(np.isnan(found["y"]).all((0, 2, 3)), empty)
    np.testing.assert_array_equal(np.isnan(found["y"]).any((0, 2, 3)), empty)
    assert np.isnan(found["dk"]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_its_rows(path, value):
    case = Attention(queries=70, keys=66, compute="bfloat16")
    feeds = case.draw(np.float32)
    feeds["q"][1, 13, 2, 5] = value
    found = run_both(path, case, feeds)
    reached = np.zeros(found["y"].shape[:3], bool)
    reached[1, 13, 2] = True
    np.testing.assert_array_equal(np.isnan(found["y"]).any(-1), reached)
    np.testing.assert_array_equal(np.isnan(found["dq"]).any(-1), reached)


def test_large_scores_do_not_overflow(path):
    case = Attention(queries=70, keys=66, bias=(70, 66), compute="bfloat16")
    feeds = case.draw(np.float32)
    feeds["bias"] *= 1e4
    found, wanted = run_both(path, case, feeds), case.expected(feeds)[0]
    for name in ("y", "dv"):
        np.testing.assert_allclose(found[name], wanted[name], atol=0.05)


@pytest.mark.parametrize("name", ["short, causal", "tiny"])
def test_short_heads_have_the_bits_of_float32(path, name):
    case = CASES[name]
    feeds = case.draw(np.float32)
    found = run_both(path, replace(case, compute="bfloat16"), feeds)
    for result, array in run_both(path, case, feeds).items():
        np.testing.assert_array_equal(array, found[result], err_msg=result)


@pytest.mark.parametrize("name", ["baseline", "avx2"])
def test_cpus_without_the_instructions_compute_float32(libraries, name):
    if name not in libraries:
        pytest.skip(f"this build or this CPU lacks {name}")
    case, file = CASES["text"], str(libraries[name][0])
    feeds = case.draw(np.float32)
    found = run_both(file, replace(case, compute="bfloat16"), feeds)
    for result, array in run_both(file, case, feeds).items():
        np.testing.assert_array_equal(array, found[result], err_msg=result)


@pytest.mark.parametrize(
    ("dtype", "compute", "sentence"),
    [
        (np.float32, "float16", "attribute 'compute' is 'float16': it must be float32 or bfloat16"),
        (np.float64, "bfloat16", "its inputs have type double: they must be float"),
    ],
)
def test_other_types_and_attributes_are_refused(dtype, compute, sentence):
    case = Attention(compute=compute)
    with pytest.raises(REFUSED, match=f"Attention: .*{sentence}"):
        run_both(PATH, case, case.draw(dtype))


def test_the_default_library_rounds_where_the_cpu_can():
    case = CASES["vision"]
    feeds = case.draw(np.float32)
    exact, found = (run_both(PATH, replace(case, compute=compute), feeds)["y"] for compute in ("float32", "bfloat16"))
    assert (np.abs(found - exact).max() > 1e-4) == native.multiplies_bfloat16()
