"""Arguments of `onnxtrain.kernels`: NumPy arrays and DLPack tensors, checked before a pointer is used."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from optimizer_reference import draw

from onnxtrain import kernels
from onnxtrain.errors import OperatorError
from sentences import raises_sentence

CALLS = {
    "adagrad": (1, lambda *arrays, **options: kernels.adagrad_(*arrays, learning_rate=0.1, step=1, **options)),
    "adam": (2, lambda *arrays, **options: kernels.adam_(*arrays, learning_rate=0.1, step=1, **options)),
    "momentum": (
        1,
        lambda *arrays, **options: kernels.momentum_(
            *arrays, learning_rate=0.1, step=1, **{"alpha": 0.9, "beta": 1.0, **options}
        ),
    ),
    "ssgd": (0, lambda *arrays, **options: kernels.ssgd_(*arrays, learning_rate=0.1, **options)),
}


def zeros(count=3, dtype=np.float32):
    return np.zeros(count, dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_many_arrays_of_mixed_types_equal_one_by_one(name, threads):
    states, call = CALLS[name]
    rng = np.random.default_rng(0)
    shapes = [(7,), (), (0,), (3, 4), (20_000,), (1, 2, 3)] * 5
    variables = [draw(rng, s, np.float32 if i % 2 else np.float64, states) for i, s in enumerate(shapes)]
    single = [[array.copy() for array in variable] for variable in variables]
    for X, G, *rest in single:
        call([X], [G], rest)
    groups = list(zip(*variables, strict=True))
    call(groups[0], groups[1], [array for group in groups[2:] for array in group], threads=threads)
    for a, b in zip(variables, single, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", CALLS)
def test_no_arrays_at_all(name):
    CALLS[name][1]([], [], [])


@pytest.mark.parametrize(
    ("parameter", "gradient", "state", "sentence"),
    [
        ([0.0], zeros(), zeros(), r"parameters\[0\] is a list: it must be a NumPy array or a tensor"),
        (zeros(dtype=np.float16), zeros(), zeros(), r"parameters\[0\] has type float16: it must be float32 or float64"),
        (zeros(dtype=">f4"), zeros(), zeros(), r"parameters\[0\] has type >f4: .* native byte order"),
        (zeros(6)[::2], zeros(), zeros(), r"parameters\[0\] is not contiguous in memory"),
        (zeros((2, 3)).T, zeros((3, 2)), zeros((3, 2)), r"parameters\[0\] is not contiguous"),
        (np.zeros(13, np.uint8)[1:].view(np.float32), zeros(), zeros(), r"parameters\[0\] is not contig.* aligned"),
        (np.broadcast_to(zeros(1), (1,)), zeros(1), zeros(1), r"parameters\[0\] is read-only: it is updated in place"),
        (zeros(), zeros(6)[::2], zeros(), r"gradients\[0\] is not contiguous"),
        (zeros(), zeros(dtype=np.float64), zeros(), r"gradients\[0\] has type float64 and parameters\[0\] has"),
        (zeros(), zeros(2), zeros(), r"gradients\[0\] has shape \(2,\) and parameters\[0\] has shape \(3,\)"),
        (zeros(), zeros((1, 3)), zeros(), r"gradients\[0\] has shape \(1, 3\)"),
        (zeros(), zeros(), np.broadcast_to(np.float32(0), 3), r"states\[0\] is not contiguous"),
        (zeros(), zeros(), zeros(4), r"states\[0\] has shape \(4,\)"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_used(parameter, gradient, state, sentence):
    with pytest.raises(OperatorError, match=sentence):
        CALLS["momentum"][1]([parameter], [gradient], [state])


def test_read_only_arrays():
    frozen = zeros()
    frozen.flags.writeable = False
    CALLS["momentum"][1]([zeros()], [frozen], [zeros()])
    with pytest.raises(OperatorError, match=r"states\[0\] is read-only"):
        CALLS["momentum"][1]([zeros()], [zeros()], [frozen])


def test_overlapping_arrays():
    call, whole = CALLS["momentum"][1], zeros(8)
    with raises_sentence("arguments_overlap", what="parameters[0]", got="states[0]"):
        call([whole], [zeros(8)], [whole])
    with raises_sentence("arguments_overlap", what="parameters[0]", got="gradients[0]"):
        call([whole[:4]], [whole[3:7]], [zeros(4)])
    with raises_sentence("arguments_overlap", what="gradients[0]", got="states[0]"):
        call([zeros(4)], [whole[2:6]], [whole[4:]])
    with raises_sentence("arguments_overlap", what="parameters[0]", got="parameters[1]"):
        call([whole, whole[2:4]], [zeros(8), zeros(2)], [zeros(8), zeros(2)])
    call([whole[:4], whole[4:]], [zeros(4), zeros(4)], [zeros(4), zeros(4)])  # side by side
    shared = np.ones(4, np.float32)
    call([whole[:4], whole[4:]], [shared, shared], [zeros(4), zeros(4)])  # nothing writes to gradients


def test_a_gradient_inside_another_and_beside_a_state():
    memory = zeros(10)
    with pytest.raises(OperatorError, match=r"gradients\[0\] and states\[1\] overlap"):
        CALLS["momentum"][1]([zeros(8), zeros(2)], [memory[:8], memory[1:3]], [zeros(8), memory[6:8]])


def test_counts_of_arrays():
    with raises_sentence("gradients_of_update", what="gradients", got=1, wanted=2):
        kernels.Bound([zeros(), zeros()], [zeros()])
    with raises_sentence("states_in_all", what="states", got=3, wanted=2):
        kernels.Bound([zeros(), zeros()], [zeros(), zeros()], [zeros(), zeros(), zeros()])
    with raises_sentence("states_of_update", what="adam", got=1, wanted=2):
        CALLS["adam"][1]([zeros()], [zeros()], [zeros()])
    with raises_sentence("states_of_update", what="ssgd", got=0, wanted=1):
        CALLS["ssgd"][1]([zeros()], [zeros()], [], alpha=0.5)
    with pytest.raises(OperatorError, match="threads is 0: it must be 1 or more"):
        CALLS["ssgd"][1]([zeros()], [zeros()], [], threads=0)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("momentum", {"mode": "heavy"}, "momentum: mode is 'heavy': it must be 'standard' or 'nesterov'"),
        ("adagrad", {"decay_factor": -2.0}, r"adagrad: 1 \+ T \* decay_factor is -1 at T = 1 and decay_factor = -2"),
        ("ssgd", {"measure": "mcp"}, "ssgd: measure is 'mcp'"),
        ("ssgd", {"reweighting": ""}, "ssgd: reweighting is ''"),
        ("ssgd", {"epsilon": 0.0}, "ssgd: epsilon is 0"),
        ("ssgd", {"max_scale": -1.0}, "ssgd: max_scale is -1"),
    ],
)
def test_attributes_that_cannot_be_used(name, options, sentence):
    states, call = CALLS[name]
    with pytest.raises(OperatorError, match=sentence):
        call([zeros()], [zeros()], [zeros() for _ in range(states)], **options)


def test_a_tensor_that_dlpack_cannot_share():
    class Elsewhere:
        def __dlpack__(self, **_):
            raise BufferError("it lies on another device")

        def __dlpack_device__(self):
            return (1, 0)

    with raises_sentence("no_dlpack", what="parameters[0]", error="it lies on another"):
        kernels.Bound([Elsewhere()], [zeros()])


@pytest.mark.torch
def test_pytorch_tensors_through_dlpack():
    torch = pytest.importorskip("torch")
    x, g, v, h = (torch.full((3,), value) for value in (1.0, 2.0, 0.5, 0.25))
    arrays = [tensor.numpy().copy() for tensor in (x, g, v, h)]
    CALLS["adam"][1]([x], [g], [v, h])
    CALLS["adam"][1]([arrays[0]], [arrays[1]], arrays[2:])
    for tensor, array in zip((x, v, h), (arrays[0], *arrays[2:]), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    with raises_sentence("no_dlpack", what="parameters[0]", error="grad"):
        CALLS["adam"][1]([x.clone().requires_grad_()], [g], [v, h])


def momentum_steps(seed, threads, steps=20):
    """X after some steps over tensors large enough for several tasks."""
    rng = np.random.default_rng(seed)
    x, g, v = (rng.standard_normal(100_000, np.float32) for _ in range(3))
    bound = kernels.Bound([x], [g], [v])
    for step in range(steps):
        bound.momentum(learning_rate=0.1, step=step, alpha=0.9, beta=1.0, threads=threads)
    return x


def test_calls_from_several_threads_at_once():
    wanted = [momentum_steps(seed, threads=1) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(momentum_steps, threads=3), range(8)))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_threads_of_its_own():
    code = (
        "import os, sys\n"
        "from test_native_buffers import momentum_steps\n"
        "x = momentum_steps(0, threads=3)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if (momentum_steps(0, threads=3) == x).all() else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folders}, check=True, timeout=60)
