"""Write files so that a reader, or a crash, never sees half of one. All outputs are written through here."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO, NamedTuple

from onnxtrain.errors import ModelError
from onnxtrain.model_file.crash_recovery import Marker, clear_leftovers, new_token, temporary
from onnxtrain.model_file.locks import folder_lock
from onnxtrain.model_file.output_path import explained, open_node, place_of

__all__ = ["AtomicFiles", "check_writable", "folder_lock"]


class _Pending(NamedTuple):
    """A complete file that has not taken its place: its name until then, the file, the output as it was given."""

    temporary: Path
    file: Path
    target: Path
    is_data: bool


class AtomicFiles:
    """Several files that take their places together, when all are complete.

    Each is written under a temporary name in its own folder and flushed to the disk. On leaving the context
    they replace what was there, in the order of their creation; after an error they are removed and nothing
    has changed. A process that has the old file open or mapped keeps the old content. A link stays, and the file that
    it leads to is replaced. A device or a pipe is written into at once.

    What a killed process leaves is removed by the next one that writes to the same folder (see ``leftovers``).

    Args:
        model: A model among the files, created last, whose data files are among them, too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with AtomicFiles() as files, files.create(Path(folder) / "a") as file:
        ...         _ = file.write(b"all of it")
        ...     (Path(folder) / "a").read_bytes()
        b'all of it'
    """

    def __init__(self, model: Path | None = None) -> None:
        self._model = model
        self._outdated: list[Path] = []
        self._pending: list[_Pending] = []
        self._markers: dict[Path, Marker] = {}

    def outdate(self, data: Path) -> None:
        """Remove an old data file at the end, unless a model still names it then."""
        self._outdated.append(data)

    @contextlib.contextmanager
    def create(
        self, target: Path, *, is_data: bool = False, settle: Callable[[BinaryIO], Path | None] | None = None
    ) -> Iterator[BinaryIO]:
        """Open the file that becomes ``target``; missing folders are made.

        Args:
            target: The output.
            is_data: Whether it is a data file of the model, of no use without it.
            settle: Looks at the complete file and gives it another name in the same folder, which nothing has; ``None``
                where it is not wanted after all.

        Raises:
            ModelError: It cannot be written.
        """
        place = place_of(target)
        if place.is_node:
            with explained(target, others_pass=True), open_node(place) as stream:
                yield stream
            note_written(target)
            return
        with explained(target):
            place.file.parent.mkdir(parents=True, exist_ok=True)
            with uninterrupted():
                unfinished = temporary(place.file, self._marker(place.file.parent, place.file.name).token)
                # Not tempfile: its files are private to the user, these get the ordinary permissions.
                descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
                self._pending.append(_Pending(unfinished, place.file, target, is_data))
        with explained(target, others_pass=True), open(descriptor, "r+b") as file:
            if place.exists:
                with contextlib.suppress(OSError):
                    os.chmod(unfinished, stat.S_IMODE(place.file.stat().st_mode))
            yield file
            file.flush()
            if settle is not None and not self._settle(settle(file)):
                return
            os.fsync(file.fileno())

    def _settle(self, name: Path | None) -> bool:
        """Give the file that was written last its name; whether it is wanted."""
        pending = self._pending.pop()
        if name is None:
            pending.temporary.unlink(missing_ok=True)
            return False
        self._pending.append(pending._replace(file=name, target=name))
        return True

    def _marker(self, folder: Path, name: str) -> Marker:
        """Says in a folder that this run writes there; the first time, what others have left there goes."""
        if folder not in self._markers:
            self._markers[folder] = Marker(folder)
            clear_leftovers(folder, [name])
        return self._markers[folder]

    def __enter__(self) -> AtomicFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self._leave(complete=kind is None)

    def _leave(self, *, complete: bool) -> None:
        try:
            if complete:
                self._take_places()
        finally:
            for pending in self._pending:
                with contextlib.suppress(OSError):
                    pending.temporary.unlink(missing_ok=True)
            self._pending.clear()
            for marker in self._markers.values():
                marker.remove()
            self._markers.clear()

    def _take_places(self) -> None:
        self._note()
        changed: set[Path] = set()
        while self._pending:
            pending = self._pending[0]
            if len(self._pending) == 1:
                _flush_folders(changed)  # what the last file names is on the disk before that file is
            with explained(pending.target):
                os.replace(pending.temporary, pending.file)
            self._pending.pop(0)
            if not pending.is_data:
                note_written(pending.target)
            changed.add(pending.file.parent)
        _flush_folders(changed)

    def _note(self) -> None:
        """Write down what is of no use unless the model names it: at the end it goes, here or in a later run."""
        files = [(pending.file, pending.temporary) for pending in self._pending if pending.is_data]
        files += [(path, path) for path in self._outdated]
        if self._model is not None and files:
            with explained(self._model):
                self._marker(self._model.parent, self._model.name).note(self._model, files)
            _flush_folders([self._model.parent])


_written: dict[Path, None] = {}


def note_written(path: Path) -> None:
    """Note a file that took its place, for what is said after Ctrl-C."""
    if len(_written) < _MOST_NOTED:
        _written[path] = None


def written() -> list[Path]:
    """The first files that took their places since :func:`forget_written`."""
    return [*_written]


def forget_written() -> None:
    """Begin anew: a command starts."""
    _written.clear()


_MOST_NOTED = 100


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until a few file operations are done, which belong together."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def _flush_folders(folders: Iterable[Path]) -> None:
    """Make renames survive a power failure, where folders can be flushed."""
    for folder in folders:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


_PERMITTED = "give a name in a folder that you may write to"


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out before the work whether a file can be written after it.

    Raises:
        ModelError: The folder does not exist or does not take files, or the path is a folder.
    """
    place = place_of(path, _PERMITTED)
    label = repr(str(place.path))
    if place.is_node:
        if not os.access(place.file, os.W_OK):
            raise ModelError(f"{label} cannot be written: Permission denied; {_PERMITTED}.")
        return
    folder = place.file.parent
    if not folder.is_dir():
        raise ModelError(f"{label} cannot be written: there is no folder {str(folder)!r}; make it first.")
    clear_leftovers(folder, [place.file.name])
    probe = temporary(place.file, new_token())
    with explained(place.path, _PERMITTED), uninterrupted():
        # Only trying tells: permissions, read-only disks, names that are too long.
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        probe.unlink(missing_ok=True)
