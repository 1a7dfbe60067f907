"""The start of a process: ONNX Runtime must be installed, and Ctrl-C may come while modules are imported.

Before a command begins, Ctrl-C ends the process; later it waits for the import.
"""

# Built-in modules only: Ctrl-C is not caught yet while others run, such as the library's ``signal``.
import _signal as signal  # type: ignore[import-not-found]  # typeshed has none
import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_COMMANDS = ("onnxtrain", "onnxtrain.exe", "onnxtrain-script.py")


def end_early(number: int, frame: object) -> None:
    """End the process: nothing of the command has begun."""
    try:
        os.write(2, b"error: Interrupted; nothing was written.\n")
    finally:
        os._exit(130)


def interrupt(number: int, frame: "FrameType | None") -> None:
    """Raise KeyboardInterrupt once no import is in progress: C modules lose it or replace it by an ImportError."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _thread.start_new_thread(_interrupt_soon, ())
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupt_soon() -> None:
    time.sleep(0.02)
    _thread.interrupt_main()


def _is_command() -> bool:
    """Return whether the process was started as ``onnxtrain``."""
    arguments = getattr(sys, "argv", None) or [""]
    given = getattr(sys, "orig_argv", [])
    as_module = arguments[0] == "-m" and "-m" in given and given[given.index("-m") + 1 :][:1] == ["onnxtrain"]
    return as_module or os.path.basename(arguments[0]) in _COMMANDS


def check_onnxruntime() -> None:
    """Raise an ImportError of one sentence where no build of ONNX Runtime is installed: no dependency brings one."""
    from importlib.util import find_spec

    if find_spec("onnxruntime") is None:
        sentence = (
            "onnxtrain runs on ONNX Runtime, which is not installed: install one of its builds, such as "
            "'pip install onnxruntime' for CPUs, onnxruntime-gpu or onnxruntime-openvino."
        )
        raise SystemExit(f"error: {sentence}") if _is_command() else ImportError(sentence, name="onnxruntime")


def catch_early_interrupt() -> None:
    """Handle Ctrl-C until the command begins, in a process that was started as ``onnxtrain``; elsewhere do nothing."""
    if not _is_command():
        return
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, end_early)
    except ValueError:  # not in the main thread
        pass
