"""Hostile and damaged files: one sentence names the file."""

from __future__ import annotations

import io
import os
import struct
import tarfile

import numpy as np
import pytest

from onnxtrain.data import CsvFile, TarFile, TensorSpec, open_dataset
from onnxtrain.errors import DataError
from sentences import raises_sentence

SPEC = TensorSpec("x", np.dtype(np.float32), ("N", 2))
LINES = "a,b,y\n1,2,0\n3,4,1\n"


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def header(shape):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("encoding", ["punycode", "undefined", "idna_no_such", "base64"])
def test_invalid_encodings(tmp_path, encoding):
    (tmp_path / "t.csv").write_text(LINES)
    with (
        raises_sentence("csv_encoding", encoding="punycode")
        if encoding == "punycode"
        else raises_sentence("unknown_encoding", what="encoding", got=encoding)
    ):
        open_dataset(CsvFile(tmp_path / "t.csv", encoding=encoding), [SPEC], target="y")


@pytest.mark.thorough
def test_more_columns_than_a_cell_has_characters(tmp_path):
    """Tables of genes have as many: with another separator the first line would be one cell."""
    count = 20_000
    names = ",".join(f"gene_{index}" for index in range(count))
    assert len(names) > 2**17
    (tmp_path / "t.csv").write_text(f"{names},y\n{'1,' * count}0\n{'2,' * count}1\n")
    found = open_dataset(tmp_path / "t.csv", [TensorSpec("x", np.dtype(np.float32), ("N", count))], target="y")
    (batch,) = found.batches(2)
    assert batch.inputs["x"].shape == (2, count)
    np.testing.assert_array_equal(batch.targets, [0, 1])


@pytest.mark.parametrize("path", ["a\0b.csv", "a\0b.npz", "a\0b.tar", CsvFile("a\0b.csv"), TarFile("a\0b.tar")])
def test_a_path_that_no_system_has(path):
    with raises_sentence("path_with_nul", what=getattr(path, "path", path)):
        open_dataset(path, [SPEC])


def test_truth_values_as_a_shape(tmp_path):
    (tmp_path / "t.npy").write_bytes(header("(True, 2)") + bytes(8))
    (batch,) = open_dataset(tmp_path / "t.npy", [SPEC], need_target=False).batches(1)
    assert batch.inputs["x"].shape == (1, 2)


GOOD = npy(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"0.npy": GOOD, "0.json": b"[" * 100_000},
            r"'0\.json' in '.*t\.tar' cannot be read: it has more than 64 levels",
        ),
        ({"0.npy": GOOD, "0.cls": b"9" * 5000}, r"'0\.cls' in '.*t\.tar' cannot be read: Exceeds the limit"),
        ({"0.npy": GOOD, "0.cls": b"9" * 30}, r"'0\.cls' in '.*t\.tar' is too large for int64"),
        ({"0.npy": GOOD, "0.json": b"-9" + b"0" * 30}, r"'0\.json' in '.*t\.tar' is too large for int64"),
        ({"0.npy": GOOD, "0.cls": b" \n"}, r"'0\.cls' in '.*t\.tar' is not a number, a string"),
        ({"0.npy": header("(999999999999,)"), "0.cls": b"0"}, r"'0\.npy' in '.*t\.tar' is truncated: .* 0 are there"),
        ({"0.npy": b"junk", "0.cls": b"0"}, r"'0\.npy' in '.*t\.tar' is truncated or not in \.npy format"),
        ({"0.npy": npy(np.array([None])), "0.cls": b"0"}, r"'0\.npy' in '.*t\.tar' holds Python objects"),
    ],
)
def test_examples_in_a_tar_file(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        open_dataset(tar(tmp_path / "t.tar", files), [SPEC])


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t.tar")
    with pytest.raises(DataError, match=r"t\.tar' is a pipe, a device or a folder"):
        open_dataset(tmp_path / "t.tar", [SPEC])


def test_all_pictures_broken_although_such_are_left_out(tmp_path):
    pytest.importorskip("PIL")
    image = TensorSpec("x", np.dtype(np.float32), ("N", 1, 8, 8))
    path = tar(tmp_path / "t.tar", {"0.png": b"none", "0.cls": b"0", "1.png": b"", "1.cls": b"1"})
    with raises_sentence("no_image_can_be_read", what="'0.png', '1.png'", got=2):
        open_dataset(TarFile(path, skip_broken=True), [image])


def test_labels_that_are_not_integers(tmp_path):
    """They are not cast to whatever a processor makes of them."""
    import onnxtrain

    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((2, 3)), loss="softmax_cross_entropy")
    (tmp_path / "t.csv").write_text(f"a,b,y\n1,2,{10**30}\n3,4,1\n")
    with raises_sentence("array_type", what="the target array", got="float64", wanted="int64"):
        trainer.fit(tmp_path / "t.csv", target="y", progress=False)
