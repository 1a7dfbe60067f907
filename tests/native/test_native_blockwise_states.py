"""Updates with 8-bit states: bit-identical to the operator on decoded states with encoded results."""

import numpy as np
import pytest
from blockwise_reference import BLOCK, decode, encode, numbers, scales_of
from onnx import TensorProto, helper
from optimizer_reference import draw
from optimizer_sessions import REQUIRED, groups, run, session

T = np.int64(7)


def updated(path, name, variables, seeds, masks=None, threads=1, wanted=None, count=T, **attributes):
    """The outputs of a fused node over variables: X, G, then codes and scales of each state; by name."""
    inputs, outputs = groups(name, attributes)
    states = inputs[2:]
    order = [*inputs[:2], *([] if masks is None else ["M"]), *(f"{s}_scale" for s in states), *states]
    names = [*inputs[:2], *(key for state in states for key in (state, f"{state}_scale"))]
    columns = dict(zip(names, zip(*variables, strict=True), strict=True)) | {"M": masks}
    feeds = {f"{key}{i}": np.array(array, order="C") for key in order for i, array in enumerate(columns[key])}
    produced = [f"{k}{i}" for k in [*outputs, *(f"{s}_scale" for s in states)] for i in range(len(variables))]
    wanted = produced if wanted is None else wanted
    # Declared as they must be, not as they are fed: otherwise the runtime refuses before the node does.
    declared = {**dict.fromkeys(states, TensorProto.UINT8), **{f"{s}_scale": TensorProto.FLOAT for s in states}}
    types = {key: helper.np_dtype_to_tensor_dtype(array.dtype) for key, array in feeds.items()}
    scalars = {"R": np.asarray(0.1, np.float32), "T": np.asarray(count), "factor": np.asarray(0.5, np.float32)}
    node = helper.make_node(
        f"Fused{name}",
        [*scalars, *feeds],
        [f"{key}_new" if key in wanted else "" for key in produced],
        domain="onnxtrain",
        blockwise=1,
        **({"seeds": seeds} if seeds else {}),
        **{**REQUIRED.get(name, {}), **attributes, **({} if masks is None else {"masked": 1})},
    )
    made = session(
        path,
        [node],
        [("R", TensorProto.FLOAT, []), ("T", TensorProto.INT64, []), ("factor", TensorProto.FLOAT, [])]
        + [(key, types[key], array.shape) for key, array in feeds.items()],
        [(f"{key}_new", declared.get(key[:-1], types[key]), None) for key in wanted],
        threads,
    )
    return dict(zip(wanted, made.run([f"{key}_new" for key in wanted], {**scalars, **feeds}), strict=True))


def variables_of(shapes, letters):
    rng = np.random.default_rng(4)
    made = []
    for shape in shapes:
        X, G, *states = draw(rng, shape, np.float32, len(letters))
        states = [state * np.float32(10.0) ** rng.integers(-9, 3, shape).astype(np.float32) for state in states]
        kept = [encode(abs(s) if k == "H" else s, 1, 5, k != "H") for k, s in zip(letters, states, strict=True)]
        made.append((X, G, *(array for pair in kept for array in pair)))
    return made


