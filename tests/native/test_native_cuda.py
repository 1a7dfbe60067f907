"""CUDA kernels: their results equal the CPU kernels'.

They are executed on the CPU, block after block, which tests their arithmetic and their memory accesses without a GPU;
and on a GPU, where onnxruntime-gpu finds one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from optimizer_sessions import element_type, session

from cuda_library import built
from onnxtrain.operators.registry import OPTIMIZERS
from onnxtrain.runtime.native import CUDA_VARIABLE, _load_cuda, custom_ops_library

pytestmark = pytest.mark.thorough  # it compiles

CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")


class Library(NamedTuple):
    """A library of optimizer kernels and the providers whose sessions use it."""

    path: str
    providers: tuple[str | tuple[str, dict], ...] = CUDA[1:]

    @property
    def on_gpu(self):
        return self.providers[0] != CUDA[1]


PROCESSOR = Library(str(custom_ops_library()))
CHUNK, LOOKERS, PACK = 4096, 128, {np.float32: 4, np.float64: 2}

MEASURES = ("log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh")
RULES = [
    ("Adagrad", {"decay_factor": 0.1, "norm_coefficient": 0.01}),
    ("Adam", {"norm_coefficient": 0.01, "norm_coefficient_post": 0.001}),
    ("AdamW", {"weight_decay": 0.1}),
    ("LAMB", {}),
    ("Lion", {"weight_decay": 0.1}),
    ("Momentum", {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.01, "mode": "standard"}),
    ("Momentum", {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.01, "mode": "nesterov"}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"momentum": 0.9, "mode": "nesterov"}),
    *(("SSGD", {"measure": measure}) for measure in MEASURES),
    ("SSGD", {"measure": "log-sum", "alpha": 0.9, "regularization": 1e-3, "reweighting": "l1", "max_scale": 3.0}),
    ("SSGD", {"measure": "tanh", "alpha": 0.9, "regularization": 1e-3, "reweighting": "l1", "max_scale": 3.0}),
    ("SSGD", {"measure": "p-norm", "regularization": 1e-3, "norm_coefficient": 0.01}),
]
LOOKS_FIRST = {"LAMB", "SSGD"}  # sums in float64, of other parts than the processor's
names = pytest.mark.parametrize(
    ("name", "attributes"), RULES, ids=[f"{n}-{a.get('mode', a.get('measure', ''))}-{len(a)}" for n, a in RULES]
)


@pytest.fixture(scope="module")
def gpu():
    """The kernels on a GPU: those that ONNXTRAIN_CUDA_LIBRARY names, or built here."""
    if CUDA[0] not in onnxruntime.get_available_providers():
        pytest.skip("needs onnxruntime-gpu and a GPU")
    named = os.environ.get(CUDA_VARIABLE)
    return Library(named or str(built("ON")), CUDA)


@pytest.fixture(scope="module", params=["processor", "gpu"])
def device(request):
    return request.getfixturevalue("gpu") if request.param == "gpu" else Library(str(built("PROCESSOR")))


def letters(name, attributes):
    schema = OPTIMIZERS[name].schema
    states = schema.used_states(schema.complete(attributes))
    return "XG" + "".join(state.name for state in states)


def draw(shapes, name, attributes, dtype=np.float32, seed=0):
    """Lists of X, G, the states: second moments are not negative."""
    rng = np.random.default_rng(seed)
    return [
        [
            np.asarray(np.abs(rng.standard_normal(s)) if letter == "H" else rng.standard_normal(s), dtype)
            for letter in letters(name, attributes)
        ]
        for s in shapes
    ]


class Call:
    """One node over variables, on either library."""

    def __init__(self, name, attributes, variables, factor=None, masks=None, R=0.1, T=3, wanted=None, seeds=()):
        fused = factor is not None or masks is not None
        groups = letters(name, attributes)
        columns = {letter: [variable[place] for variable in variables] for place, letter in enumerate(groups)}
        columns["M"] = masks
        order = groups if masks is None else groups[:2] + "M" + groups[2:]
        self.feeds = {"R": np.asarray(R, np.float32), "T": np.asarray(T, np.int64)}
        if fused:
            self.feeds["factor"] = np.asarray(1.0 if factor is None else factor, variables[0][0].dtype)
        self.feeds |= {f"{letter}{i}": columns[letter][i] for letter in order for i in range(len(variables))}
        produced = [f"{letter}{i}_new" for letter in groups.replace("G", "") for i in range(len(variables))]
        self.outputs = [out for out in produced if wanted is None or out in wanted]
        extra = ({"masked": 1} if masks is not None else {}) | ({"seeds": list(seeds)} if seeds else {})
        self.node = helper.make_node(
            f"Fused{name}" if fused else name,
            list(self.feeds),
            [out if out in self.outputs else "" for out in produced],
            domain="onnxtrain" if fused else OPTIMIZERS[name].schema.domain,
            **attributes,
            **extra,
        )

    def session(self, library, **settings):
        return session(
            library.path,
            [self.node],
            [(key, element_type(value), None) for key, value in self.feeds.items()],
            [(out, element_type(self.feeds[out.removesuffix("_new")]), None) for out in self.outputs],
            providers=library.providers,
            **settings,
        )

    def run(self, library):
        return dict(zip(self.outputs, self.session(library).run(None, self.feeds), strict=True))

    def both(self, device, exact):
        found, wanted = self.run(device), self.run(PROCESSOR)
        for out in self.outputs:
            if exact:
                np.testing.assert_array_equal(found[out], wanted[out], err_msg=out)
            else:
                np.testing.assert_allclose(found[out], wanted[out], rtol=2e-6, atol=1e-7, err_msg=out)
        return found


SIZES = [0, 1, 3, 4, 5, 1023, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]


@pytest.mark.parametrize("measure", MEASURES)
def test_layers_of_zeros(device, measure):
    zeros = np.zeros(70, np.float32)
    found = Call("SSGD", {"measure": measure}, [[zeros, np.ones_like(zeros)]]).both(device, exact=False)
    assert np.isfinite(found["X0_new"]).all()


@names
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sizes_around_packs_and_chunks(device, name, attributes, dtype):
    shapes = [(size,) for size in SIZES] + [(), (33, 70)]
    Call(name, attributes, draw(shapes, name, attributes, dtype)).both(device, name not in LOOKS_FIRST)


@names
@pytest.mark.parametrize("T", [0, 1])
def test_the_first_updates(device, name, attributes, T):
    Call(name, attributes, draw([(50,)], name, attributes), T=T).both(device, name not in LOOKS_FIRST)


@names
def test_a_factor_and_masks(device, name, attributes):
    shapes = [(size,) for size in SIZES]
    masks = [np.random.default_rng(1).random(shape) < 0.4 for shape in shapes]
    variables = draw(shapes, name, attributes)
    exact = name not in LOOKS_FIRST
    Call(name, attributes, variables, factor=0.37).both(device, exact)
    Call(name, attributes, variables, factor=0.37, masks=masks).both(device, exact)
    Call(name, attributes, variables, masks=masks).both(device, exact)


@names
def test_more_variables_than_one_launch_has_room_for(device, name, attributes):
    shapes = [(1 + i % 7,) for i in range(150)]
    Call(name, attributes, draw(shapes, name, attributes)).both(device, name not in LOOKS_FIRST)


def test_a_tensor_of_more_chunks_than_blocks_that_look_at_it(device):
    shapes = [(LOOKERS * CHUNK - 1,), (LOOKERS * CHUNK + 1,), (2 * LOOKERS * CHUNK + CHUNK + 5,)]
    Call("LAMB", {}, draw(shapes, "LAMB", {})).both(device, exact=False)
    for measure in ("log-sum", "tanh"):
        Call("SSGD", {"measure": measure}, draw(shapes, "SSGD", {})).both(device, exact=False)


def test_both_types_in_one_node(device):
    single, double = (draw([(70,), (9000,)], "Adam", {}, dtype) for dtype in (np.float32, np.float64))
    mixed = [single[0], double[0], single[1], double[1]]
    Call("Adam", {}, mixed).both(device, exact=True)
    Call("LAMB", {}, mixed).both(device, exact=False)


def test_unrequested_results_are_not_written(device):
    variables = draw([(70,), (5000,)], "Adam", {})
    Call("Adam", {}, variables, wanted=["X0_new", "X1_new", "H1_new"]).both(device, exact=True)


def test_nan_and_infinity_equal_the_cpu(device):
    variables = draw([(64,)], "Adam", {})
    variables[0][1][:4] = np.nan, np.inf, -np.inf, 0.0
    found = Call("Adam", {}, variables).both(device, exact=True)
    assert np.isnan(found["X0_new"][0])


class Memory:
    """Sevens on the CPU or on a GPU, with an array in the middle that begins at a place of its own."""

    def __init__(self, array, offset, on_gpu):
        self.size, self.place = array.size, 8 + offset
        whole = np.full(array.size + 40, 7.0, array.dtype)
        if on_gpu:
            torch = pytest.importorskip("torch", reason="its tensors lie anywhere in the memory of a GPU")
            self.whole = torch.from_numpy(whole).cuda()
            self.device, address = "cuda", self.whole.data_ptr()
        else:
            self.whole, self.device, address = whole, "cpu", whole.ctypes.data
        self.place += -address % 16 // array.itemsize
        self.pointer = address + self.place * array.itemsize
        self.whole[self.place : self.place + self.size] = torch.from_numpy(array).cuda() if on_gpu else array

    def read(self):
        """The array and the values around it."""
        whole = self.whole if self.device == "cpu" else self.whole.cpu().numpy()
        return whole[self.place : self.place + self.size], np.delete(
            whole, np.arange(self.place, self.place + self.size)
        )


@names
@pytest.mark.parametrize("offset", [0, 1])
def test_in_place_and_nothing_beside(device, name, attributes, offset):
    """Memory before and behind each tensor keeps its values; with an offset tensors begin in the middle of a pack."""
    sizes = [5, CHUNK + 3, 2 * CHUNK]
    call = Call(name, attributes, draw([(size,) for size in sizes], name, attributes))
    wanted = call.run(device)
    made = call.session(device)
    binding = made.io_binding()
    memory = {}
    for key, array in call.feeds.items():
        if not array.shape:  # the learning rate and the count are read on the CPU
            binding.bind_cpu_input(key, array)
            continue
        place = memory[key] = Memory(array, offset, device.on_gpu)
        binding.bind_input(key, place.device, 0, array.dtype, array.shape, place.pointer)
    for out in call.outputs:
        place, array = memory[out.removesuffix("_new")], call.feeds[out.removesuffix("_new")]
        binding.bind_output(out, place.device, 0, array.dtype, array.shape, place.pointer)
    made.run_with_iobinding(binding)
    for out in call.outputs:
        np.testing.assert_array_equal(memory[out.removesuffix("_new")].read()[0], wanted[out])
    for place in memory.values():
        assert (place.read()[1] == 7.0).all()


@names
def test_ten_updates(device, name, attributes):
    """The states of each update are the inputs of the next."""
    variables = draw([(CHUNK + 5,), (33, 7)], name, attributes)
    gradients = [draw([(CHUNK + 5,), (33, 7)], name, attributes, seed=step)[0][1] for step in range(1, 11)]
    order = letters(name, attributes).replace("G", "")
    results = []
    for library in (device, PROCESSOR):
        now = [[np.array(array) for array in variable] for variable in variables]
        for step, gradient in enumerate(gradients):
            now[0][1] = gradient
            found = Call(name, attributes, now, T=step).run(library)
            for letter in order:
                for i, variable in enumerate(now):
                    variable[letters(name, attributes).index(letter)] = found[f"{letter}{i}_new"]
        results.append(now)
    for one, other in zip(*results, strict=True):
        for found, wanted in zip(one, other, strict=True):
            if name in LOOKS_FIRST:
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(found, wanted)


class TestOnAGpu:
    """Placement, streams and graphs, which the CPU cannot stand in for."""

    def test_nodes_are_placed_on_cuda(self, gpu, tmp_path):
        made = Call("Adam", {}, draw([(4,)], "Adam", {})).session(gpu, profile=str(tmp_path / "profile"))
        made.run(None, Call("Adam", {}, draw([(4,)], "Adam", {})).feeds)
        events = json.loads(Path(made.end_profiling()).read_text())
        (placed,) = {e["args"]["provider"] for e in events if e.get("args", {}).get("op_name") == "Adam"}
        assert placed == CUDA[0]

    @pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
    def test_the_sanitizer_finds_nothing(self, gpu, tool):
        if shutil.which("compute-sanitizer") is None:
            pytest.skip("needs compute-sanitizer, a tool of CUDA")
        tests = Path(__file__).parent
        paths = os.pathsep.join([*sys.path, str(tests), str(tests.parent)])
        program = [sys.executable, str(tests / "cuda_updates_of_many_sizes.py")]
        ran = subprocess.run(
            ["compute-sanitizer", "--tool", tool, "--kernel-name", "kernel_substring=run_block", *program],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, CUDA_VARIABLE: gpu.path, "PYTHONPATH": paths},
        )
        assert "all updated" in ran.stdout, ran.stdout + ran.stderr
        assert re.search(r"SUMMARY: 0 (errors|hazards)", ran.stdout), ran.stdout

    @pytest.mark.parametrize("name", ["Adam", "LAMB"])
    def test_a_stream_of_the_user(self, gpu, name):
        """The update waits for the work that its stream has before it, and for no other stream."""
        torch = pytest.importorskip("torch", reason="its streams have other work")
        stream = torch.cuda.Stream()
        of_stream = {"user_compute_stream": str(stream.cuda_stream), "do_copy_in_default_stream": "1"}
        call = Call(name, {}, draw([(CHUNK,)], name, {}))
        wanted = call.run(gpu)
        made = call.session(gpu._replace(providers=((CUDA[0], of_stream), CUDA[1])))
        binding = made.io_binding()
        values = {key: torch.from_numpy(np.array(value)).cuda() for key, value in call.feeds.items()}
        gradient = values["G0"].clone()
        outputs = {out: torch.zeros_like(values[out.removesuffix("_new")]) for out in call.outputs}
        for key, value in call.feeds.items():
            if value.shape:
                binding.bind_input(key, "cuda", 0, value.dtype, value.shape, values[key].data_ptr())
            else:
                binding.bind_cpu_input(key, value)
        for out, value in outputs.items():
            binding.bind_output(out, "cuda", 0, np.float32, tuple(value.shape), value.data_ptr())
        settings = onnxruntime.RunOptions()
        settings.add_run_config_entry("disable_synchronize_execution_providers", "1")
        made.run_with_iobinding(binding, settings)  # the first run loads the kernels
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            values["G0"].fill_(float("nan"))
            torch.cuda._sleep(1_000_000_000)
            values["G0"].copy_(gradient)
        made.run_with_iobinding(binding, settings)
        assert not stream.query(), "the update waited for the stream"
        stream.synchronize()
        for out in call.outputs:
            np.testing.assert_array_equal(outputs[out].cpu().numpy(), wanted[out])


def test_refusals(device):
    ones = np.ones((2, 3), np.float32)
    with pytest.raises(
        Exception, match=r"Momentum: G of variable 1 of 1 is smaller than X: the kernels for CUDA need a"
    ):
        Call("Momentum", dict(RULES[5][1]), [[ones, ones[:1], ones]]).run(device)
    with pytest.raises(Exception, match=r"Momentum: V of variable 1 of 1 has shape \[1, 3\] and X has shape \[2, 3\]"):
        Call("Momentum", dict(RULES[5][1]), [[ones, ones, ones[:1]]]).run(device)
    with pytest.raises(
        Exception, match="FusedLion: attribute 'seeds' asks for states in bfloat16 or 8 bits, which the"
    ):
        Call("Lion", {}, [[ones, ones, ones]], factor=1.0, seeds=[1]).session(device)
    with pytest.raises(Exception, match=r"Adagrad: 1 [+] T [*] decay_factor is -"):
        Call("Adagrad", {"decay_factor": -1.0}, [[ones, ones, ones]]).run(device)


def test_every_optimizer_has_kernels(device):
    found = _load_cuda(Path(device.path))[0]
    assert found is not None
    assert found.operators == {name for name, _ in RULES} == set(OPTIMIZERS)


ONE, SEVERAL = "90", "75;80;86;90"


@pytest.fixture(scope="module", params=[ONE, pytest.param(SEVERAL, marks=pytest.mark.slow)])
def compiled(request):
    """The nvcc build, as far as it can be tested without a GPU."""
    return Library(str(built("ON", request.param)))


def test_nvcc_builds_it_with_all_operators(compiled):
    found = _load_cuda(Path(compiled.path))[0]
    assert found is not None
    assert found.operators == set(OPTIMIZERS)


def test_onnx_runtime_takes_its_operators_and_leaves_them_to_cuda(compiled):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(compiled.path)
    call = Call("Adam", {}, draw([(4,)], "Adam", {}))
    with pytest.raises(Exception, match="Could not find an implementation for Adam"):
        call.session(compiled)  # on the processor
