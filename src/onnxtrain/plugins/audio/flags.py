"""Flag of folders of sounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxtrain.cli.flags import READING, flag, grouped
from onnxtrain.cli.reader_flags import DataFlags


@grouped(READING)
@dataclass(frozen=True)
class SoundFlags(DataFlags):
    """Settings of sounds."""

    rate: int | None = flag(None, "Sounds: samples per second.  [default: the model's]", metavar="HZ")

    def read(self, path: str, loss: str | None) -> Any:
        """Return a folder of sounds; ``None`` for other data."""
        from onnxtrain.plugins.audio.sounds import SoundFolder, holds_sounds

        if not holds_sounds(path):
            return None
        self.only("rate", kind="sounds", path=path)
        return SoundFolder(path, self.rate)