SHAPES = [(BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (0,), (1024,), (1025,), (33, 517), (1,)]


@pytest.mark.parametrize(("shapes", "threads"), [(SHAPES, 1), (SHAPES, 3), (SHAPES[6:7], 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["Adam", "LAMB", "Momentum", "SSGD", "Adagrad"])
def test_it_is_the_update_between_decoding_and_encoding(library_path, name, masked, shapes, threads):
    attributes = {"alpha": 0.9} if name == "SSGD" else {}
    inputs, outputs = groups(name, attributes)
    letters, count = inputs[2:], len(shapes)
    variables = variables_of(shapes, letters)
    masks = [np.asarray(np.random.default_rng(5).random(shape) < 0.4) for shape in shapes] if masked else None
    seeds = list(range(11, 11 + len(letters) * count))
    found = updated(library_path, name, variables, seeds, masks, threads, **attributes)
    prepared = []
    for i, (X, G, *kept) in enumerate(variables):
        gradient = G if masks is None else np.where(masks[i], G, np.float32(0))
        states = [decode(*kept[2 * k : 2 * k + 2], letter != "H") for k, letter in enumerate(letters)]
        prepared.append((X, gradient * np.float32(0.5), *states))
    results = run(library_path, name, np.float32(0.1), T, prepared, **attributes)
    for place, array in enumerate(results):
        letter, i = outputs[place // count], place % count
        if letter == "X":
            np.testing.assert_array_equal(found[f"X{i}"], array)
            continue
        codes, scales = encode(array, T, seeds[place - count], letter != "H")
        np.testing.assert_array_equal(found[f"{letter}_scale{i}"], scales, err_msg=f"{letter}{i}")
        np.testing.assert_array_equal(found[f"{letter}{i}"], codes, err_msg=f"{letter}{i}")


def test_a_hundred_steps_are_those_of_numpy(library_path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal(700).astype(np.float32)
    kept = [*encode(np.zeros(700), 1, 0, True), *encode(np.zeros(700), 1, 0, False)]
    expected = X, *kept
    for step in range(1, 101):
        G = (rng.standard_normal(700) * 10.0 ** rng.integers(-6, 1, 700)).astype(np.float32)
        found = updated(library_path, "Adam", [(X, G, *kept)], [3, 4], count=np.int64(step))
        X, kept = found["X0"], [found[key] for key in ("V0", "V_scale0", "H0", "H_scale0")]
        expected = adam(step, G, *expected)
    for one, other in zip((X, *kept), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def adam(T, G, X, V, V_scale, H, H_scale):
    """Run a step of Adam by its page's formulas, in float32, between decoding and encoding."""
    f, alpha, beta = np.float32, float(np.float32(0.9)), float(np.float32(0.999))
    g = G * f(0.5)
    v = f(alpha) * decode(V, V_scale, True) + f(1 - alpha) * g
    h = f(beta) * decode(H, H_scale, False) + f(1 - beta) * g * g
    rate = float(f(0.1)) * np.sqrt(1 - beta**T) / (1 - alpha**T)
    x = X - f(rate) * v / (np.sqrt(h) + f(1e-6))
    return x, *encode(v, T, 3, True), *encode(h, T, 4, False)


SPECIAL = [0.0, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-39, 1.17e-38, 1.0, -1.0, 1.875, 1.8750001, 1.9999999, 3.75]


def encoded(path, values, name="Momentum", letter="V"):
    """Encode a state with these values (H: their squares)."""
    values = np.asarray(values, np.float32)
    large = bool(np.any(abs(values) > 1e38))
    G = values if large else values * np.float32(2)  # the factor is a half
    codes, scales = np.zeros(G.shape, np.uint8), np.zeros(-(-G.size // BLOCK), np.float32)
    options = {"beta": 2.0 if large else 1.0, "alpha": 0.0} if name == "Momentum" else {}
    found = updated(path, name, [(np.zeros_like(G), G, codes, scales)], [3], **options)
    return found[f"{letter}0"], found[f"{letter}_scale0"]


@pytest.mark.parametrize("value", SPECIAL)
def test_numbers_at_the_ends(library_path, value):
    x = np.full(300, value, np.float32)
    x[::2] = abs(value) / 3  # zero has no sign where it has been added to
    codes, scales = encoded(library_path, x)
    for one, other in zip((codes, scales), encode(x, T, 3, True), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.all(np.isfinite(decode(codes, scales, True)))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_nan_makes_its_block_nan(library_path, value):
    x = np.ones(2 * BLOCK, np.float32)
    x[3] = value
    codes, scales = encoded(library_path, x)
    assert np.isnan(scales[0])
    np.testing.assert_array_equal(decode(codes, scales, True)[BLOCK:], 1.0)
    assert np.all(np.isnan(decode(codes, scales, True)[:BLOCK]))


def test_an_average_of_squares_above_zero_stays_above_zero(library_path):
    G = np.zeros(2 * BLOCK, np.float32)
    G[0], G[1:100] = 1e4, 1e-15
    codes, _ = encoded(library_path, G, "Adagrad", "H")
    assert np.all(codes[:100] > 0)
    assert not np.any(codes[100:])


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_are_an_eighth_apart_and_the_mean_is_the_number(signed):
    table = numbers(signed)
    assert np.all(np.diff(table) > 0)
    assert np.max(np.diff(table[8:]) / table[8:-1]) == 0.125
    values = np.geomspace(table[8], 1.875, 8).astype(np.float32)
    x = np.tile(values, 20000)
    found = decode(*encode(x, 1, 9, signed), signed).reshape(-1, 8).astype(np.float64)
    assert np.all(abs(found / values - 1) < 0.125)
    deviation = values / 8 / 2 / np.sqrt(20000)
    assert np.all(abs(found.mean(0) - values) < 4 * deviation)


def test_what_has_been_encoded_stays_when_its_scale_moves():
    x = decode(*encode(np.geomspace(2.0**-10, 1.0, 200).astype(np.float32), 1, 2, True), True)
    x[0] = 0.0
    larger = np.append(x, np.float32(16.0))
    np.testing.assert_array_equal(decode(*encode(larger, 4, 6, True), True), larger)
    assert scales_of(larger)[0] > scales_of(x)[0]


@pytest.mark.parametrize(
    ("change", "seeds", "sentence"),
    [
        (
            {"V": np.float32},
            [1, 2],
            "FusedAdam: V of variable 1 of 1 has type float and X has type float: with blockwise",
        ),
        (
            {"V_scale": np.float64},
            [1, 2],
            "FusedAdam: the scale of V of variable 1 of 1 has type double and X has type",
        ),
        ({"V_scale": 3}, [1, 2], r"the scale of V of variable 1 of 1 has shape \[3\] and X has shape \[300\]: .*\[2\]"),
        ({"V": 299}, [1, 2], r"V of variable 1 of 1 has shape \[299\] and X has shape \[300\]: a state must have"),
        ({}, [1], "FusedAdam: seeds has 1 numbers, and there are 2 states: give one for each"),
        ({}, [], "FusedAdam: seeds has 0 numbers, and there are 2 states: give one for each"),
    ],
    ids=str,
)
def test_refusals(library_path, change, seeds, sentence):
    (own,) = variables_of([(300,)], "VH")
    named = dict(zip(["X", "G", "V", "V_scale", "H", "H_scale"], own, strict=True))
    for key, to in change.items():
        named[key] = np.zeros(to, named[key].dtype) if isinstance(to, int) else named[key].astype(to)
    with pytest.raises(Exception, match=sentence):
        updated(library_path, "Adam", [tuple(named.values())], seeds)
