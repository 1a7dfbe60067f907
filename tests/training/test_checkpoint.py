"""Checkpoints: all tensor types survive, only complete checkpoints are visible, errors name damage and mismatches."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from child_processes import child_process
from onnxtrain.errors import CheckpointError
from onnxtrain.training.checkpoints import CheckpointStore
from sentences import raises_sentence


def names(folder):
    return sorted(path.name for path in folder.iterdir())


TYPES = [
    np.bool_,
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.int4,
]


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_type_and_shape_survives(tmp_path, dtype):
    tensors = {
        "scalar": np.asarray(1, dtype),
        "empty": np.zeros((0, 3), dtype),
        "matrix": np.arange(6).reshape(2, 3).astype(dtype),
        "transposed": np.arange(6).reshape(2, 3).astype(dtype).T,
        "strided": np.arange(7).astype(dtype)[::2],
    }
    store = CheckpointStore(tmp_path)
    store.save(1, tensors, {})
    loaded, _ = store.load()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert loaded[name].tobytes() == tensor.tobytes(), name


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_checkpoints_follow_the_umask(tmp_path):
    CheckpointStore(tmp_path).save(1, {"w": np.zeros(3)}, {})
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_special_values_and_byte_orders_survive(tmp_path):
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 5e-324])
    tensors = {"special": special, "big_endian": np.arange(3, dtype=">f4"), "number": np.float32(7)}
    store = CheckpointStore(tmp_path)
    store.save(1, tensors, {})
    loaded, _ = store.load()
    assert loaded["special"].tobytes() == special.tobytes()
    assert loaded["big_endian"].tolist() == [0, 1, 2]
    assert loaded["number"] == 7


def test_any_name_survives(tmp_path):
    odd = ["", " ", "a/b:0", "../up", 'quote"', "back\\slash", "new\nline", "\0", "é漢😀", "onnx::MatMul_1"]
    reserved = ["__metadata__", "___metadata__", "____metadata__", "_metadata__", "__metadata__x"]
    tensors = {name: np.full(2, index, np.float32) for index, name in enumerate(odd + reserved)}
    tensors |= {f"{name} bits": value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    store = CheckpointStore(tmp_path)
    store.save(1, tensors, {})
    loaded, _ = store.load()
    assert loaded.keys() == tensors.keys()
    assert all((loaded[name] == value).all() for name, value in tensors.items())


def test_metadata_survives(tmp_path):
    metadata = {
        "epoch": 3,
        "best": math.inf,
        "rate": 0.1 + 0.2,
        "random": {"state": 2**127 + 1},
        "rows": [1, None, "é"],
        "numpy": np.float32(0.5),
    }
    store = CheckpointStore(tmp_path)
    path = store.save(12, {}, metadata)
    tensors, loaded = store.load()
    assert tensors == {}
    assert loaded == {**metadata, "step": 12, "format_version": 1}
    assert path == store.latest() == tmp_path / "checkpoint-000001-step-12.json"


def test_keeps_the_last(tmp_path):
    store = CheckpointStore(tmp_path / "new" / "folder", keep=2)
    assert (store.latest(), store.steps()) == (None, [])
    for step in (1, 2, 3):
        store.save(step, {"w": np.full(2, step)}, {})
    assert store.steps() == [2, 3]
    assert names(store.folder) == [
        "checkpoint-000002-step-2.json",
        "checkpoint-000002-step-2.safetensors",
        "checkpoint-000003-step-3.json",
        "checkpoint-000003-step-3.safetensors",
    ]
    assert store.load(2)[0]["w"][0] == 2
    assert store.load()[0]["w"][0] == 3


def test_loads_by_path(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"w": np.full(2, 1)}, {})
    store.save(2, {"w": np.full(2, 2)}, {})
    elsewhere = CheckpointStore(tmp_path / "elsewhere")
    for given in (path, str(path), path.with_suffix(".safetensors")):
        assert elsewhere.load(given)[1]["step"] == 1


def test_a_training_that_went_back_continues_from_its_own_last_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (10, 20, 30):
        store.save(step, {}, {"run": "first"})
    store.save(5, {}, {"run": "second"})
    assert store.load()[1]["step"] == 5
    store.save(20, {}, {"run": "second"})
    assert store.steps() == [30, 5, 20]
    assert store.load(20)[1]["run"] == "second"


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"w": np.zeros(2)}, {})
    store.save(1, {"w": np.ones(2)}, {})
    assert store.steps() == [1]
    assert store.load()[0]["w"][0] == 1
    assert len(names(tmp_path)) == 2


def test_leftovers_are_ignored_and_cleared(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {}, {})
    (tmp_path / "checkpoint-000002-step-2.safetensors").write_bytes(b"no json yet")
    (tmp_path / ".writing").mkdir()
    (tmp_path / ".writing" / "checkpoint-000003-step-3.safetensors").write_bytes(b"half")
    (tmp_path / ".writing" / "checkpoint-000003-step-3.json").write_bytes(b"{")
    for foreign in ("checkpoint-notes.json", "model.safetensors", "notes.txt"):
        (tmp_path / foreign).write_text("not ours")
    assert store.steps() == [1]
    assert store.load()[1]["step"] == 1
    store.save(4, {}, {})
    assert names(tmp_path) == [
        "checkpoint-000001-step-1.json",
        "checkpoint-000001-step-1.safetensors",
        "checkpoint-000002-step-4.json",
        "checkpoint-000002-step-4.safetensors",
        "checkpoint-notes.json",
        "model.safetensors",
        "notes.txt",
    ]


def two_checkpoints(folder):
    store = CheckpointStore(folder)
    for step in (1, 2):
        store.save(step, {"w": np.arange(100.0)}, {})
    return store, store.latest()


def truncate(path):
    os.truncate(path, 100)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("suffix", "harm", "problem"),
    [
        (".safetensors", truncate, r"'checkpoint-000002-step-2\.safetensors' has 100 bytes instead of \d+"),
        (
            ".safetensors",
            flip_a_bit,
            r"'checkpoint-000002-step-2\.safetensors' has not the checksum that it was written with",
        ),
        (".safetensors", Path.unlink, r"'checkpoint-000002-step-2\.safetensors' is missing"),
        (".json", truncate, r"its JSON cannot be read \(.+\)"),
        (
            ".json",
            lambda path: path.write_text("[]"),
            r"its JSON cannot be read \(it has no format version\)",
        ),
        (
            ".json",
            lambda path: path.write_text('{"format_version": 1, "step": "2"}'),
            r"its JSON cannot be read \(it has no valid step, bytes, crc32, types, metadata\)",
        ),
    ],
)
def test_damage_is_named_with_the_newest_complete_checkpoint(tmp_path, suffix, harm, problem):
    store, path = two_checkpoints(tmp_path)
    harm(path.with_suffix(suffix))
    good = r"; the newest complete one is '.*checkpoint-000001-step-1\.json' of step 1\."
    for checkpoint in (None, 2, path):
        with pytest.raises(CheckpointError, match=r"step-2\.json' is damaged: " + problem + good):
            store.load(checkpoint)
    truncate(tmp_path / "checkpoint-000001-step-1.safetensors")
    with raises_sentence("damaged_checkpoint", newest="the folder holds no other complete one") as caught:
        store.load()
    assert re.search(problem, str(caught.value))


def test_tensors_that_are_not_safetensors_are_named_even_if_their_checksum_fits(tmp_path):
    store, path = two_checkpoints(tmp_path)
    path.with_suffix(".safetensors").write_bytes(b"something else")
    record = json.loads(path.read_text()) | {"bytes": 14, "crc32": zlib.crc32(b"something else")}
    path.write_text(json.dumps(record))
    with raises_sentence(
        "damaged_checkpoint", problem="step-2.safetensors' cannot be read (", newest="the newest complete"
    ):
        store.load()


def test_a_format_of_the_future_is_named(tmp_path):
    store, path = two_checkpoints(tmp_path)
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 7'))
    with raises_sentence("checkpoint_version", what=tmp_path / "checkpoint-000002-step-2.json", got=7, wanted=1):
        store.load()


def test_checkpoints_that_are_not_there(tmp_path):
    with raises_sentence("no_checkpoint", what=tmp_path / "missing"):
        CheckpointStore(tmp_path / "missing").load()
    store, _ = two_checkpoints(tmp_path)
    with raises_sentence("no_checkpoint_of_step", what=tmp_path, got=9, steps="1, 2"):
        store.load(9)
    with raises_sentence("not_a_checkpoint", path="nothing.json", newest="the newest complete one is"):
        store.load(tmp_path / "nothing.json")
    with raises_sentence("not_a_checkpoint", newest="the folder holds no complete one"):
        store.load(tmp_path / "missing" / "nothing.json")


def test_a_fingerprint_that_differs_is_named_key_by_key(tmp_path):
    store = CheckpointStore(tmp_path)
    fingerprint = {"model": "abc", "batch_size": 32, "shape": (1, 2), "rate": np.float64(0.1)}
    store.save(1, {}, {"fingerprint": fingerprint})
    store.load(expect=fingerprint)
    store.load(expect={**fingerprint, "shape": [1, 2]})
    with pytest.raises(CheckpointError) as caught:
        store.load(expect={"model": "abc", "batch_size": 64, "shape": (1, 2), "seed": 0})
    assert (
        "belongs to another training: batch_size is 32 there and 64 here, "
        "rate is 0.1 there and missing here, seed is missing there and 0 here; resume with the same"
        in str(caught.value)
    )
    store.save(2, {}, {})
    with pytest.raises(CheckpointError, match='model is missing there and "abc" here'):
        store.load(expect={"model": "abc"})


def test_what_cannot_be_saved(tmp_path):
    store = CheckpointStore(tmp_path)
    with raises_sentence("checkpoint_holds_numbers", what="w", got="object"):
        store.save(1, {"w": np.array([None])}, {})
    with raises_sentence("metadata_not_json", error="a set is not a JSON value"):
        store.save(1, {"w": np.zeros(2)}, {"names": {1, 2}})
    with raises_sentence("step_of_checkpoint", what="step", got=-1):
        store.save(-1, {}, {})
    with raises_sentence("keep_option", what="keep", got=0):
        CheckpointStore(tmp_path, keep=0)
    assert names(tmp_path) == []
    (tmp_path / "file").write_text("")
    with raises_sentence("checkpoint_cannot_be_written", what=tmp_path / "file", got=1, error="File exists"):
        CheckpointStore(tmp_path / "file").save(1, {}, {})


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_checkpoints_before(tmp_path, monkeypatch, function):
    store, _ = two_checkpoints(tmp_path)
    before = names(tmp_path)

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with raises_sentence("checkpoint_cannot_be_written", what=tmp_path, got=3, error="No space left on device"):
        store.save(3, {"w": np.zeros(3)}, {})
    assert names(tmp_path) == before
    assert store.load()[1]["step"] == 2


# Every tensor holds the step, which reveals a checkpoint that mixes two steps.
WRITER = """
import sys, numpy as np
from onnxtrain.training.checkpoints import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
step = max(store.steps(), default=0)
while True:
    step += 1
    store.save(step, {f"w{i}": np.full(50_000, step, np.float32) for i in range(4)}, {"epoch": step})
    print(step, flush=True)
