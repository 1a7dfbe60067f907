"""The process that is killed: it has imported onnxtrain, and forks a child for every command line.

Requests are lines of JSON on the standard input: the folder, the command line, environment variables, and the time in
seconds until the kill, or null. The answer is the wait status and the seconds it took. With the library of
``faults.cpp`` loaded, an environment variable chooses the child's last file operation.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

SECONDS = 150


def child(request: dict[str, Any]) -> int:
    """Run a command line, with its output in files beside the folder."""
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{request['folder']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    from onnxtrain.cli import main

    code = main(request["line"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait(pid: int, seconds: float) -> int:
    """Wait for a child, and kill it after some seconds; returns its status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    """Answer requests until there are no more."""
    import onnx_ir  # noqa: F401 - what a child would import is imported once
    import onnxruntime  # noqa: F401
    import safetensors.numpy  # noqa: F401

    import onnxtrain.cli.app
    import onnxtrain.plugins.pruning.prune
    import onnxtrain.training.checkpoints
    import onnxtrain.training.trainer

    onnxtrain.cli.app.build()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = child(request)
            finally:
                os._exit(code)
        status = wait(pid, SECONDS if request["kill after"] is None else request["kill after"])
        print(json.dumps({"status": status, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
