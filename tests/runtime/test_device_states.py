"""States in device memory: steps match those on the CPU, and states are copied only when they are read.

No device is needed: CPU memory that only sessions may access replaces it.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.runtime import states as state_buffers
from onnxtrain.runtime import step
from onnxtrain.runtime.options import Device, RuntimeOptions, choose, device_of
from onnxtrain.runtime.states import DeviceStates, StateBuffers
from onnxtrain.training.examples import digits_cnn, mlp, small_resnet
from sentences import raises_sentence


class _Value(onnxruntime.OrtValue):
    """An OrtValue that counts copies to and from the CPU."""

    def __init__(self, array: np.ndarray, device: CountingDevice) -> None:
        self._array = array.copy()
        super().__init__(onnxruntime.OrtValue.ortvalue_from_numpy(self._array)._ortvalue)
        self._device = device

    def numpy(self) -> np.ndarray:
        self._device.fetched += 1
        return np.array(super().numpy())

    def update_inplace(self, array: np.ndarray) -> None:
        self._device.sent += 1
        super().update_inplace(array)


class CountingDevice(Device):
    def __init__(self) -> None:
        super().__init__("counting")
        object.__setattr__(self, "fetched", 0)
        object.__setattr__(self, "sent", 0)

    __setattr__ = object.__setattr__

    def upload(self, array: np.ndarray) -> _Value:
        return _Value(np.array(array), self)


@pytest.fixture
def device(monkeypatch):
    found = CountingDevice()
    monkeypatch.setattr(state_buffers, "device_of", lambda providers: found)
    return found


X, Y = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
ON_BODIES = RuntimeOptions(threads=1, kernels=False)


def _trainer(model=None, optimizer="adam(lr=0.05)", **options):
    given = {"loss": "softmax_cross_entropy", "runtime": ON_BODIES, **options}
    return onnxtrain.Trainer(mlp((4, 8, 3)) if model is None else model, optimizer=optimizer, **given)


def _host(monkeypatch, *arguments, **options):
    with monkeypatch.context() as context:
        context.setattr(state_buffers, "device_of", lambda providers: None)
        return _trainer(*arguments, **options)


def _equal(one, other) -> bool:
    return all(np.array_equal(one.executor.states[name], other.executor.states[name]) for name in one.executor.states)


@pytest.mark.parametrize("optimizer", ["adam(lr=0.05)", "momentum(lr=0.1)", "ssgd(lr=0.1)", "adamw", "lion", "rmsprop"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_norm": 0.1}], ids=["plain", "accumulate", "clip"])
def test_steps_are_those_of_the_processor(device, monkeypatch, optimizer, options):
    here, there = _host(monkeypatch, optimizer=optimizer, **options), _trainer(optimizer=optimizer, **options)
    assert type(here.executor.states) is StateBuffers
    assert isinstance(there.executor.states, DeviceStates)
    for _ in range(4):
        assert here.train_step(X, Y) == there.train_step(X, Y)
    assert _equal(here, there)


@pytest.mark.parametrize("model", [digits_cnn, small_resnet])
def test_convolutions_and_statistics(device, monkeypatch, model):
    shape = (6, 1, 8, 8) if model is digits_cnn else (6, 3, 16, 16)
    x, y = np.random.default_rng(1).random(shape, np.float32), np.arange(6) % 4
    here, there = (
        make(model(), batch_norm="train") for make in (lambda *a, **o: _host(monkeypatch, *a, **o), _trainer)
    )
    for _ in range(3):
        assert here.train_step(x, y) == there.train_step(x, y)
    assert _equal(here, there)
    assert here.evaluate((x, y)) == there.evaluate((x, y))
    np.testing.assert_array_equal(here.predict(x), there.predict(x))


def test_states_are_copied_only_on_access(device):
    trainer = _trainer()
    trainer.train_step(X, Y)
    device.fetched = device.sent = 0
    for _ in range(5):
        trainer.train_step(X, Y)
    trainer.evaluate((X, Y))
    assert (device.fetched, device.sent) == (0, 0)
    held = trainer.parameters["layer1.bias"]
    assert device.fetched == 1
    trainer.train_step(X, Y)
    assert (device.fetched, device.sent) == (2, 1)
    del held
    gc.collect()
    device.fetched = device.sent = 0
    trainer.train_step(X, Y)
    assert (device.fetched, device.sent) == (0, 0)


def test_arrays_are_live(device):
    """A held array has the new value after a step, and writing to it affects the next step."""
    trainer, other = _trainer(optimizer="sgd(lr=0.1)"), _trainer(optimizer="sgd(lr=0.1)")
    held = trainer.parameters["layer1.weight"]
    before = held.copy()
    trainer.train_step(X, Y)
    assert not np.array_equal(held, before)
    assert np.array_equal(held, trainer.parameters["layer1.weight"])
    held[...] = before
    for name in ("layer1.bias", "layer2.weight", "layer2.bias"):
        trainer.parameters[name] = other.parameters[name]
    assert trainer.train_step(X, Y) == other.train_step(X, Y)


def test_what_is_written_into_an_array_that_is_dropped_counts(device):
    trainer = _trainer()
    trainer.parameters["layer1.weight"][...] = 0.5
    assert (trainer.parameters["layer1.weight"] == 0.5).all()
    view = trainer.executor.states["layer1.weight"][0]
    view[:] = 2.0
    del view
    gc.collect()
    assert (trainer.get_weights()["layer1.weight"][0] == 2.0).all()
    assert (trainer.get_weights()["layer1.weight"][1] == 0.5).all()


def test_two_arrays_of_one_state_are_one(device):
    trainer = _trainer()
    first, second = trainer.executor.states["layer1.bias"], trainer.executor.states["layer1.bias"]
    first[0] = 7.0
    trainer.executor.states["layer1.bias"] = np.asarray(second) + 1
    assert first[0] == second[0] == 8.0


def test_a_state_with_two_buffers(device, monkeypatch):
    """A graph that reads a state after the update needs a second buffer to write to."""
    original = step.StepSession.__init__

    def doubled(self, graph, *arguments, **options):
        original(self, graph._replace(in_place=frozenset()), *arguments, **options)

    monkeypatch.setattr(step.StepSession, "__init__", doubled)
    here, there = _host(monkeypatch), _trainer()
    held = None
    for number in range(6):
        assert here.train_step(X, Y) == there.train_step(X, Y)
        held = there.executor.states["layer1.weight"] if number == 2 else held
        if number == 4:
            np.testing.assert_array_equal(held, here.executor.states["layer1.weight"])
            held = None
    assert there.executor.states.doubled
    assert _equal(here, there)


def test_saved_copied_and_sent_elsewhere(device, tmp_path):
    trainer = _trainer()
    trainer.train_step(X, Y)
    trainer.save(tmp_path / "model.onnx")
    assert onnxtrain.evaluate(tmp_path / "model.onnx", (X, Y), loss="softmax_cross_entropy") == trainer.evaluate((X, Y))
    twins = [copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))]
    expected = trainer.train_step(X, Y)
    assert [twin.train_step(X, Y) for twin in twins] == [expected] * 2


def test_checkpoints_resume_bit_for_bit(device, tmp_path):
    whole, half = _trainer(), _trainer()
    whole.fit(X, Y, epochs=4, batch_size=5)
    half.fit(X, Y, epochs=2, batch_size=5, checkpoint=tmp_path / "checkpoints")
    again = _trainer()
    again.fit(X, Y, epochs=4, batch_size=5, checkpoint=tmp_path / "checkpoints", resume=True)
    assert _equal(whole, again)


def test_a_state_that_does_not_fit(device):
    states = _trainer().executor.states
    with raises_sentence("state_differs", what="layer1.bias", got=(8,), wanted=(8,), type="float32", given="float64"):
        states["layer1.bias"] = np.zeros(8)
    with raises_sentence("no_state", what="none", states="layer1.weight"):
        states["none"] = np.zeros(8)


def test_several_processes_need_the_memory_of_the_processor(device):
    states = _trainer(accumulate=2).executor.states
    for together in (
        lambda: states.make_contiguous(["layer1.bias"]),
        lambda: states.set_buffer("layer1.bias", np.zeros(8, np.float32)),
    ):
        with raises_sentence("states_in_device_memory", what="states", got="counting", wanted="cpu"):
            together()


FORBIDDING = """
import ctypes, mmap, sys
import numpy as np, onnxruntime, onnxtrain
from onnxtrain.runtime import states as state_buffers
from onnxtrain.runtime import step
from onnxtrain.runtime.options import Device

