"""Keep trained weights if they cannot be saved to the requested path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxtrain.errors import ModelError
from onnxtrain.model_file.writing import ELSEWHERE

_LONGEST = 200
"""Maximum bytes of a name, with room for a suffix."""


def writable_folder() -> Path | None:
    """Return the first writable folder of: current folder, home folder, folder for temporary files."""
    import tempfile  # a slow import that is needed after errors only

    finders: tuple[Callable[[], Path], ...] = (Path.cwd, Path.home, lambda: Path(tempfile.gettempdir()))
    for find in finders:
        try:
            folder = find()
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"0")
            return folder
        except (OSError, RuntimeError):
            continue
    return None


@contextmanager
def kept_in_memory(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add to the error of a failed save that the trainer keeps its weights, and a path that can be written."""
    try:
        yield
    except ModelError as error:
        sentence, folder = str(error), writable_folder()
        if "cannot be written" not in sentence or folder is None:
            raise
        raise ModelError(
            f"{_without_advice(sentence)}; the trainer keeps its weights: save them to another path, such as "
            f"{str(folder / _name(path))!r}."
        ) from error


def current_folder() -> Path:
    """Return the current folder, or the one for temporary files where it is gone."""
    try:
        return Path.cwd()
    except OSError:
        import tempfile

        return Path(tempfile.gettempdir())


def reached_from(start: Path, path: str | os.PathLike[str]) -> Path:
    """Return a path, or its place in the folder that was the current one, if that is gone."""
    try:
        os.getcwd()
    except OSError:
        return start / path
    return Path(path)


def save_or_rescue(save: Callable[[Path], None], path: str | os.PathLike[str], start: Path) -> None:
    """Save the result of a training, in a folder that was there; if it cannot be written, save it to another path."""
    path = reached_from(start, path)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save(path)
    except (ModelError, OSError) as error:
        import tempfile

        folders = dict.fromkeys([(start / path).parent, writable_folder(), Path(tempfile.gettempdir())])
        for folder in filter(None, folders):
            other = _free(folder, _name(path))
            try:
                save(other)
            except (ModelError, OSError):
                continue
            found = str(error) if isinstance(error, ModelError) else f"{os.fspath(path)!r}: {error.strerror or error}"
            raise ModelError(f"{_without_advice(found)}; the trained weights are in {str(other)!r}.") from error
        raise


def _name(path: str | os.PathLike[str]) -> str:
    name = Path(path).name or "model.onnx"
    while len(os.fsencode(name)) > _LONGEST:
        name = name[1:]
    return f"unsaved-{name}"


def _free(folder: Path, name: str) -> Path:
    """Return a path that does not exist."""
    number, found = 1, folder / name
    while os.path.lexists(found):
        number, found = number + 1, folder / f"{number}-{name}"
    return found


def _without_advice(sentence: str) -> str:
    return sentence.removesuffix(".").removesuffix(f"; {ELSEWHERE}").partition("; the trainer keeps its weights")[0]