"""


def assert_complete(store):
    for step in store.steps():
        tensors, metadata = store.load(step)
        assert metadata["epoch"] == metadata["step"] == step
        assert len(tensors) == 4
        assert all((tensor == step).all() for tensor in tensors.values())


@pytest.mark.thorough
def test_a_killed_writer_never_leaves_a_broken_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    delays, last, half_done = random.Random(0), 0, 0
    for _ in range(25):
        with child_process([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
            assert int(writer.stdout.readline()) > last
            start = time.monotonic()
            last = int(writer.stdout.readline())
            time.sleep(delays.uniform(0.0, 3.0) * (time.monotonic() - start))
            writer.send_signal(signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL
        assert_complete(store)
        assert store.load()[1]["step"] >= last
        last = store.steps()[-1]
        half_done += len(names(tmp_path)) > 2 * len(store.steps())
    assert half_done > 0  # some died in the middle of a checkpoint
    store.save(last + 1, {f"w{i}": np.full(3, last + 1) for i in range(4)}, {"epoch": last + 1})
    assert_complete(store)
    assert len(names(tmp_path)) == 4


# The process dies before its n-th file operation, for every n: an audit hook sees all except fsync, which is patched.
CRASHER = """
import os, sys, numpy as np
from onnxtrain.training.checkpoints import CheckpointStore

