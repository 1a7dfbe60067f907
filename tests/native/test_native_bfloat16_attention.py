"""Attention with operands rounded to bfloat16: against NumPy, by dot products and in tiles, for any number of threads.

A number that is computed before it is rounded, as probabilities are, may differ in its last float32 places from the
reference's and then, seldom, round to the other neighbour, 2^-8 of it away. So errors are compared with those of
float32's attention, which rounds nothing: results are far nearer to the reference that rounds all operands.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import bfloat16_reference as reference
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from attention_reference import INPUTS, OUTPUTS, Attention, run, run_both, summed_to
from onnx import helper
from test_native_attention import CASES, PATH, REFUSED

from onnxtrain.autodiff.engine import Backward
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime import native

HERE = Path(__file__).parent
CMAKE = (HERE.parents[1] / "CMakeLists.txt").read_text()
ROUNDING = 2.0**-8  # of a number of eight bits to a neighbour
FLOAT_PLACES = 2.0**-16  # of rounded sums, and of exponentials of sums
KINDS = ("dot products", "tiles")

# Heads that are long enough for these kernels, with sizes around the edges of tiles (16 and 32), panels (64) and blocks
# (32 queries, 64 keys).
LONG = {
    name: replace(case, compute="bfloat16")
    for name, case in CASES.items()
    if min(case.batch, case.heads) > 0
    and min(case.queries, case.keys) >= 32
    and (case.keys > 128 or case.keys * max(case.size, case.value_size) > 1800)
} | {
    name: replace(case, compute="bfloat16")
    for name, case in {
        "a head of 80": Attention(1, 2, 97, 97, 80, 80),
        "a head of 130": Attention(1, 2, 33, 66, 130, 70),
        "odd": Attention(2, 2, 33, 129, 33, 35, bias=(2, 1, 33, 129)),
        "causal, odd": Attention(1, 3, 161, 161, 32, 32, bias=(161, 161), causal=True),
    }.items()
}
MASKS = {
    "causal mask": np.tril(np.ones((200, 200), bool)),
    "band": np.tri(200, 200, 5, bool) & ~np.tri(200, 200, -70, bool),
}


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
    gradients = reference.attention_gradient(feeds | found, case.attributes["scale"])
    slopes = gradients.pop("slopes")
    if "bias" in feeds:
        gradients["dbias"] = summed_to(slopes, feeds["bias"].shape)
    return values | gradients


def check(path, case, feeds):
    check_found(case, feeds, run_both(path, case, feeds), run_both(path, replace(case, compute="float32"), feeds))


def check_found(case, feeds, found, exact):
    """Near the reference, and ten times nearer to it than to the results in float32."""
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
        assert np.sqrt(np.mean(np.square(errors))) <= 0.1 * np.sqrt(np.mean(np.square(apart))) + FLOAT_PLACES * size, (
            name
        )


@pytest.mark.parametrize("name", [name for name, case in LONG.items() if not case.empty])
def test_against_rounded_operands(path, name):
    case = LONG[name]
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
    """One example's queries are shared out among more tasks. Only the gradient of a bias is a sum over the batch."""
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


@pytest.mark.parametrize("name", ["one query", "few keys"])
def test_few_queries_or_keys_have_the_bits_of_float32(path, name):
    """Rounding and packing would take longer than they save."""
    case = Attention(queries=1, keys=200, size=80) if name == "one query" else Attention(queries=90, keys=31, size=80)
    feeds = case.draw(np.float32)
    found = run_both(path, replace(case, compute="bfloat16"), feeds)
    for result, array in run_both(path, case, feeds).items():
        np.testing.assert_array_equal(array, found[result], err_msg=result)


