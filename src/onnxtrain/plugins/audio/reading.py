"""Folders of sounds, with the sample rate of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.data_names import read_settings
from onnxtrain.data.naming import Wanted

if TYPE_CHECKING:
    from onnxtrain.plugins.audio.sounds import SoundFolder
    from onnxtrain.training.data_adapter import Reading

KEPT: Final = "sounds"
"""Name of the settings beside a trained model."""


def read_sounds(source: Any, reading: Reading) -> Any:
    """Return folders of sounds at the rate that the model was trained on, or that a file beside it says."""
    from onnxtrain.plugins.audio.sounds import SoundFolder, holds_sounds

    if not isinstance(source, SoundFolder):
        if not holds_sounds(source):
            return source
        source = SoundFolder(source)
    kept = reading.kept.get(KEPT)
    known = kept if isinstance(kept, dict) else read_settings(reading.folder, "preprocessor_config.json")
    rate = known.get("rate", known.get("sampling_rate"))
    if source.rate is not None or not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
        return source
    return _Rated(source, rate)


@dataclass(frozen=True)
class _Rated(DataSource):
    """Sounds for a model of a known rate."""

    folder: SoundFolder
    rate: int

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the sounds and their labels; see `DataSource.dataset`."""
        return self.folder.opened(wanted, self.rate)