EVENTS = ("fsync", "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

def crash_at(operation):
    count = 0
    def step(event, arguments=()):
        nonlocal count
        if event in EVENTS:
            count += 1
            if count > operation:
                os._exit(9)
    fsync = os.fsync
    os.fsync = lambda descriptor: (step("fsync"), fsync(descriptor))[1]
    sys.addaudithook(step)

operation = 0
while True:
    folder = os.path.join(sys.argv[1], str(operation))
    store = CheckpointStore(folder, keep=2)
    for step in (1, 2):
        store.save(step, {f"w{i}": np.full(100, step) for i in range(4)}, {"epoch": step})
    child = os.fork()
    if not child:
        crash_at(operation)
        store.save(3, {f"w{i}": np.full(100, 3) for i in range(4)}, {"epoch": 3})
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
    operation += 1
"""


def test_death_in_front_of_any_file_operation_leaves_complete_checkpoints(tmp_path):
    subprocess.run([sys.executable, "-c", CRASHER, str(tmp_path)], check=True)
    runs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    newest = []
    for run in runs:
        store = CheckpointStore(run, keep=2)
        assert_complete(store)
        assert len(store.steps()) >= 2
        newest.append(store.steps()[-1])
        store.save(4, {f"w{i}": np.full(100, 4) for i in range(4)}, {"epoch": 4})
        assert len(names(run)) == 4
    assert len(runs) > 10
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}
