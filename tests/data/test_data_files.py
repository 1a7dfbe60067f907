"""Data files: mapped if possible, the same values in every format, and errors for damaged files."""

import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from onnxtrain.data import TensorSpec, files, open_dataset, split_validation
from onnxtrain.data.conversion import is_mapped
from onnxtrain.data.files import read_arrays
from onnxtrain.errors import DataError
from sentences import raises_sentence

SPECS = [TensorSpec("image", np.dtype(np.float32), ("N", 3))]
IMAGE = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
LABEL = np.arange(20)


def write(folder, form):
    path = folder / "data"
    if form == "npz":
        path = folder / "data.npz"
        np.savez(path, image=IMAGE, label=LABEL)
    elif form == "compressed npz":
        path = folder / "data.npz"
        np.savez_compressed(path, image=IMAGE, label=LABEL)
    elif form == "folder":
        path.mkdir()
        np.save(path / "image.npy", IMAGE)
        np.save(path / "label.npy", LABEL)
    return path


@pytest.mark.parametrize("form", ["npz", "compressed npz", "folder"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_files_give_the_batches_of_the_arrays(tmp_path, form, shuffle):
    dataset = open_dataset(write(tmp_path, form), SPECS)
    expected = open_dataset({"image": IMAGE, "label": LABEL}, SPECS)
    pairs = list(
        zip(
            dataset.batches(6, shuffle=shuffle, seed=4),
            expected.batches(6, shuffle=shuffle, seed=4),
            strict=True,
        )
    )
    assert len(pairs) == 4
    for ours, theirs in pairs:
        assert ours.inputs["image"].tobytes() == theirs.inputs["image"].tobytes()
        assert ours.targets.tolist() == theirs.targets.tolist()
        assert ours.inputs["image"].flags.aligned
        assert type(ours.inputs["image"]) is np.ndarray


@pytest.mark.parametrize("form", ["npz", "folder"])
def test_uncompressed_arrays_are_mapped(tmp_path, form):
    arrays = read_arrays(write(tmp_path, form))
    assert {name: is_mapped(array) for name, array in arrays.items()} == {"image": True, "label": True}
    assert not any(array.flags.writeable for array in arrays.values())


def test_an_array_at_an_odd_offset_in_a_zip(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, image=IMAGE, label=LABEL)
    path.write_bytes(b"odd" + path.read_bytes())  # a zip may follow other bytes, as in a self-extracting one
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["image.npy", "label.npy"]
    with path.open("rb") as file:
        arrays = files._read_npz(file, "odd.npz")
    assert not arrays["image"].flags.aligned
    (batch,) = open_dataset(arrays, SPECS).batches(20)
    assert batch.inputs["image"].flags.aligned
    assert batch.inputs["image"].tolist() == IMAGE.tolist()


def test_validation_split_of_mapped_data(tmp_path):
    split = split_validation(open_dataset(write(tmp_path, "npz"), SPECS), 0.3)
    for part in split:
        for batch in part.batches(4, shuffle=True):
            assert batch.inputs["image"].tolist() == IMAGE[batch.targets].tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float32),
        np.float64(3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4, dtype=">i2"),
        np.array([True, False]),
        np.array(["a", "bc"]),
    ],
    ids=["empty", "scalar", "fortran", "big endian", "bool", "text"],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_any_array_is_read_as_numpy_reads_it(tmp_path, save, array):
    save(tmp_path / "data.npz", a=array)
    read = read_arrays(tmp_path / "data.npz")["a"]
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tolist() == array.tolist()


def test_names_with_slashes(tmp_path):
    np.savez(tmp_path / "data.npz", **{"encoder/ids.0": LABEL})
    assert list(read_arrays(tmp_path / "data.npz")) == ["encoder/ids.0"]
    (tmp_path / "folder" / "encoder").mkdir(parents=True)
    np.save(tmp_path / "folder" / "encoder" / "ids.0.npy", LABEL)
    assert list(read_arrays(tmp_path / "folder")) == ["encoder/ids.0"]


def test_the_content_decides_what_a_file_is(tmp_path):
    np.savez(tmp_path / "data.npz", image=IMAGE)
    (tmp_path / "data.npz").rename(tmp_path / "data.bin")
    assert list(read_arrays(str(tmp_path / "data.bin"))) == ["image"]


def test_a_single_npy_is_the_only_input(tmp_path):
    path = tmp_path / "anything.npy"
    np.save(path, IMAGE)
    (batch,) = open_dataset(path, SPECS, need_target=False).batches(20)
    assert batch.inputs["image"].tolist() == IMAGE.tolist()
    with raises_sentence("no_array_for_input", what=["image"], got=["anything"], wanted=["image"], inputs="input"):
        open_dataset(path, SPECS)


