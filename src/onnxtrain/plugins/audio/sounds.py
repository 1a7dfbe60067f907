"""Folders of sounds by class: read by soundfile, mixed to one channel, resampled, cut or padded."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.data.array_dataset import ArrayDataset
from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.conversion import Array, TensorSpec, kind_of
from onnxtrain.data.files import GrowingArray, check_regular
from onnxtrain.data.naming import Wanted
from onnxtrain.errors import DataError
from onnxtrain.errors.spelling import checks_arguments

SUFFIXES: Final = (".wav", ".flac", ".ogg", ".mp3", ".aiff", ".aif")
"""Endings of sounds."""

_LOOKED_AT: Final = 1000
"""Files of a folder that are looked at to tell whether it holds sounds."""

MOST_SAMPLES: Final = 2**28
"""Longer sounds are refused, since each is read into memory: 93 minutes at 48 kHz."""


@checks_arguments
@dataclass(frozen=True)
class SoundFolder(DataSource):
    """Sounds (WAV, FLAC, OGG, MP3) in one folder per class; the folder's name is the label.

    The channels of a sound are averaged, and it is resampled to ``rate`` by ``scipy.signal.resample_poly``. Then it is
    cut at the end, or padded with zeros, to the number of samples of the model's input, [N, samples] or
    [N, 1, samples]; where the model leaves it open, to the longest sound. Samples are in [-1, 1]. Without ``rate`` it
    is that of the model's training, else ``sampling_rate`` of ``preprocessor_config.json`` beside the model, else the
    rate that all files have. ``tuned.labels.json`` beside a saved model records it.

    All sounds are read once and kept: in memory, or from 64 MiB on in a temporary file. Examples are sorted by path.
    For prediction, sounds may lie in the folder itself. Needs ``pip install 'onnxtrain[audio]'``.

    Args:
        path: The folder.
        rate: Samples per second that the model takes.

    Raises:
        DataError: A sound cannot be read, the files have several rates and ``rate`` is not known, or the input of the
            model is not for sounds.
    """

    path: str | os.PathLike[str]
    rate: int | None = None
    examples_read: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The files of the last reading, in its order."""

    def __post_init__(self) -> None:
        if self.rate is not None and (not isinstance(self.rate, int) or isinstance(self.rate, bool) or self.rate < 1):
            raise DataError(f"rate is {self.rate!r}; it needs samples per second, such as 16000.").about(
                "rate", got=self.rate, wanted=1
            )

    @property
    def name(self) -> str:
        """Name of the folder in messages."""
        return f"the folder '{Path(self.path)}'"

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the sounds and their labels; see `DataSource.dataset`."""
        return self.opened(wanted, None)

    def opened(self, wanted: Wanted, known: int | None) -> Dataset:
        """Return the sounds and their labels; ``known`` is the rate that the model has where none is given."""
        if wanted.target is not None:
            raise DataError(
                f"{self.name} holds sounds, whose targets are the names of their folders; leave out target=."
            )
        if len(wanted.specs) != 1:
            raise DataError(f"{self.name} holds sounds, but the model has {len(wanted.specs)} inputs; it needs one.")
        (spec,) = wanted.specs
        length = _length(spec, self.name)
        files = self._files(labeled=wanted.need_target)
        rate = self.rate or known or self._common_rate(files)
        if length is None:
            sounds = [_read(file, rate) for file in files]
            length = max(map(len, sounds))
            found = GrowingArray.of(np.stack([_fitted(sound, length) for sound in sounds]), np.dtype(np.float32))
        else:
            found = GrowingArray((length,), np.dtype(np.float32))
            for file in files:
                found.append(_fitted(_read(file, rate, length), length)[None])
        array = found.finish()
        self.examples_read[:] = map(str, files)
        labels = np.array([file.relative_to(self.path).parts[0] for file in files]) if wanted.need_target else None
        shape = spec.shape or ()
        inputs = {spec.name: array[:, None] if len(shape) == 3 else array}
        dataset = ArrayDataset(inputs, labels, specs=wanted.specs, name=self.name)
        dataset.kept = {"sounds": {"rate": rate}}
        return dataset

    def _files(self, *, labeled: bool) -> list[Path]:
        folder = Path(self.path)
        found = sorted(filter(_is_sound, folder.rglob("*")))
        if not found:
            raise DataError(f"{self.name} holds no sounds ({', '.join(SUFFIXES)}); they lie in one folder per class.")
        loose = [file for file in found if file.parent == folder]
        if labeled and loose:
            raise DataError(
                f"{self.name} holds sounds itself, such as '{loose[0].name}'; for training they must lie in one folder "
                "per class."
            )
        return found

    def _common_rate(self, files: list[Path]) -> int:
        """Return the rate that all files have."""
        first, *_ = rates = [_info(file).samplerate for file in files]
        other = next((index for index, rate in enumerate(rates) if rate != first), None)
        if other is not None:
            raise DataError(
                f"{self.name} holds sounds of several rates: '{files[0]}' has {first} samples per second, "
                f"'{files[other]}' has {rates[other]}; give the rate of the model: rate={first}."
            ).about("rate", got=rates[other], wanted=first)
        return int(first)


def holds_sounds(source: object) -> bool:
    """Return whether data are the path of a folder with sounds, in itself or its subfolders."""
    if not isinstance(source, str | os.PathLike):
        return False
    try:
        folder = Path(source)
        return folder.is_dir() and any(map(_is_sound, itertools.islice(folder.rglob("*"), _LOOKED_AT)))
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_sound(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and not file.name.startswith((".", "_")) and file.is_file()


def _length(spec: TensorSpec, name: str) -> int | None:
    """Return the number of samples that an input takes; None where it leaves it open."""
    shape = spec.shape
    fits = shape is not None and (len(shape) == 2 or (len(shape) == 3 and shape[1] in (1, None)))
    if shape is None or not fits or kind_of(spec.dtype) != "float":
        raise DataError(
            f"{name} holds sounds, but the input '{spec.name}' is {spec.dtype} {spec.describe_shape()}; it needs "
            "floats (batch, samples) or (batch, 1, samples): onnxtrain.prepend_mel puts a spectrogram in front of it."
        ).about(spec.name, got=shape)
    return shape[-1] if isinstance(shape[-1], int) else None


def _info(file: Path) -> Any:
    soundfile = _soundfile()
    try:
        check_regular(file)
        return soundfile.info(file)
    except (OSError, soundfile.SoundFileError) as error:
        raise _unreadable(file, error) from error


def _read(file: Path, rate: int, most: int | None = None) -> Array:
    """Read a sound as one channel of a rate, of at least ``most`` samples where it has so many."""
    soundfile, info = _soundfile(), _info(file)
    up, down = _ratio(rate, info.samplerate)
    # A few more samples than are kept, which the filter of the last ones reads.
    frames = -1 if most is None else (most + 1) * down // up + 1 + 20 * max(up, down) // up
    if min(info.frames, frames if frames > 0 else info.frames) > MOST_SAMPLES:
        raise DataError(
            f"'{file}' has {info.frames:,} samples; sounds are read up to {MOST_SAMPLES:,}: divide it."
        ).about(str(file), got=info.frames, wanted=MOST_SAMPLES)
    try:
        samples, _ = soundfile.read(file, frames, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise _unreadable(file, error) from error
    mono = samples.mean(axis=1, dtype=np.float32)
    if up == down or not len(mono):
        return np.asarray(mono)
    from scipy.signal import resample_poly

    return np.asarray(resample_poly(mono, up, down), np.float32)


def _ratio(rate: int, given: int) -> tuple[int, int]:
    common = int(np.gcd(rate, given))
    return rate // common, given // common


def _fitted(sound: Array, length: int) -> Array:
    """Return a sound of a length: cut at its end, or padded with zeros."""
    return np.pad(sound[:length], (0, max(0, length - len(sound))))


def _unreadable(file: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split()).rstrip(".")
    return DataError(f"'{file}' cannot be read as a sound: {reason}.").about(str(file), got=reason)


def _soundfile() -> Any:
    try:
        import scipy.signal  # noqa: F401 - resamples
        import soundfile
    except ImportError:
        raise DataError(
            "reading sounds needs soundfile and scipy; install them: pip install soundfile scipy."
        ) from None
    return soundfile
