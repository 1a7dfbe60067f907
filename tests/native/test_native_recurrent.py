"""LSTM, GRU and RNN with saved values, and their gradients: against float64, on all instruction sets and threads."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import OTHER_TYPES, element_type, run_node, session
from recurrent_reference import DEFAULTS, FORMS, Recurrent

from onnxtrain.autodiff.engine import Backward
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.passes import clean
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.native import all_reducing, custom_ops_library

PATH = str(custom_ops_library())
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)
TYPES = [np.float32, np.float64]
ERROR = {np.float32: 3e-5, np.float64: 1e-12}
"""Of the largest element of a result, or of 1."""
STATES = ("Y_h", "Y_c", "initial_h", "initial_c")
PLAIN = Recurrent("LSTM", steps=2, batch=3, inputs=4, hidden=5)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def forward(path, call, feeds, threads=1, wanted=None):
    given = call.all_inputs(call.input_names, feeds)
    outputs = [*call.result_names, *call.checkpoint_names]
    return run_node(path, call.operator, call.input_names, outputs, given, call.attributes, threads, wanted)


def gradient(path, call, feeds, kept, threads=1, wanted=None):
    given = call.all_inputs(call.gradient_inputs, feeds | kept)
    outputs = call.gradient_outputs
    if wanted is None:
        wanted = [name for name in outputs if name != "dlinear" or call.keeps_linear]
    return run_node(
        path, f"{call.operator}Gradient", call.gradient_inputs, outputs, given, call.attributes, threads, wanted
    )


def run_both(path, call, feeds, threads=1):
    found = forward(path, call, feeds, threads)
    kept = {name: found[name] for name in ("Y", *call.checkpoint_names)}
    return found | gradient(path, call, feeds, kept, threads)


def check(path, call, dtype, threads=1):
    feeds = call.draw(dtype)
    found, wanted = run_both(path, call, feeds, threads), call.expected(feeds)
    for name, value in found.items():
        assert value.dtype == dtype
        assert value.shape == wanted[name].shape, name
        known = ~np.isnan(wanted[name])  # saved values beyond the lengths have no meaning
        if name == "gates" and call.attributes.get("input_forget"):  # nor has the saved value of a coupled gate
            known[..., 2 * call.hidden : 3 * call.hidden] = False
        limit = ERROR[dtype] * max(1.0, np.abs(wanted[name][known]).max(initial=0))
        assert np.abs(value - wanted[name])[known].max(initial=0) <= limit, name


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("call", FORMS, ids=str)
def test_against_float64(instruction_set, library_path, call, dtype):
    check(library_path, call, dtype)


def in_standard_operators(operator, given, outputs, attributes):
    """Run the body of an operator on ONNX Runtime."""
    outputs = [name for name in outputs if name != "dP" or given["P"].size]  # omitted inputs have no gradient
    produced = [*outputs[:1], "", *outputs[1:]] if operator == "GRUGradient" and "dlinear" not in outputs else outputs
    node = helper.make_node(operator, list(given), produced, domain=ONNXTRAIN_DOMAIN, **attributes)
    infos = [helper.make_tensor_value_info(name, element_type(array), array.shape) for name, array in given.items()]
    results = [helper.make_tensor_value_info(name, element_type(given["X"]), None) for name in outputs]
    graph = helper.make_graph([node], "body", infos, results)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    resolve_fused(model, Backward(), kernels=False)
    clean(model)
    assert all(node.domain == "" for node in model.graph.all_nodes())
    proto = ir.to_proto(model)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    feeds = {name: array for name, array in given.items() if name in names}
    return dict(zip(outputs, session.run(None, feeds), strict=True))


@pytest.mark.parametrize("call", FORMS, ids=str)
def test_against_the_bodies(call):
    call = replace(call, attributes=full_attributes(call))
    feeds = call.draw(np.float32)
    if "sequence_lens" in feeds:  # of a length of 0 ONNX Runtime's own operators give no last state
        feeds["sequence_lens"] = np.maximum(feeds["sequence_lens"], 1)
    found, active = run_both(PATH, call, feeds), call.active(feeds)
    kept = {name: found[name] for name in ("Y", *call.checkpoint_names)}
    given = call.all_inputs(call.input_names, feeds)
    bodies = in_standard_operators(call.operator, given, [*call.result_names, *call.checkpoint_names], call.attributes)
    given = call.all_inputs(call.gradient_inputs, feeds | kept)
    outputs = [name for name in call.gradient_outputs if name != "dlinear" or call.keeps_linear]
    bodies |= in_standard_operators(f"{call.operator}Gradient", given, outputs, call.attributes)
    for name, body in bodies.items():
        value, known = found[name], np.ones(body.shape, bool)
        if name in ("gates", "linear"):
            known &= active[:, :, None, None]
        elif name == "cells":
            known &= active[:, None, :, None]
        limit = 3e-6 * max(1.0, np.abs(value[known]).max(initial=0))
        assert np.abs(value - body)[known].max(initial=0) <= limit, name


def full_attributes(call):
    """All attributes that a pass writes."""
    names = " ".join([DEFAULTS[call.operator]] * call.directions)
    numbers = {f"activation_{kind}": [0.0] * len(names.split()) for kind in ("alpha", "beta")}
    return {"hidden_size": call.hidden, "activations": names} | numbers | call.attributes


# Around the edges of vectors (2 to 16), tiles (6 or 8 rows), parts (32 units and more) and blocks (512 of the depth).
SIZES = [(1, 1, 1, 1), (2, 1, 3, 64), (3, 9, 5, 70), (2, 8, 1, 33), (4, 17, 20, 16), (3, 5, 300, 130), (2, 2, 4, 520)]


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(instruction_set, library_path, sizes, operator):
    for attributes in ({}, {"linear_before_reset": 1})[: 2 if operator == "GRU" else 1]:
        for given in ("", "bhl"):
            check(library_path, Recurrent(operator, *sizes, given, attributes), np.float32)


THREADED = [form for form in FORMS if "activations" not in form.attributes and form.given not in ("", "bl")]


@pytest.mark.parametrize("call", THREADED, ids=str)
def test_threads_give_the_same_bits(instruction_set, library_path, call):
    call = replace(call, steps=4, batch=20, hidden=150)
    feeds = call.draw(np.float32)
    first = run_both(library_path, call, feeds, 1)
    known = {name: ~np.isnan(value) for name, value in call.expected(feeds).items()}
    for threads in (2, 3):
        for name, value in run_both(library_path, call, feeds, threads).items():
            np.testing.assert_array_equal(value[known[name]], first[name][known[name]], err_msg=name)


@pytest.mark.parametrize("call", THREADED, ids=str)
def test_rows_of_a_batch_give_the_same_bits_alone(call):
    """However the rows are cut into parts for several cores."""
    call = replace(call, steps=4, batch=20, hidden=150)
    feeds = call.draw(np.float32)
    whole = run_both(PATH, call, feeds)
    known = {name: ~np.isnan(value) for name, value in call.expected(feeds).items()}
    axes = dict.fromkeys(("X", "gates", "linear", "dgates", "dlinear", "dX", *STATES, *(f"d{n}" for n in STATES)), 1)
    axes |= {"Y": 2, "dY": 2, "cells": 2, "sequence_lens": 0}
    for rows in (range(3), range(3, 20)):
        part = {name: np.take(array, rows, axes[name]) if name in axes else array for name, array in feeds.items()}
        for name, value in run_both(PATH, replace(call, batch=len(rows)), part).items():
            if name not in axes:  # a sum over the rows
                continue
            expected, there = (np.take(array, rows, axes[name]) for array in (whole[name], known[name]))
            np.testing.assert_array_equal(value[there], expected[there], err_msg=name)


NOTHING = np.zeros(0, np.float32)


def products(call, feeds, kept, wanted=("dX", "dW", "dR", "dB"), threads=1):
    names = ["X", "W", "sequence_lens", "initial_h", "Y", "dgates"] + ["dlinear"] * call.keeps_linear
    outputs = ["dX", "dW", "dR", "dB"]
    given = call.all_inputs(names, feeds | kept)
    direction = {key: value for key, value in call.attributes.items() if key == "direction"}
    return run_node(PATH, "RecurrentProductsGradient", names, outputs, given, direction, threads, list(wanted))


@pytest.mark.parametrize("call", [form for form in FORMS if form.operator != "GRU" or form.keeps_linear], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_products_over_all_steps_apart(call, dtype):
    feeds = call.draw(dtype)
    found = forward(PATH, call, feeds)
    kept = {name: found[name] for name in ("Y", *call.checkpoint_names)}
    whole = gradient(PATH, call, feeds, kept)
    spaces = ["dgates"] + ["dlinear"] * call.keeps_linear
    kept |= gradient(PATH, call, feeds, kept, wanted=spaces)
    for threads in (1, 3):
        for name, value in products(call, feeds, kept, threads=threads).items():
            np.testing.assert_array_equal(value, whole[name], err_msg=name)
    reads = {"dX": ["W"], "dW": ["X"], "dR": ["Y", "initial_h", "sequence_lens"], "dB": []}
    for name, read in reads.items():
        given = {"X": NOTHING.astype(dtype)}  # and nothing else that this result does not read
        given |= {key: array for key, array in (feeds | kept).items() if key in (*read, *spaces)}
        np.testing.assert_array_equal(products(call, given, {}, [name])[name], whole[name], err_msg=name)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"X": ones(3, 4)},
            "inputs 0 (X), 1 (W), 4 (Y) and 5 (dgates) have shapes [3, 4], [1, 20, 4], [2, 1, 3, 5] and [2, 3, 1, 20], "
            "and must have 3, 3, 4 and 4 axes",
        ),
        ({"dgates": ones(2, 3, 20)}, "inputs 0 (X), 1 (W), 4 (Y) and 5 (dgates) have shapes"),
        ({"dgates": ones(2, 3, 1, 15)}, "input 5 (dgates) has shape [2, 3, 1, 15], and must have as many"),
        (
            {"W": ones(1, 15, 4), "dgates": ones(2, 3, 1, 15), "dlinear": ones(2, 3, 1, 4)},
            "input 6 (dlinear) has shape [2, 3, 1, 4], and must have shape [2, 3, 1, 5].",
        ),
        ({"W": ones(2, 20, 4)}, "input 1 (W) has shape [2, 20, 4], and must have shape [1, 20, 4]."),
        ({"W": ones(1, 20, 3)}, "input 1 (W) has shape [1, 20, 3], and must have shape [1, 20, 4]."),
        ({"X": ones(2, 2, 4)}, "input 0 (X) has shape [2, 2, 4], and must have shape [2, 3, 4]."),
        ({"Y": ones(2, 1, 2, 5)}, "input 4 (Y) has shape [2, 1, 2, 5], and must have shape [2, 1, 3, 5]."),
        ({"dgates": ones(2, 3, 2, 20)}, "input 5 (dgates) has shape [2, 3, 2, 20], and must have shape [2, 3, 1, 20]."),
        ({"initial_h": ones(1, 2, 5)}, "input 3 (initial_h) has shape [1, 2, 5], and must have shape [1, 3, 5]."),
        ({"sequence_lens": np.array([1, 3, 0], np.int32)}, "input 2 (sequence_lens) has 3, and must have numbers from"),
        ({"X": NOTHING}, "input 0 (X) is missing, and is required."),
        ({"W": NOTHING}, "input 1 (W) is missing, and is required."),
        ({"Y": NOTHING}, "input 4 (Y) is missing, and is required."),
    ],
)
def test_products_of_what_does_not_fit_are_refused(changes, sentence):
    feeds = {"X": ones(2, 3, 4), "W": ones(1, 20, 4), "Y": ones(2, 1, 3, 5), "dgates": ones(2, 3, 1, 20)} | changes
    call = Recurrent("GRU", attributes={"linear_before_reset": 1}) if "dlinear" in changes else PLAIN
    with pytest.raises(REFUSED, match="RecurrentProductsGradient: " + re.escape(sentence)):
        products(call, feeds, {})


@pytest.mark.parametrize("call", FORMS, ids=str)
def test_gradients_of_gates_are_written_over_the_gates(call):
    """``AllReduce`` works in place and tells where its values lie."""
    call = replace(call, steps=4, batch=20, hidden=70)
    feeds = call.draw(np.float32)
    found = forward(PATH, call, feeds)
    kept = {name: found[name] for name in ("Y", *call.checkpoint_names)}
    expected = gradient(PATH, call, feeds, kept)
    given = call.all_inputs(call.gradient_inputs, feeds | kept)
    spaces = [name for name in call.checkpoint_names if name != "cells"]
    used = [f"own {name}" if name in spaces else name for name in given]
    produced = [name if name in expected else "" for name in call.gradient_outputs]
    first = [helper.make_node("AllReduce", [name], [f"own {name}"], domain=ONNXTRAIN_DOMAIN) for name in spaces]
    last = [helper.make_node("AllReduce", [f"d{name}"], [f"own d{name}"], domain=ONNXTRAIN_DOMAIN) for name in spaces]
    nodes = [
        *first,
        helper.make_node(f"{call.operator}Gradient", used, produced, domain=ONNXTRAIN_DOMAIN, **call.attributes),
        *last,
        *(helper.make_node("Neg", [f"own d{name}"], [f"minus d{name}"]) for name in spaces),
    ]
    results = [f"minus {name}" if name[1:] in spaces else name for name in expected]
    for threads in (1, 3):
        made = session(
            PATH,
            nodes,
            [(name, element_type(array), array.shape) for name, array in given.items()],
            [(name, element_type(feeds["X"]), None) for name in results],
            threads,
            [helper.make_tensor_value_info(f"d{name}", element_type(kept[name]), kept[name].shape) for name in spaces],
        )
        addresses = []
        with all_reducing(lambda array, addresses=addresses: addresses.append(array.ctypes.data)):
            values = made.run(None, given)
        assert addresses[: len(spaces)] == addresses[len(spaces) :]
        for name, value in zip(expected, values, strict=True):
            np.testing.assert_array_equal(-value if name[1:] in spaces else value, expected[name], err_msg=name)


@pytest.mark.parametrize("call", FORMS[3:5] + [f for f in FORMS if f.attributes == {"linear_before_reset": 1}], ids=str)
def test_omitted_outputs_do_not_change_others(call):
    feeds = call.draw(np.float32)
    every = forward(PATH, call, feeds)
    for name in call.result_names:
        np.testing.assert_array_equal(forward(PATH, call, feeds, wanted=(name,))[name], every[name])
    kept = {name: every[name] for name in ("Y", *call.checkpoint_names)}
    whole = gradient(PATH, call, feeds, kept)
    for name in call.gradient_outputs:
        np.testing.assert_array_equal(gradient(PATH, call, feeds, kept, wanted=(name,))[name], whole[name])
    for name in (f"d{name}" for name in call.result_names):  # no gradient arrives: as if it were zero
        fewer = {key: value for key, value in feeds.items() if key != name}
        zero = gradient(PATH, call, feeds | {name: np.zeros_like(feeds[name])}, kept)
        for key, value in gradient(PATH, call, fewer, kept).items():
            np.testing.assert_array_equal(value, zero[key], err_msg=f"{key} without {name}")


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("empty", ["steps", "batch", "inputs", "hidden"])
def test_nothing_at_all(operator, empty):
    for given in ("b", "bhcpl"):
        check(PATH, Recurrent(operator, given=given, **{empty: 0}), np.float32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"X": ones(3, 4)}, "input 0 (X) has shape [3, 4], and must be [steps, batch, inputs]."),
        ({"R": ones(20, 5)}, "input 2 (R) has shape [20, 5], and must be [directions, gates, hidden]."),
        ({"W": ones(1, 20, 5)}, "input 1 (W) has shape [1, 20, 5], and must have shape [1, 20, 4]."),
        ({"R": ones(1, 15, 5)}, "input 2 (R) has shape [1, 15, 5], and must have shape [1, 20, 5]."),
        ({"R": ones(2, 20, 5)}, "input 2 (R) has shape [2, 20, 5], and must have shape [1, 20, 5]."),
        ({"B": ones(1, 20)}, "input 3 (B) has shape [1, 20], and must have shape [1, 40]."),
        ({"initial_h": ones(1, 2, 5)}, "input 5 (initial_h) has shape [1, 2, 5], and must have shape [1, 3, 5]."),
        ({"P": ones(1, 5)}, "input 7 (P) has shape [1, 5], and must have shape [1, 15]."),
        ({"sequence_lens": ones(2, dtype=np.int32)}, "input 4 (sequence_lens) has shape [2], and must have shape [3]."),
        ({"sequence_lens": np.array([1, 3, 0], np.int32)}, "(sequence_lens) has 3, and must have numbers from 0 to 2"),
        ({"sequence_lens": np.array([1, -1, 0], np.int32)}, "(sequence_lens) has -1, and must have numbers from 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes, sentence):
    feeds = PLAIN.draw(np.float32) | changes
    with pytest.raises(REFUSED, match="LSTM: .*" + re.escape(sentence)):
        forward(PATH, PLAIN, feeds)


@pytest.mark.parametrize("name", ["Y", "gates", "cells"])
def test_what_was_kept_is_required(name):
    feeds = PLAIN.draw(np.float32)
    kept = forward(PATH, PLAIN, feeds)
    with pytest.raises(REFUSED, match=rf"LSTMGradient: input \d+ \({name}\) is missing, and is required"):
        gradient(PATH, PLAIN, feeds, {key: value for key, value in kept.items() if key != name})
    with pytest.raises(REFUSED, match=rf"LSTMGradient: input \d+ \({name}\) has shape \[1\], and must have shape"):
        gradient(PATH, PLAIN, feeds, kept | {name: ones(1)})


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"direction": "sideways"}, "attribute 'direction' is 'sideways': it must be forward, reverse or bidirec"),
        (
            {"activations": "Sigmoid Tanh Swish"},
            "attribute 'activations' names 'Swish', which is not an activation function",
        ),
        ({"activations": "Sigmoid Tanh"}, "attribute 'activations' must name 3 functions, and names 2."),
        ({"activations": "Sigmoid Tanh Tanh Tanh"}, "attribute 'activations' must name 3 functions, and names 4."),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attributes, sentence):
    with pytest.raises(REFUSED, match="LSTM: " + re.escape(sentence)):
        forward(PATH, replace(PLAIN, attributes=attributes), PLAIN.draw(np.float32))


def test_types_that_no_kernel_has():
    feeds = {name: a.astype(np.float16) if a.dtype.kind == "f" else a for name, a in PLAIN.draw(np.float32).items()}
    with pytest.raises(REFUSED, match=OTHER_TYPES % "LSTM"):
        forward(PATH, PLAIN, feeds)
