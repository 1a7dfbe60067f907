"""Put a mel spectrogram in front of a model, which then takes audio."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.editing.working import Model, Working
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.operands import Value
from onnxtrain.graph.value import Dimension, dimensions, is_float
from onnxtrain.model_file.validity import refuses_invalid

Scale = Literal["htk", "slaney"]
Compression = Literal["log", "db", "pcen", "none"]


@checks_arguments
@refuses_invalid()
def prepend_mel(
    model: Model,
    sample_rate: int = 16000,
    *,
    window: int = 400,
    hop: int = 160,
    fft: int = 512,
    mels: int | None = None,
    low: float = 0.0,
    high: float | None = None,
    scale: Scale = "htk",
    area_norm: bool = False,
    power: int = 2,
    compression: Compression = "log",
    floor: float = 1e-10,
    center: bool = False,
    mel_axis: int | None = None,
    input: str | None = None,
    name: str = "audio",
) -> onnx.ModelProto:
    """Return a model that takes audio [N, samples]: nodes in front of it compute its mel spectrogram.

    A frame of ``fft`` samples begins every ``hop`` samples. It is multiplied by a periodic Hann window of ``window``
    samples in its middle, transformed (as one Conv with the matrix of the DFT), and its power is summed by triangular
    filters between ``low`` and ``high`` Hz, evenly spaced on a mel scale. The values are those of
    ``librosa.feature.melspectrogram``, with ``compression`` those of its logarithm, of ``librosa.power_to_db`` (with
    ``top_db=None``) or of ``librosa.pcen``.

    The audio is float32, whatever the type of the spectrogram. The matrices are Constant nodes whose names say what
    they are, so that no training changes them. The value with the name of the former input is the spectrogram.

    Args:
        model: A path or a loaded model with an input [N, 1, mels, frames], [N, mels, frames], or with the last two axes
            swapped; it is not changed.
        sample_rate: Samples per second.
        window: Length of the window in samples, at most ``fft``.
        hop: Samples from one frame to the next.
        fft: Length of the transformed frames in samples.
        mels: The number of filters; by default the size of the input's mel axis.
        low: Lowest frequency of the filters in Hz.
        high: Highest frequency in Hz, by default half the sample rate.
        scale: The mel scale: ``"htk"``, 2595 log10(1 + f / 700), or ``"slaney"``, linear below 1000 Hz.
        area_norm: Divide each filter by half its width in Hz (librosa's ``norm="slaney"``).
        power: 2 for the power of each frequency, 1 for its magnitude.
        compression: ``"log"``, the natural logarithm; ``"db"``, 10 log10; ``"pcen"``, per-channel energy normalization,
            whose settings are librosa's; or ``"none"``.
        floor: Smallest value before a logarithm.
        center: Pad the audio with ``fft // 2`` zeros at both ends, so that frame t is centered at sample t hop.
        mel_axis: -2 or -1; by default the axis of size ``mels``, or if both or none are, -2 for inputs of rank 4, and
            -1 for rank 3.
        input: The input to replace, by default the first floating one.
        name: Name of the new input.

    Returns:
        The model, which holds all its data. Where the number of frames is fixed, so is the number of samples.

    Raises:
        ModelError: The model cannot be read.
        OptionError: A number is outside its range, or the input is no spectrogram.

    Example:
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 1, 40, 98] mel) => (float[n, 1, 1, 1] y) { y = GlobalAveragePool(mel) }''')
        >>> audio = prepend_mel(model, 16000, window=400, hop=160, fft=400).graph.input[0]
        >>> audio.name, [d.dim_value or d.dim_param for d in audio.type.tensor_type.shape.dim]
        ('audio', ['n', 15920])
    """
    _check(sample_rate, window, hop, fft, low, high, scale, power, compression, floor)
    if not name:
        raise OptionError("name is empty; the new input needs a name.")
    working = Working(model)
    if working.opset < _OPSET:
        raise OptionError(f"prepend_mel needs opset {_OPSET}, the model has {working.opset}; upgrade it.")
    spectrogram = _input(working, input)
    batch, frames, size, last = _layout(spectrogram, mels, mel_axis)
    high = sample_rate / 2 if high is None else high
    filters = mel_filters(sample_rate, fft, size, low, high, scale, area_norm=area_norm)
    used = filters.any(axis=0)  # bins outside all filters are not computed
    samples: Dimension = "samples"
    if isinstance(frames, int):
        samples = (frames - 1) * hop + (0 if center else fft)
    dtype, given = spectrogram.dtype, str(spectrogram.name)
    assert dtype is not None
    kind = ir.TensorType(ir.DataType.FLOAT)  # ONNX Runtime has no Conv of doubles
    audio = ir.Value(name=working.free_name(name), type=kind, shape=ir.Shape((batch, samples)))

    op = Builder(working.graph, working.opset, before=working.graph[0])
    op.scope = working.free_name("mel_spectrogram")
    made = _Nodes(op)
    signal = made.unsqueeze(op.wrap(audio))
    pads = [fft // 2, fft // 2] if center else [0, 0]
    # For a second of audio at 16 kHz, frames of 512 samples and one thread (AVX-512) the operator STFT took 2.9 ms for
    # the whole spectrogram, this Conv 1.4 ms.
    kernel = made.matrix("dft", _dft(fft, window)[:, used].reshape(-1, 1, fft))
    parts = op.Conv(signal, kernel, strides=[hop], pads=pads, kernel_shape=[fft])  # real, imaginary
    squares = op.Mul(parts, parts)
    weights = filters[:, used]
    if power == 2:
        found = op.MatMul(made.matrix("mel_filters", np.concatenate([weights, weights], axis=1)), squares)
    else:
        pairs = np.concatenate([np.eye(int(used.sum()))] * 2, axis=1)
        energies = op.Add(op.MatMul(made.matrix("dft_pairs", pairs), squares), made.constant(np.float64(_TINY)))
        found = op.MatMul(made.matrix("mel_filters", weights), op.Sqrt(energies))  # [N, mels, frames]
    found = made.compressed(found, compression, floor, sample_rate / hop)
    if last:
        found = op.Transpose(found, perm=[0, 2, 1])
    if spectrogram.shape is not None and len(spectrogram.shape) == 4:
        found = made.unsqueeze(found)
    found = op.cast(found, dtype)
    inputs = working.graph.inputs
    inputs[list(inputs).index(spectrogram)] = audio
    ir.convenience.replace_all_uses_with(spectrogram, found.ir)
    spectrogram.name = None
    found.ir.name = given
    found.ir.type, found.ir.shape = ir.TensorType(dtype), spectrogram.shape
    return working.finish()


_OPSET = 11
"""The first opset with Range and with Conv and Slice as they are used here."""

_TINY = 1e-20
"""Added to energies before their square root, whose slope at 0 is infinite."""


class _Nodes:
    """Emit nodes of any opset in float32, with constants as Constant nodes."""

    def __init__(self, op: Builder) -> None:
        self._op = op

    def constant(self, array: npt.NDArray[Any] | np.generic, dtype: ir.DataType = ir.DataType.FLOAT) -> Value:
        """Emit a constant."""
        made = np.asarray(array).astype(dtype.numpy())
        return self._op.several("Constant", outputs=1, value=ir.tensor(made))[0]

    def matrix(self, name: str, array: npt.NDArray[np.float64]) -> Value:
        """Emit a matrix whose name says that it is not trained (``weights/names.py``)."""
        made = self.constant(array)
        made.ir.name = f"{self._op.scope}/{name}"
        return made

    def unsqueeze(self, value: Value) -> Value:
        """Emit a new axis 1."""
        if self._op.opset < 13:
            return self._op.Unsqueeze(value, axes=[1])
        return self._op.Unsqueeze(value, self.constant(np.array([1]), ir.DataType.INT64))

    def compressed(self, energy: Value, compression: str, floor: float, rate: float) -> Value:
        """Emit the compression of energies [N, mels, frames]; ``rate`` is the number of frames per second."""
        op = self._op
        if compression == "none":
            return energy
        if compression == "pcen":
            return self._pcen(energy, rate)
        logarithm = op.Log(op.Max(energy, self.constant(np.float64(floor))))
        return logarithm if compression == "log" else op.Mul(logarithm, self.constant(np.float64(10 / np.log(10))))

    def _pcen(self, energy: Value, rate: float) -> Value:
        """(E / (e + M)^g + d)^r - d^r, where M_t = (1 - b) M_t-1 + b E_t, beginning at 1, is a matmul with powers."""
        op, gain, offset, exponent, epsilon, seconds = self._op, 0.98, 2.0, 0.5, 1e-6, 0.4
        length = seconds * rate
        smoothing = (np.sqrt(1 + 4 * length**2) - 1) / (2 * length**2)
        whole = ir.DataType.INT64
        count = op.Squeeze(op.Slice(op.Shape(energy), *(self.constant(np.array([at]), whole) for at in (2, 3))))
        zero, one = (self.constant(np.int64(number), whole) for number in (0, 1))
        steps = op.Cast(op.Range(zero, count, one), to=int(ir.DataType.FLOAT))
        column = op.Reshape(steps, self.constant(np.array([-1, 1]), whole))
        row = op.Reshape(steps, self.constant(np.array([1, -1]), whole))
        decay = self.constant(np.float64(np.log(1 - smoothing)))
        ago = op.Sub(row, column)  # [s, t]: steps from s to t
        past = op.Cast(op.Not(op.Less(ago, self.constant(np.float64(0)))), to=int(ir.DataType.FLOAT))
        weights = op.Mul(op.Mul(op.Exp(op.Mul(op.Mul(ago, past), decay)), past), self.constant(np.float64(smoothing)))
        first = op.Exp(op.Mul(op.Add(row, self.constant(np.float64(1))), decay))
        smooth = op.Add(op.MatMul(energy, weights), first)
        power = op.Pow(op.Add(smooth, self.constant(np.float64(epsilon))), self.constant(np.float64(-gain)))
        root = op.Sqrt(op.Add(op.Mul(energy, power), self.constant(np.float64(offset))))
        return op.Sub(root, self.constant(np.float64(offset**exponent)))


def _dft(fft: int, window: int) -> npt.NDArray[np.float64]:
    """Return the windowed DFT [2, bins, fft]: cosines, then sines."""
    hann = np.zeros(fft)
    start = (fft - window) // 2
    hann[start : start + window] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    turns = np.outer(np.arange(fft // 2 + 1), np.arange(fft)) % fft  # exact before the cosine
    angle = 2 * np.pi * turns / fft
    return np.stack([np.cos(angle), -np.sin(angle)]) * hann


def mel_filters(
    sample_rate: int, fft: int, mels: int, low: float, high: float, scale: str, *, area_norm: bool
) -> npt.NDArray[np.float64]:
    """Return triangular filters [mels, bins] between frequencies in Hz, evenly spaced on a mel scale."""
    to_mel, to_hertz = (_htk, _from_htk) if scale == "htk" else (_slaney, _from_slaney)
    points = to_hertz(np.linspace(to_mel(np.array(low)), to_mel(np.array(high)), mels + 2))
    bins = np.arange(fft // 2 + 1) * sample_rate / fft
    widths = np.diff(points)[:, None]
    rising = (bins - points[:-2, None]) / widths[:-1]
    falling = (points[2:, None] - bins) / widths[1:]
    filters: npt.NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
    empty = np.flatnonzero(~filters.any(axis=1))
    if empty.size:
        at = int(empty[0])
        raise OptionError(
            f"mels is {mels}, but filter {at} from {points[at]:.0f} to {points[at + 2]:.0f} Hz contains no frequency "
            f"of the transform, which are {sample_rate / fft:g} Hz apart; give a larger fft or fewer mels."
        )
    if area_norm:
        filters *= 2 / (points[2:] - points[:-2])[:, None]
    return filters


def _htk(hertz: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return 2595 * np.log10(1 + hertz / 700)


def _from_htk(mel: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return 700 * (10 ** (mel / 2595) - 1)


_BREAK, _PER_MEL, _STEP = 1000.0, 200 / 3, np.log(6.4) / 27
"""Slaney's scale: the frequency where it turns logarithmic, Hz per mel below it, the logarithm of a mel above it."""


def _slaney(hertz: npt.NDArray[Any]) -> npt.NDArray[Any]:
    above = _BREAK / _PER_MEL + np.log(np.maximum(hertz, _BREAK) / _BREAK) / _STEP
    return np.where(hertz < _BREAK, hertz / _PER_MEL, above)


def _from_slaney(mel: npt.NDArray[Any]) -> npt.NDArray[Any]:
    linear = _BREAK / _PER_MEL
    return np.where(mel < linear, mel * _PER_MEL, _BREAK * np.exp(_STEP * (np.maximum(mel, linear) - linear)))


def _check(
    sample_rate: int, window: int, hop: int, fft: int, low: float, high: float | None, scale: str, power: int,
    compression: str, floor: float,
) -> None:  # fmt: skip
    """Refuse invalid settings."""
    counts = {"sample_rate": sample_rate, "window": window, "hop": hop, "fft": fft}
    for argument, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise OptionError(f"{argument} is {value!r}; it must be an integer of at least 1.")
    if window > fft:
        raise OptionError(f"window is {window} samples, longer than the frames of fft={fft}.")
    if not 0 <= low < (sample_rate / 2 if high is None else high) <= sample_rate / 2:
        raise OptionError(
            f"low is {low!r} and high {high!r}; they must be frequencies in rising order from 0 to half the sample "
            f"rate, {sample_rate / 2:g} Hz."
        )
    for argument, chosen, known in (("scale", scale, Scale), ("compression", compression, Compression)):
        if chosen not in get_args(known):
            raise OptionError(f"{argument} is {chosen!r}; it is one of {', '.join(get_args(known))}.")
    if power not in (1, 2):
        raise OptionError(f"power is {power!r}; it is 1 for magnitudes or 2 for power.")
    if not (np.isfinite(floor) and floor > 0):
        raise OptionError(f"floor is {floor!r}; it must be a finite number above 0.")


def _input(working: Working, name: str | None) -> ir.Value:
    """Return the input to replace."""
    inputs = [value for value in working.graph.inputs if value.name not in working.graph.initializers]
    found = next((value for value in inputs if (is_float(value) if name is None else value.name == name)), None)
    if found is None or not is_float(found):
        names = ", ".join(repr(value.name) for value in inputs)
        asked = "no floating input" if name is None else f"no floating input {name!r}"
        raise OptionError(f"The model has {asked} that could be a spectrogram; its inputs are {names}.")
    return found


def _layout(spectrogram: ir.Value, mels: int | None, axis: int | None) -> tuple[Dimension, Dimension, int, bool]:
    """Return the batch size, the number of frames and of filters, and whether the filters are the last axis."""
    if axis not in (None, -1, -2):
        raise OptionError(f"mel_axis is {axis!r}; the filters are on axis -2 or -1.")
    if mels is not None and (isinstance(mels, bool) or not isinstance(mels, int | np.integer) or mels < 1):
        raise OptionError(f"mels is {mels!r}; it must be an integer of at least 1.")
    shape = dimensions(spectrogram)
    if shape is None or len(shape) not in (3, 4) or (len(shape) == 4 and shape[1] not in (1, None)):
        raise OptionError(
            f"The input {spectrogram.name!r} has shape {shape}; a spectrogram is [N, 1, mels, frames], "
            "[N, mels, frames], [N, 1, frames, mels] or [N, frames, mels]."
        )
    if axis is None:
        fitting = [at for at in (-2, -1) if mels is not None and shape[at] == mels]
        axis = fitting[0] if len(fitting) == 1 else -2 if len(shape) == 4 else -1
    size = shape[axis]
    if isinstance(size, int) and mels is not None and size != mels:
        raise OptionError(
            f"mels is {mels}, but the input {spectrogram.name!r} of shape {shape} has {size} on its mel axis ({axis}); "
            "give mel_axis= if it is the other one."
        )
    if not isinstance(size, int):
        if mels is None:
            raise OptionError(
                f"The mel axis ({axis}) of the input {spectrogram.name!r} of shape {shape} has no fixed size; give "
                "mels= or the other mel_axis=."
            )
        size = int(mels)
    return shape[0], shape[-3 - axis], size, axis == -1
