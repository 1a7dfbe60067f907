"""Any damage to the bytes of a checkpoint gives an error or the original tensors, never others."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_trainer import data, trainer, weights

from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.training.callbacks import EarlyStopping
from onnxtrain.training.checkpoints import CheckpointStore
from sentences import raises_sentence
from zoo.arrays import assert_same

MUTATIONS = 1500


def flip(content: bytearray, position: int, rng: random.Random) -> bytearray:
    content[position] ^= 1 << rng.randrange(8)
    return content


def mutate(content: bytes, rng: random.Random, header: int) -> bytes:
    """Damage a file in one of several ways; ``header`` is the end of its header, which is damaged more often."""
    end = rng.choice([8, header, len(content)])
    position = rng.randrange(min(end, len(content)))
    length = rng.choice([1, 4, 100])
    kinds = [
        lambda: bytes(flip(bytearray(content), position, rng)),
        lambda: content[:position] + bytes([rng.randrange(256)]) + content[position + 1 :],
        lambda: content[:position] + rng.choice(b'0123456789{}[]",:-e \n').to_bytes(1, "big") + content[position + 1 :],
        lambda: content[:position],
        lambda: content[:position] + content[position + length :],
        lambda: content + rng.choice([b"\0", b" ", b"\n", b"}", bytes(length)]),
        lambda: content[:position] + rng.choice([b"\0", b"9", b"[" * 5000, b"-", b"NaN"]) + content[position:],
        lambda: content[:position] + bytes(length) + content[position + length :],
        lambda: content[:position] + content[position : position + length] + content[position:],
        lambda: b"",
    ]
    return rng.choice(kinds)()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return checkpoints of the second and third epoch of a training with early stopping."""
    folder = tmp_path_factory.mktemp("trained")
    fit(folder, epochs=3)
    assert CheckpointStore(folder).steps() == [6, 9]
    return folder


def fit(folder: Path, **options):
    subject = trainer()
    subject.fit(
        data(), validation=data(8, 1), batch_size=8, callbacks=[EarlyStopping()], checkpoint=folder, keep=2, **options
    )
    return subject


