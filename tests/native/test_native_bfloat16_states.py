"""Updates with bfloat16 states: equal to the operator on widened states with rounded results."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from optimizer_reference import draw
from optimizer_sessions import REQUIRED, groups, run, session
from rounding_reference import BFLOAT16, round_stochastic

from sentences import raises_sentence

SHAPES = [(3,), (2500,), (0,), (33, 70)]
T = np.int64(7)


def updated(path, name, variables, seeds, masks=None, threads=1, wanted=None, parameter_seeds=(), **attributes):
    """The outputs of a fused node over variables (X, G, states...), states as bfloat16; by name."""
    inputs, outputs = groups(name, attributes)
    letters = inputs[:2] + ("" if masks is None else "M") + inputs[2:]
    columns = dict(zip(inputs, zip(*variables, strict=True), strict=True)) | {"M": masks}
    feeds = {f"{letter}{i}": array for letter in letters for i, array in enumerate(columns[letter])}
    produced = [f"{letter}{i}_new" for letter in outputs for i in range(len(variables))]
    wanted = produced if wanted is None else wanted
    kinds = {key: helper.np_dtype_to_tensor_dtype(array.dtype) for key, array in feeds.items()}
    scalars = [("R", TensorProto.FLOAT, []), ("T", TensorProto.INT64, []), ("factor", TensorProto.FLOAT, [])]
    node = helper.make_node(
        f"Fused{name}",
        [key for key, *_ in scalars] + list(feeds),
        [name if name in wanted else "" for name in produced],
        domain="onnxtrain",
        **({"seeds": seeds} if seeds else {}),
        **({"parameter_seeds": parameter_seeds} if parameter_seeds else {}),
        **{**REQUIRED.get(name, {}), **attributes, **({} if masks is None else {"masked": 1})},
    )
    made = session(
        path,
        [node],
        scalars + [(key, kinds[key], array.shape) for key, array in feeds.items()],
        [(key, kinds[key.removesuffix("_new")], feeds[key.removesuffix("_new")].shape) for key in wanted],
        threads,
    )
    binding, results = made.io_binding(), {}
    numbers = {"R": np.asarray(0.1, np.float32), "T": np.asarray(T), "factor": np.asarray(0.5, np.float32)}
    kept = {key: np.array(array, order="C") for key, array in {**numbers, **feeds}.items()}
    for key, array in kept.items():
        kind = kinds.get(key) or helper.np_dtype_to_tensor_dtype(array.dtype)
        binding.bind_input(key, "cpu", 0, kind, list(array.shape), array.ctypes.data)
    for key in wanted:
        results[key] = np.zeros_like(feeds[key.removesuffix("_new")])
        kind = kinds[key.removesuffix("_new")]
        binding.bind_output(key, "cpu", 0, kind, list(results[key].shape), results[key].ctypes.data)
    made.run_with_iobinding(binding)
    return results


def variables_of(name, shapes, states):
    rng = np.random.default_rng(4)
    drawn = [draw(rng, shape, np.float32, states) for shape in shapes]
    return [(X, G, *(np.asarray(state).astype(BFLOAT16) for state in kept)) for X, G, *kept in drawn]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[1:2], SHAPES[1:3]], ids=len)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "states"), [("Adam", 2), ("LAMB", 2), ("Momentum", 1), ("SSGD", 1)])
def test_it_is_the_update_and_then_the_rounding(library_path, name, states, masked, shapes, threads):
    attributes = {"alpha": 0.9} if name == "SSGD" else {}
    variables = variables_of(name, shapes, states)
    count = len(variables)
    masks = [np.asarray(np.random.default_rng(5).random(shape) < 0.4) for shape in shapes] if masked else None
    seeds = list(range(11, 11 + states * count))
    found = updated(library_path, name, variables, seeds, masks, threads, **attributes)
    prepared = []
    for i, (X, G, *kept) in enumerate(variables):
        gradient = G if masks is None else np.where(masks[i], G, np.float32(0))
        prepared.append((X, gradient * np.float32(0.5), *(state.astype(np.float32) for state in kept)))
    wanted = run(library_path, name, np.float32(0.1), T, prepared, **attributes)
    letters = groups(name, attributes)[1]
    for place, array in enumerate(wanted):
        letter, i = letters[place // count], place % count
        if letter != "X":
            array = round_stochastic(array, T, seeds[place - count])
        np.testing.assert_array_equal(found[f"{letter}{i}_new"], array, err_msg=f"{letter}{i}")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rounds_states", [False, True])
@pytest.mark.parametrize(("name", "states"), [("Adam", 2), ("LAMB", 2), ("Momentum", 1), ("SSGD", 1), ("SSGD", 0)])
def test_parameters_are_rounded_likewise(library_path, name, states, rounds_states, threads):
    attributes = {"alpha": 0.9} if name == "SSGD" and states else {}
    rounds_states = rounds_states and states > 0
    variables = [
        (X.astype(BFLOAT16), G, *(kept if rounds_states else (state.astype(np.float32) for state in kept)))
        for X, G, *kept in variables_of(name, SHAPES, states)
    ]
    count = len(variables)
    seeds, own = list(range(11, 11 + states * count)) if rounds_states else [], list(range(51, 51 + count))
    found = updated(library_path, name, variables, seeds, None, threads, parameter_seeds=own, **attributes)
    wide = [
        (X.astype(np.float32), G * np.float32(0.5), *(np.asarray(state).astype(np.float32) for state in kept))
        for X, G, *kept in variables
    ]
    wanted = run(library_path, name, np.float32(0.1), T, wide, **attributes)
    letters = groups(name, attributes)[1]
    for place, array in enumerate(wanted):
        letter, i = letters[place // count], place % count
        if letter == "X" or rounds_states:
            array = round_stochastic(array, T, own[i] if letter == "X" else seeds[place - count])
        np.testing.assert_array_equal(found[f"{letter}{i}_new"], array, err_msg=f"{letter}{i}")


def test_what_parameter_seeds_need(library_path):
    ((X, G, *states),) = variables_of("Momentum", [(3,)], 1)
    held = X.astype(BFLOAT16)
    with raises_sentence("parameter_seeds", got=2, wanted=1):
        updated(library_path, "Momentum", [(held, G, *states)], [1], parameter_seeds=[1, 2])
    with raises_sentence("variable_not_bfloat16", got="float", variable=1, of=1):
        updated(library_path, "Momentum", [(X, G, *states)], [1], parameter_seeds=[1])
    with raises_sentence("others_not_float", got="bfloat16", variable=1, of=1):
        updated(library_path, "Momentum", [(held, G.astype(BFLOAT16), *states)], [1], parameter_seeds=[1])


def test_a_state_that_is_not_wanted_is_left_out(library_path):
    variables, seeds = variables_of("Adam", [(1500,)], 2), [1, 2]
    whole = updated(library_path, "Adam", variables, seeds)
    found = updated(library_path, "Adam", variables, seeds, wanted=["X0_new", "H0_new"])
    for key, array in found.items():
        np.testing.assert_array_equal(array, whole[key])


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-39, 1.17e-38, 1.0, -1.0, 1.003]


def test_special_numbers(library_path):
    V = np.asarray(SPECIAL * 5, np.float32)
    X, G = np.zeros_like(V), V
    (found,) = updated(
        library_path, "Momentum", [(X, G, np.zeros(V.shape, BFLOAT16))], [3], wanted=["V0_new"], beta=2.0
    ).values()
    wanted = round_stochastic(G * np.float32(0.5) * np.float32(2), T, 3)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
    assert np.isfinite(found.astype(np.float32)[5])


@pytest.mark.parametrize(
    ("kind", "seeds", "sentence"),
    [
        (
            np.float32,
            [1, 2],
            "FusedAdam: V of variable 1 of 1 has type float and X has type float: with seeds, a state ",
        ),
        (BFLOAT16, [1], "FusedAdam: seeds has 1 numbers, and there are 2 states: give one for each"),
        (BFLOAT16, [], "FusedAdam: V of variable 1 of 1 has type bfloat16 and X has type float: the tensors of one "),
    ],
)
def test_refusals(library_path, kind, seeds, sentence):
    one = np.ones(3, np.float32)
    with pytest.raises(Exception, match=sentence):
        updated(library_path, "Adam", [(one, one, one.astype(kind), one.astype(kind))], seeds)
