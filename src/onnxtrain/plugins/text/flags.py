"""Flags of texts: how chats are read, and samples of what a language model answers."""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onnxtrain.cli.flags import READING, RESULTS, TRAINING, flag, grouped
from onnxtrain.cli.reader_flags import DataFlags, FitFlags
from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from onnxtrain.training.callbacks import Callback
    from onnxtrain.training.callbacks.progress import Progress


@grouped(READING)
@dataclass(frozen=True)
class TextFlags(DataFlags):
    """Settings of chats and of texts to compare."""

    train_on: Literal["answers", "all"] = flag("answers", "Chats, with next_token: learn the answers, or all tokens.")
    max_length: int | None = flag(
        None, "Chats: cut rows at this length.  [default: the model's, or 1024]", metavar="TOKENS"
    )
    pack: int | None = flag(None, "Chats: put rows into one of this length, kept apart.", metavar="TOKENS")
    chat_template: Path | None = flag(None, "Chats: a Jinja template.  [default: the tokenizer's]", metavar="FILE")

    def read(self, path: str, loss: str | None) -> Any:
        """Return chats, texts for ``next_token``, or texts to compare; ``None`` for other data."""
        from onnxtrain.data import CsvFile
        from onnxtrain.data.csv_file import CSV_SUFFIXES
        from onnxtrain.plugins.text import ChatData, ComparisonData
        from onnxtrain.plugins.text.rows import holds_texts, is_json_lines

        source = _files_of(path)
        compared = _compares_rows(loss) and holds_texts(source)
        rows = holds_texts(source) and (loss or "").partition("(")[0] == "next_token"
        if rows or compared or is_json_lines(source):
            is_table = isinstance(source, str) and Path(source).suffix.lower() in CSV_SUFFIXES
            reading = ("delimiter", "encoding", "decimal") if is_table else ()
            own = (
                "tokenizer",
                "max_length",
                "chat_template",
                "skip_broken",
                *(() if compared else ("train_on", "pack")),
            )
            self.only(*own, *reading, kind="texts to compare" if compared else "chats or texts", path=path)
            opened = CsvFile(path, self.delimiter, self.encoding, self.decimal) if reading else source
            return (ComparisonData if compared else ChatData)(opened, **{name: getattr(self, name) for name in own})
        return None


def _files_of(path: str) -> str | dict[str, float]:
    """Return a path, or several with their weights: 'a.jsonl,b.jsonl=0.5', or a pattern such as 'chats/*.jsonl'."""
    from onnxtrain.plugins.text.rows import is_text_file

    if Path(path).exists():
        return path
    found: dict[str, float] = {}
    repeated: list[str] = []
    for part in path.split(","):
        name, mark, given = part.rpartition("=")
        try:
            name, weight = (name, float(given)) if mark else (part, 1.0)
        except ValueError:
            name, weight = part, 1.0
        names = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        repeated.extend(each for each in names if each in found)
        found.update(dict.fromkeys(names, weight))
    if not (found and all(map(is_text_file, found))) or [*found] == [path]:
        return path
    if repeated:
        raise OptionError(f"{repeated[0]!r} is named twice; name it once, with a weight: {repeated[0]}=2.")
    for name, weight in found.items():
        if not 0 < weight < math.inf:
            raise OptionError(f"the weight of {name!r} is {weight:g}; it needs a finite number above 0.")
    return found


def _compares_rows(loss: str | None) -> bool:
    """Return whether a loss, as given, compares rows of texts."""
    from onnxtrain.errors.spelling import ALIASES
    from onnxtrain.losses import LOSSES
    from onnxtrain.losses.groups import GroupLoss
    from onnxtrain.operators.call_text import name_of

    found = LOSSES.get(ALIASES.get(name_of(loss), name_of(loss)))
    return found is not None and issubclass(found, GroupLoss)


@grouped(TRAINING)
@dataclass(frozen=True)
class NoiseFlags(FitFlags):
    """Noise on embeddings."""

    neftune: float | None = flag(
        None, "Language models: add noise of this size, such as 5, to embeddings of tokens.", metavar="ALPHA"
    )

    def callbacks(self, reading: DataFlags, shown: Progress) -> list[Callback]:
        """Return the callback that adds the noise, if there is any."""
        from onnxtrain.plugins.text.noisy_embeddings import NEFTune

        return [] if self.neftune is None else [NEFTune(self.neftune)]


@grouped(RESULTS)
@dataclass(frozen=True)
class SampleFlags(FitFlags):
    """Samples of what a language model answers while it is trained."""

    sample: list[str] | None = flag(
        None, "Show what a language model answers to this. May be repeated.", metavar="PROMPT"
    )
    sample_every: int | None = flag(None, "Steps between these samples.  [default: an epoch]", metavar="STEPS")
    sample_tokens: int | None = flag(None, "Maximum tokens of a sample.  [default: 64]")

    def callbacks(self, reading: DataFlags, shown: Progress) -> list[Callback]:
        """Return the callback that shows the samples, if there are prompts."""
        if not self.sample:
            for flag, value in (("--sample-every", self.sample_every), ("--sample-tokens", self.sample_tokens)):
                if value is not None:
                    raise OptionError(f"{flag} is for samples of text; give a prompt: --sample 'Who are you?'.")
            return []
        from onnxtrain.plugins.text.samples import Samples

        template = reading.chat_template if isinstance(reading, TextFlags) else None
        return [
            Samples(
                self.sample,
                every=self.sample_every,
                tokens=64 if self.sample_tokens is None else self.sample_tokens,
                tokenizer=reading.tokenizer,
                chat_template=template,
                show=shown.note,
            )
        ]
