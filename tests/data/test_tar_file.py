"""Tar files of examples: equal to the arrays in them, and one sentence for every misfit."""

import io
import json
import logging
import tarfile

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.data import TarFile, TensorSpec, open_dataset
from onnxtrain.data import files as array_files
from onnxtrain.errors import DataError
from sentences import raises_sentence

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4)).astype(np.float32)
LABELS = np.arange(10) % 3
SPEC = TensorSpec("input", np.dtype(np.float32), ("N", 4))


def write(path, files):
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def arrays(suffix=".cls", label=lambda y: str(y).encode(), rows=range(10)):
    return [
        file
        for row in rows
        for file in ((f"d/{row:04d}.npy", npy(X[row])), (f"d/{row:04d}{suffix}", label(LABELS[row])))
    ]


def read(source, spec=SPEC, **options):
    (batch,) = open_dataset(source, [spec], **options).batches(100)
    return batch


@pytest.mark.parametrize("name", ["d.tar", "d.tgz"])
def test_training_on_a_file_equals_training_on_its_arrays(tmp_path, name, monkeypatch):
    monkeypatch.setattr(array_files, "MEMORY_BYTES", 100)
    path = write(tmp_path / name, arrays())
    ours, theirs = (onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy") for _ in range(2))
    assert ours.fit(path, epochs=2, batch_size=4).rows == theirs.fit(X, LABELS, epochs=2, batch_size=4).rows
    np.testing.assert_array_equal(ours.predict(path), theirs.predict(X))


@pytest.mark.parametrize(
    ("suffix", "label", "expected"),
    [
        (".cls", lambda y: b" 2\n", 2),
        (".cls", lambda y: b"cat", "cat"),
        (".txt", lambda y: b"2", "2"),
        (".json", lambda y: json.dumps({"label": 1.5}).encode(), 1.5),
        (".json", lambda y: b'"dog"', "dog"),
    ],
)
def test_targets(tmp_path, suffix, label, expected):
    assert read(write(tmp_path / "d.tar", arrays(suffix, label))).targets.tolist() == [expected] * 10


def test_shards_are_one_data_set(tmp_path):
    write(tmp_path / "b-1.tar", arrays(rows=range(6, 10)))
    write(tmp_path / "b-0.tar", arrays(rows=range(6)))
    np.testing.assert_array_equal(read(f"{tmp_path}/b-*.tar").inputs["input"], X)


def test_pictures(tmp_path, caplog):
    image = pytest.importorskip("PIL.Image")
    pixels = RNG.integers(0, 256, (3, 4, 5, 3), np.uint8)
    files = []
    for index, each in enumerate(pixels):
        content = io.BytesIO()
        image.fromarray(each).save(content, "png")
        files += [(f"{index}.PNG", content.getvalue()), (f"{index}.cls", str(index).encode())]
    spec = TensorSpec("image", np.dtype(np.float32), ("N", 3, 4, 5))
    batch = read(write(tmp_path / "p.tar", files), spec)
    np.testing.assert_allclose(batch.inputs["image"], pixels.transpose(0, 3, 1, 2) / np.float32(255), rtol=1e-6)
    assert batch.targets.tolist() == [0, 1, 2]
    normal = read(TarFile(tmp_path / "p.tar", mean=0.5, std=0.25), spec).inputs["image"]
    np.testing.assert_allclose(normal, (batch.inputs["image"] - 0.5) / 0.25, atol=1e-5)
    write(tmp_path / "p.tar", [("0.png", b"no picture"), ("0.cls", b"7"), *files[2:]])
    with raises_sentence(
        "images_cannot_be_read", what="'0.png'", got=1, of=3, advice="TarFile(path, skip_broken=True)"
    ):
        read(tmp_path / "p.tar", spec)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert read(TarFile(tmp_path / "p.tar", skip_broken=True), spec).targets.tolist() == [1, 2]
    assert "1 of 3 images cannot be read and are skipped" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"d\.tar' holds no examples; it needs files such as 0001\.jpg"),
        ([("0.npy", npy(X[0]))], r"the example '0' in .* has no target \(\.cls, .*\): it has \.npy"),
        (
            [("0.npy", npy(X[0])), ("0.cls", b"1"), ("1.cls", b"1")],
            r"the example '1' in .* has no array \(\.npy\): it has \.cls",
        ),
        ([("0.cls", b"1")], r"the example '0' in .* has no image"),
        ([("0.npy", b"x"), ("0.cls", b"1")], r"'0\.npy' in .* is truncated or not in \.npy format"),
        ([("0.npy", npy(X[0])), ("0.json", b"{")], r"'0\.json' in .* cannot be read"),
        (
            [("0.npy", npy(X[0])), ("0.json", b"[1]")],
            r"'0\.json' in .* is not a number, a string, or an object with a 'label'",
        ),
        ([("0.npy", npy(X[0])), ("0.cls", b"1"), ("1.npy", npy(X[:2])), ("1.cls", b"1")], r"array of '1' .* \(2, 4\)"),
        ([("0.npy", npy(X[0])), ("0.cls", b"1"), ("1.npy", npy(X[1])), ("1.cls", b"a")], r"1 targets that are strings"),
    ],
    ids=range(9),
)
def test_files_that_do_not_fit(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "d.tar", files))


def test_other_mistakes(tmp_path):
    with raises_sentence("no_tar_file", what=f"'{tmp_path}/missing.tar'"):
        read(tmp_path / "missing.tar")
    (tmp_path / "d.tar").write_bytes(b"no tar file")
    with pytest.raises(DataError, match=r"d\.tar' cannot be read as a tar file"):
        read(tmp_path / "d.tar")
    whole = write(tmp_path / "e.tar", arrays()).read_bytes()
    (tmp_path / "e.tar").write_bytes(whole[:700])
    with pytest.raises(DataError, match=r"e\.tar' cannot be read as a tar file"):
        read(tmp_path / "e.tar")
    with pytest.raises(DataError, match="leave out target="):
        read(tmp_path / "e.tar", target="y")