@pytest.mark.sampled(2)
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_damage_to_any_byte_is_found(trained: Path, tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(trained, folder)
    store = CheckpointStore(folder)
    tensors, metadata = store.load()
    path = store.latest().with_suffix(suffix)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little") if suffix == ".safetensors" else len(content) // 2
    rng = random.Random(7)
    same = 0
    for _ in range(MUTATIONS):
        path.write_bytes(mutate(content, rng, header))
        try:
            found, said = store.load()
        except CheckpointError:
            continue
        same += 1  # for example a space added at the end of the JSON
        assert said == metadata
        assert_same(found, tensors)
    assert same < MUTATIONS / 5


def test_files_that_were_exchanged_are_found(trained: Path, tmp_path: Path) -> None:
    for suffix in (".json", ".safetensors"):
        folder = tmp_path / suffix
        shutil.copytree(trained, folder)
        first, second = sorted(folder.glob(f"*{suffix}"))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        for step in (6, 9):
            with pytest.raises(CheckpointError, match="is damaged"):
                CheckpointStore(folder).load(step)


def test_a_resumed_training_goes_back_to_the_checkpoint_before(trained: Path, tmp_path: Path, caplog) -> None:
    expected = weights(fit(tmp_path / "whole", epochs=4))
    rng = random.Random(3)
    for number in range(12):
        folder = tmp_path / str(number)
        shutil.copytree(trained, folder)
        path = CheckpointStore(folder).latest().with_suffix(rng.choice([".json", ".safetensors"]))
        path.write_bytes(mutate(path.read_bytes(), rng, 60))
        caplog.clear()
        assert_same(weights(fit(folder, epochs=4, resume=True)), expected)
        named = "step-9.json' is damaged" in caplog.text and "newest complete one is" in caplog.text
        assert named or not caplog.text
        assert CheckpointStore(folder).steps()[-1] == 12


def test_where_all_are_damaged_the_newest_is_named(trained: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    for number in range(12):
        folder = tmp_path / str(number)
        shutil.copytree(trained, folder)
        for path in sorted(folder.glob("*.json")):
            path = path.with_suffix(rng.choice([".json", ".safetensors"]))
            path.write_bytes(path.read_bytes()[: rng.choice([0, 10, 200])])
        with raises_sentence("damaged_checkpoint", path="step-9.json", newest="the folder holds no other complete one"):
            fit(folder, epochs=4, resume=True)


@pytest.mark.parametrize("key", ["types", "metadata", "step", "format_version", "checksum"])
def test_every_part_of_the_record_is_under_the_checksum(trained: Path, tmp_path: Path, key: str) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(trained, folder)
    path = CheckpointStore(folder).latest()
    record = json.loads(path.read_text())
    replaced = {"types": {"state/T": "int8"}, "metadata": {}, "step": 8, "format_version": 2, "checksum": "0" * 32}
    path.write_text(json.dumps(record | {key: replaced[key]}))
    with pytest.raises(CheckpointError, match=r"has not the checksum that it was written with|has format version 2"):
        CheckpointStore(folder).load()


def test_what_a_killed_process_left_is_cleared_when_the_next_begins(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(trained, folder)
    (folder / ".writing").mkdir()
    (folder / ".writing" / "half.safetensors").write_bytes(b"half")
    (folder / "checkpoint-000009-step-12.safetensors").write_bytes(b"no json yet")
    CheckpointStore(folder).prepare()
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in trained.iterdir())
    (folder / ".writing").write_text("a file instead of the folder")
    CheckpointStore(folder).prepare()
    assert not (folder / ".writing").exists()


def _file(path: Path) -> None:
    path.write_text("a file")


def _link_loop(path: Path) -> None:
    path.symlink_to(path)


def _in_a_file(path: Path) -> None:
    path.parent.write_text("a file")


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("kept", _file, "it is not a folder; give a writable folder"),
        ("kept", _link_loop, ".+; give "),
        ("folder/kept", _in_a_file, ".+; give "),
        ("k" * 300, lambda path: None, "File name too long; give a writable folder"),
        ("nu\0ll", lambda path: None, "(mkdir: )?embedded null .*; give"),
    ],
)
def test_a_folder_that_cannot_be_is_named_before_the_first_step(tmp_path: Path, name: str, spoil, reason: str) -> None:
    path = tmp_path / name
    spoil(path)
    subject = trainer()
    before = weights(subject)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=rf"checkpoints cannot be written to '.*': {reason}"):
            subject.fit(data(), checkpoint=path, resume=resume)
    assert_same(weights(subject), before)


def test_a_disk_that_takes_no_files_is_named_before_the_first_step(tmp_path: Path, monkeypatch) -> None:
    def refuse(self, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with raises_sentence("checkpoints_cannot_be_written", what=tmp_path, got="Permission denied"):
        trainer().fit(data(), checkpoint=tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_without_a_name_is_refused() -> None:
    with raises_sentence("checkpoint_option", what="checkpoint"):
        trainer().fit(data(), checkpoint="")


def test_an_interrupted_training_says_where_to_go_on(tmp_path: Path) -> None:
    class Loader:
        """Batches that raise an error in the second epoch."""

        def __init__(self, error: BaseException) -> None:
            self.error, self.epochs = error, 0

        def __iter__(self):
            x, y = data()
            yield x[:8], y[:8]
            self.epochs += 1
            if self.epochs == 2:
                raise self.error
            yield x[8:], y[8:]

    for number, error in enumerate([KeyboardInterrupt(), OptionError("no more"), RuntimeError("no more")]):
        with pytest.raises(type(error)) as caught:
            trainer().fit(Loader(error), epochs=3, checkpoint=tmp_path / str(number))
        if number == 0:
            assert "step-2.json' is kept, resume=True goes on from there." in str(caught.value)
    once = (batch for batch in [(data()[0], data()[1])])
    with raises_sentence("one_shot_iterator_resumed", what="data", got="generator", checkpoint="step-1.json'"):
        trainer().fit(once, epochs=3, checkpoint=tmp_path / "once")
    assert not np.any([".writing" in names for _, names, _ in os.walk(tmp_path)])


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(trained: Path, tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    newest = max(folder.glob(f"*{suffix}"))
    newest.unlink()
    os.mkfifo(newest)
    store = CheckpointStore(folder)
    with raises_sentence("damaged_checkpoint", problem="not a regular file", newest="of step 6"):
        store.load(9)
    assert store.load_newest()[1]["step"] == 6
