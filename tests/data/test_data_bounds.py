"""Reading takes time linear in the data, and small files cannot use much memory."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
import types
import zipfile

import numpy as np
import pytest

from onnxtrain.data import ImageFolder, TensorSpec, files, open_dataset, tar_file
from onnxtrain.data import images as pictures
from onnxtrain.errors import DataError
from sentences import raises_sentence

WIDE = 20_000


def spec(width):
    return TensorSpec("x", np.dtype(np.float32), ("N", width))


def write_csv(path, width):
    names = [f"column {index}" for index in range(width)]
    path.write_text("\n".join([",".join([*names, "y"]), *(",".join(["0.5"] * width + ["1"]) for _ in range(3))]))


def write_parquet(path, width):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    columns = {f"column {index}": np.zeros(3, np.float32) for index in range(width)}
    pyarrow.parquet.write_table(arrow.table({**columns, "y": np.arange(3)}), path)


@pytest.mark.thorough
@pytest.mark.parametrize(("suffix", "write"), [("csv", write_csv), ("parquet", write_parquet)])
def test_twenty_thousand_columns_take_linear_time(suffix, write, tmp_path):
    """Eight times the columns would take 64 times as long if each were looked for among all."""

    def seconds(width):
        write(tmp_path / f"d.{suffix}", width)
        taken = []
        for _ in range(2):
            began = time.process_time()
            data = open_dataset(tmp_path / f"d.{suffix}", [spec(width)], target="y")
            taken.append(time.process_time() - began)
            assert next(data.batches(3)).inputs["x"].shape == (3, width)
        return min(taken)

    assert seconds(WIDE) < 24 * max(seconds(WIDE // 8), 0.01)


def image(size, **settings):
    found = io.BytesIO()
    pytest.importorskip("PIL.Image").new("L", size).save(found, "png", **settings)
    return found.getvalue()


IMAGE = TensorSpec("x", np.dtype(np.float32), ("N", 3, 8, 8))


def test_pictures_have_a_bound_of_pixels(tmp_path):
    """Pillow would read it and take 1.9 GB."""
    for name, size in (("a", (12_000, 12_000)), ("b", (20, 20))):
        (tmp_path / "p" / name).mkdir(parents=True)
        (tmp_path / "p" / name / "1.png").write_bytes(image(size))
    message = r"1\.png' has 12000 x 12000 pixels; images are read up to 67 million pixels: make it smaller"
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "p", [IMAGE])
    assert open_dataset(ImageFolder(tmp_path / "p", skip_broken=True), [IMAGE], need_target=False).size == 1
    with tarfile.open(tmp_path / "d.tar", "w") as archive:
        archive.add(tmp_path / "p" / "a" / "1.png", "1.png")
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "d.tar", [IMAGE], need_target=False)


def test_pictures_at_the_bound_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_PIXELS", 400)
    monkeypatch.setattr(pictures, "_LARGE_PIXELS", 100)
    (tmp_path / "1.png").write_bytes(image((20, 20)))
    assert open_dataset(tmp_path, [IMAGE], need_target=False).size == 1
    (tmp_path / "2.png").write_bytes(image((20, 21)))
    with pytest.raises(DataError, match=r"2\.png' has 20 x 21 pixels"):
        open_dataset(tmp_path, [IMAGE], need_target=False)


def test_pictures_of_a_dataset_have_the_bound(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(pictures, "MOST_PIXELS", 400)
    made = [pytest.importorskip("PIL.Image").new("L", (20, 21))]
    data = datasets.Dataset.from_dict({"x": made}, datasets.Features({"x": datasets.Image()}))
    with raises_sentence("image_pixels", subject="an image of the dataset", width=20, height=21):
        next(open_dataset(data, [IMAGE], need_target=False).batches(1))


def test_files_in_a_tar_file_have_a_bound(tmp_path):
    """A megabyte that becomes a gigabyte."""
    entry = tarfile.TarInfo("1.npy")
    entry.size = tar_file.MOST_MEMBER_BYTES + 1
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.addfile(entry, _Zeros(entry.size))
    with raises_sentence("tar_member_size", what="1.npy", got=268435457, wanted=268435456, limit=256):
        open_dataset(tmp_path / "d.tar.gz", [spec(4)], need_target=False)


class _Zeros(io.RawIOBase):
    """A file of so many zeros."""

    def __init__(self, size):
        self._left = size

    def read(self, size=-1):
        size = min(size, self._left)
        self._left -= size
        return bytes(size)


def write_zeros(path, arrays):
    """A compressed .npz file of zeros, by name their type and shape."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (dtype, shape) in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                left = int(np.prod(shape)) * np.dtype(dtype).itemsize
                for start in range(0, left, 2**20):
                    file.write(bytes(min(2**20, left - start)))