@pytest.fixture(scope="module")
def model_of_tiles(libraries, tmp_path_factory):
    """The program that computes in tiles by a model of AMX's instructions."""
    library = libraries.get("avx512", (None, None))[1]
    if library is None or not library.onnxtrain_multiplies_bfloat16() or shutil.which("c++") is None:
        pytest.skip("needs a compiler for C++20, and a CPU with AVX512-BF16")
    program = tmp_path_factory.mktemp("model") / "attention"
    flags = re.search(r"set\(kernel_flags_avx512 (.*)\)", CMAKE)[1].split()
    options = ["-std=c++20", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]
    options += [*flags, "-mavx512bf16", "-D__AMX_BF16__", "-iquote", HERE.parents[1] / "native", "-o", program]
    subprocess.run(["c++", *options, HERE / "attention_by_tile_model.cpp"], check=True)
    return program


def by_model(program, case, feeds):
    sizes = [case.batch, case.queries, case.keys, case.heads, case.size, case.value_size, case.attributes["scale"]]
    given = b"".join(feeds[name].tobytes() for name in ("q", "k", "v", "dy"))
    done = subprocess.run([program, *map(str, sizes)], input=given, capture_output=True, check=True)
    numbers = np.frombuffer(done.stdout, np.float32)
    shapes = {name: feeds[of].shape for name, of in {"y": "dy", "dq": "q", "dk": "k", "dv": "v"}.items()}
    shapes["log_sum"] = (case.batch, case.heads, case.queries)
    names = ("y", "log_sum", "dq", "dk", "dv")
    ends = np.cumsum([np.prod(shapes[name]) for name in names])
    return {name: part.reshape(shapes[name]) for name, part in zip(names, np.split(numbers, ends[:-1]), strict=True)}


OF_MODEL = [name for name, case in LONG.items() if case.bias is None]


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_MODEL)
def test_the_model_of_tiles_against_rounded_operands(model_of_tiles, name):
    case = LONG[name]
    feeds = case.draw(np.float32)
    check_found(
        case, feeds, by_model(model_of_tiles, case, feeds), run_both(PATH, replace(case, compute="float32"), feeds)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_MODEL)
def test_the_model_of_tiles_has_the_bits_of_the_instructions(model_of_tiles, tiles_path, name):
    case = LONG[name]
    feeds = case.draw(np.float32)
    for result, array in by_model(model_of_tiles, case, feeds).items():
        np.testing.assert_array_equal(array, run_both(tiles_path, case, feeds)[result], err_msg=result)


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


@pytest.mark.parametrize("operator", OUTPUTS)
def test_bodies_round_alike(path, operator):
    """The definition in standard operators rounds the same operands, but for probabilities: after the division."""
    keys, width = (40, 48) if operator.startswith("Packed") else (50, 32)
    case = Attention(2, 3, 40, keys, 48, width, bias=(40, keys), compute="bfloat16")
    feeds = case.draw(np.float32)
    if operator.startswith("Packed"):
        feeds["qkv"] = np.stack([feeds[name] for name in "qkv"], axis=2)
    feeds |= run(path, "Attention", feeds, case.attributes)
    given = {name: feeds[name] for name in INPUTS[operator]}
    bodies = {}
    for compute in ("float32", "bfloat16"):
        attributes = replace(case, compute=compute).attributes
        node = helper.make_node(operator, list(given), OUTPUTS[operator], domain="onnxtrain", **attributes)
        values = [helper.make_tensor_value_info(name, 1, array.shape) for name, array in given.items()]
        wanted = [helper.make_tensor_value_info(name, 1, None) for name in OUTPUTS[operator]]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)]
        model = helper.make_model(helper.make_graph([node], "g", values, wanted), opset_imports=opsets)
        working = ir.from_proto(model)
        resolve_fused(working, Backward(), kernels=False)
        assert {made.domain for made in working.graph} == {""}
        working.ir_version = 10
        serialized = ir.to_proto(working).SerializeToString()
        session = onnxruntime.InferenceSession(serialized, providers=["CPUExecutionProvider"])
        bodies[compute] = dict(zip(OUTPUTS[operator], session.run(None, given), strict=True))
    for name, array in run(path, operator, feeds, case.attributes).items():
        largest = np.abs(array).max()
        np.testing.assert_allclose(array, bodies["bfloat16"][name], atol=2 * ROUNDING * largest)
        assert np.abs(bodies["float32"][name] - bodies["bfloat16"][name]).max() > 1e-3 * ROUNDING * largest