libc = ctypes.CDLL(None, use_errno=True)
pages = []

def protect(how):
    for start, size in pages:
        assert not libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), how)

class Forbidding(Device):
    def upload(self, array):
        array = np.asarray(array)
        memory = mmap.mmap(-1, max(1, -(-array.nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE)
        own = np.frombuffer(memory, np.uint8, array.nbytes).view(array.dtype).reshape(array.shape)
        own[...] = array
        pages.append((ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)))
        value = onnxruntime.OrtValue.ortvalue_from_numpy(own)
        assert value.data_ptr() == own.ctypes.data
        if "stray" in sys.argv:
            global stray
            stray = own
        protect(0)
        return value

state_buffers.device_of = lambda providers: Forbidding("forbidding")
run = step.Session.run_with_iobinding

def unlocked(self, binding):
    protect(mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        run(self, binding)
    finally:
        protect(0)

step.Session.run_with_iobinding = unlocked
options = onnxtrain.RuntimeOptions(threads=1, kernels=False)
trainer = onnxtrain.Trainer(onnxtrain.examples.lenet5(), loss="softmax_cross_entropy", runtime=options)
x = np.random.default_rng(0).random((4, 1, 28, 28), np.float32)
losses = [trainer.train_step(x, np.arange(4)) for _ in range(5)]
trainer.evaluate((x, np.arange(4)))
if "stray" in sys.argv:
    stray[...]+ 0
print(*losses)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by Linux's mprotect")
def test_the_processor_does_not_touch_the_memory_of_states():
    """Memory protection between two runs of a session kills the process on any access to states."""
    ran, strayed = (
        subprocess.run([sys.executable, "-c", FORBIDDING, *arguments], capture_output=True, text=True)
        for arguments in ([], ["stray"])
    )
    assert ran.returncode == 0, ran.stderr
    assert strayed.returncode == -11
    x = np.random.default_rng(0).random((4, 1, 28, 28), np.float32)
    here = onnxtrain.Trainer(onnxtrain.examples.lenet5(), loss="softmax_cross_entropy", runtime=ON_BODIES)
    assert [float(loss) for loss in ran.stdout.split()] == [here.train_step(x, np.arange(4)) for _ in range(5)]


class TestProviders:
    def test_names(self, monkeypatch):
        available = ["CUDAExecutionProvider", "DmlExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
        exact = {"use_tf32": "0"}  # products of float32 in float32
        assert choose(["cuda"]) == [("CUDAExecutionProvider", exact), "CPUExecutionProvider"]
        assert choose([("cuda", {"use_tf32": "1"})])[0] == ("CUDAExecutionProvider", {"use_tf32": "1"})
        assert choose(["CPUExecutionProvider"]) == ["CPUExecutionProvider"]
        given = ("Cuda", {"device_id": "1"})
        assert choose([given, "dml"])[:2] == [("CUDAExecutionProvider", exact | given[1]), "DmlExecutionProvider"]
        assert device_of(choose([given])) == Device("cuda", 1)
        assert device_of(choose(["dml"])) == Device("dml")
        assert device_of(choose(["cpu"])) is None

    def test_a_missing_provider_is_named_with_the_available_ones(self):
        with raises_sentence("unknown_provider", what="providers", got="cuda", short="azure, cpu"):
            _trainer(runtime=RuntimeOptions(providers=["cuda"]))

    @pytest.mark.parametrize("given", ["cuda", []])
    def test_a_list_is_needed(self, given):
        with raises_sentence("providers_option", what="providers"):
            RuntimeOptions(providers=given)

    def test_kernels_are_the_processors(self, monkeypatch):
        available = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
        assert RuntimeOptions(providers=["cuda"]).uses_kernels() is False
        with raises_sentence("cuda_library_missing", provider="CUDAExecutionProvider"):
            RuntimeOptions(providers=["cuda"], kernels=True).uses_kernels()

    @pytest.mark.filterwarnings("ignore:Specified provider")
    def test_one_that_does_not_start_is_an_error(self, monkeypatch):
        """ONNX Runtime only logs that a provider's libraries are missing, and continues without the provider."""
        available = [*onnxruntime.get_available_providers(), "ROCMExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
        trainer = _trainer(runtime=RuntimeOptions(threads=1, providers=["rocm"]))
        with raises_sentence("provider_does_not_start", what="ROCMExecutionProvider", got=["CPUExecutionProvider"]):
            trainer.train_step(X, Y)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_a_device_keeps_the_shape_of_a_state(shape):
    """A scalar stays one: the count of an accumulation once had the shape [1] on a device."""
    states = DeviceStates({"s": np.ones(shape, np.float32)}, Device("cpu"))
    states["s"] = np.full(shape, 2.0, np.float32)
    assert states.current("s").shape == shape
    assert states.current("s").sum() == 2.0 * np.prod(shape)