def read_within(mebibytes, path, *, target=None):
    """Read a file in a process limited to this much more memory; return its output."""
    script = """
import re, resource, sys
from pathlib import Path
import numpy as np
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.data import csv_file
from onnxtrain.data import files
from onnxtrain.data import images
from onnxtrain.data import parquet_file
from onnxtrain.data import tar_file
path, more, target = sys.argv[1], int(sys.argv[2]) * 2**20, sys.argv[3] or None
if path.endswith(".parquet"):
    parquet_file._pyarrow()
has = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (has + more, has + more))
spec = TensorSpec("x", np.dtype(np.float32), ("N", 4))
print(open_dataset(path, [spec], target=target, need_target=target is not None).size)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(mebibytes), target or ""], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets Linux' own limit of memory")


@linux
def test_compressed_zeros_take_no_memory(tmp_path):
    """400 million of them in 0.4 MB: extracted to a file, with a sentence, where the model takes them."""
    shapes = {"x": (np.uint8, (20_000_000, 4)), "y": (np.uint8, (8,)), "z": (np.uint8, (320_000_000,))}
    write_zeros(tmp_path / "d.npz", shapes)
    said = read_within(200, tmp_path / "d.npz")
    assert said.startswith("20000000")
    assert "array 'x' in" in said
    assert "0.1 GB are extracted to a temporary file" in said
    assert "array 'z'" not in said  # nothing requested the value


def test_compressed_arrays_that_do_not_fit_are_not_extracted(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_READ_WHOLE_BYTES", 1000)
    monkeypatch.setattr(files, "_extract", lambda *_: pytest.fail("extracted"))
    write_zeros(tmp_path / "d.npz", {"x": (np.uint8, (2000,)), "y": (np.uint8, (5,))})
    with pytest.raises(DataError, match="input 'x' has rank 1"):
        open_dataset(tmp_path / "d.npz", [spec(4)])


def test_a_full_temporary_disk_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_READ_WHOLE_BYTES", 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: types.SimpleNamespace(free=500))
    write_zeros(tmp_path / "d.npz", {"x": (np.uint8, (1000, 4)), "y": (np.uint8, (1000,))})
    with raises_sentence(
        "no_space_to_decompress", what=f"array 'x' in '{tmp_path}/d.npz'", got=500, size="0.0", free="0.0"
    ):
        open_dataset(tmp_path / "d.npz", [spec(4)])


def test_small_compressed_arrays_have_one_bound_together(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_READ_WHOLE_BYTES", 2000)
    extracted = []
    extract = files._extract
    monkeypatch.setattr(files, "_extract", lambda *given: extracted.append(given[2]) or extract(*given))
    write_zeros(tmp_path / "d.npz", dict.fromkeys("abcd", (np.uint8, (100, 8))))
    arrays = files.read_arrays(tmp_path / "d.npz")
    assert [array.shape for array in arrays.values()] == [(100, 8)] * 4
    assert [what[:9] for what in extracted] == ["array 'c'", "array 'd'"]


@pytest.mark.thorough
@linux
def test_columns_of_compressed_zeros_take_no_memory(tmp_path):
    """A Parquet file of 20 million rows in some hundred kilobytes; its targets lie in a temporary file, too."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    block = arrow.table({**{name: np.zeros(10**6, np.float32) for name in "abcd"}, "y": np.zeros(10**6, np.int64)})
    with pyarrow.parquet.ParquetWriter(tmp_path / "d.parquet", block.schema) as writer:
        for _ in range(20):
            writer.write_table(block)
    assert (tmp_path / "d.parquet").stat().st_size < 2**20
    assert read_within(400, tmp_path / "d.parquet", target="y").startswith("20000000")