def test_large_compressed_arrays_go_to_a_temporary_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "_READ_WHOLE_BYTES", 200)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    path = write(tmp_path, "compressed npz")
    arrays = read_arrays(path)
    assert is_mapped(arrays["image"])
    assert arrays["image"].tolist() == IMAGE.tolist()
    assert arrays["label"].tolist() == LABEL.tolist()
    assert "array 'image' in" in caplog.text
    assert "numpy.savez does not compress" in caplog.text
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux' own figure of peak memory")
def test_data_is_read_batch_by_batch(tmp_path):
    np.savez(tmp_path / "data.npz", image=np.ones((40_000, 1000), np.float32), label=np.zeros(40_000, np.int64))
    script = """
import resource, sys, numpy as np
from onnxtrain.data import TensorSpec, open_dataset
def anonymous():  # megabytes, without the pages of mapped files: those the system can drop
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024
data = open_dataset(sys.argv[1], [TensorSpec("image", np.dtype(np.float32), ("N", 1000))])
before, peak = anonymous(), 0
for shuffle in (False, True):
    for batch in data.batches(100, shuffle=shuffle):
        assert batch.inputs["image"].all()
        peak = max(peak, anonymous() - before)
print(peak)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "data.npz")], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 40  # megabytes; the array has 160


# --- bad files


def pickled(path):
    np.savez(path, image=np.array([None, {}]), label=LABEL)


def save_npy(path, array):
    with path.open("wb") as file:
        np.save(file, array)


def pickled_npy(path):
    save_npy(path, np.array([None, {}]))


def structured(path):
    np.savez(path, image=np.zeros(3, [("a", "f4"), ("b", "i4")]))


def truncated_npz(path):
    np.savez(path, image=IMAGE, label=LABEL)
    os.truncate(path, 300)


def truncated_npy(path):
    save_npy(path, IMAGE)
    os.truncate(path, 200)


def truncated_header(path):
    save_npy(path, IMAGE)
    os.truncate(path, 20)


def damaged_compressed(path):
    np.savez_compressed(path, image=IMAGE, label=LABEL)
    content = bytearray(path.read_bytes())
    content[150:200] = b"x" * 50
    path.write_bytes(content)


def no_arrays(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")


def lying_shape(path):
    with zipfile.ZipFile(path, "w") as archive, archive.open("image.npy", "w") as member:
        header = {"descr": "<f4", "fortran_order": False, "shape": (2**40, 2**40)}
        np.lib.format.write_array_header_1_0(member, header)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"data\.npz' does not exist; give a \.npz, \.npy or \.csv file, or a folder"),
        (
            lambda path: path.write_bytes(b""),
            r"data\.npz' is empty, so it is neither a \.npz nor a \.npy file",
        ),
        (lambda path: path.write_text("a,b\n1,2"), r"data\.npz' starts with b'a,b.*', so it is neither"),
        (
            lambda path: path.mkdir(),
            r"the folder '.*data\.npz' holds no \.npy file; it needs one file per array",
        ),
        (pickled, r"array 'image' in '.*data\.npz' holds Python objects, which only pickle can read"),
        (pickled_npy, r"data\.npz' holds Python objects"),
        (
            structured,
            r"array 'image' in '.*' is a structured array with fields \('a', 'b'\); save each field",
        ),
        (truncated_npz, r"data\.npz' is truncated, damaged or not a \.npz file \(.+\); write it again"),
        (
            truncated_npy,
            r"is truncated: shape \(20, 3\) of float32 needs 240 bytes, 72 are there; write it again",
        ),
        (truncated_header, r"data\.npz' is truncated or not in \.npy format \(.+\); write it again"),
        (damaged_compressed, r"is truncated, damaged or not"),
        (no_arrays, r"data\.npz' holds no arrays; write them with numpy\.savez"),
        (
            lying_shape,
            r"array 'image' in '.*' is truncated: shape .* needs 4835703278458516698824704 bytes, 0 are",
        ),
    ],
)
def test_bad_files(tmp_path, make, message):
    path = tmp_path / "data.npz"
    make(path)
    with pytest.raises(DataError, match=message):
        open_dataset(path, SPECS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = write(tmp_path, "npz")
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        open_dataset(path, SPECS)


def test_a_read_error_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, "npz")

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "_map_npy", fail)
    with raises_sentence("array_file_cannot_be_read", path="data.npz", reason="Input/output error"):
        read_arrays(path)


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_ends_in_a_data_error_or_in_arrays(tmp_path, seed):
    random = np.random.default_rng(seed)
    path = write(tmp_path, ["npz", "compressed npz"][seed % 2])
    content = bytearray(path.read_bytes())
    for position in random.integers(0, len(content), 8):
        content[position] = random.integers(0, 256)
    path.write_bytes(content)
    try:
        arrays = read_arrays(path)
    except DataError:
        return
    for array in arrays.values():
        array.sum() if array.dtype.kind in "iuf" else array.tobytes()  # no access beyond the mapping


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipe_is_refused_before_it_is_opened(tmp_path, inside):
    """Opening a pipe waits for a writer, who may never come."""
    folder = tmp_path / "data"
    folder.mkdir()
    os.mkfifo(folder / "x.npy")
    with raises_sentence("not_a_regular_file", what=tmp_path / "data/x.npy"):
        read_arrays(folder if inside else folder / "x.npy")
