"""Start a federation on this machine: Flower's server and the clients' nodes, each in its own process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

APP = Path(__file__).resolve().parent
_PROGRAMS = Path(sys.executable).parent


class Processes:
    """Flower's processes, connected over the loopback interface.

    Args:
        folder: Where their files and logs go; FEDERATION for the apps.
        nodes: How many clients.
        settings: Further variables of their environment.
    """

    def __init__(self, folder: Path, nodes: int = 3, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "FEDERATION": str(folder),
            "FLWR_HOME": str(folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{_PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            **(settings or {}),
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._all: list[subprocess.Popen[bytes]] = []
        self._address = f"127.0.0.1:{_free_port()}"
        self._count = nodes

    def start(self) -> None:
        """Start the server and the clients' nodes."""
        home = self.folder / "flower"
        home.mkdir(exist_ok=True)
        connection = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{self._address}"\ninsecure = true\n'
        (home / "config.toml").write_text(connection)
        host, port = self._address.split(":")
        self._start(
            "server", "flower-superlink", "--insecure", "--disable-runtime-dependency-installation",
            "--host", host, "--port", port,
        )  # fmt: skip
        _wait_for(port)
        for part in range(self._count):
            own = str(_free_port())
            config = f"partition-id={part} num-partitions={self._count}"
            node = self._start(
                f"client{part}", "flower-supernode", "--insecure", "--superlink", self._address, "--port", own,
                "--node-config", config,
            )  # fmt: skip
            self.nodes.append(node)
        deadline = time.monotonic() + 120
        while self.log("server").count("Activated node_id") < self._count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"The nodes have not found the server:\n{self.log('server')}")
            time.sleep(0.2)

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(_PROGRAMS / program), *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group, to be ended together
            )
        self._all.append(process)
        return process

    def log(self, name: str) -> str:
        """Return the log of a process so far: "server", "client0" and so on, or "run"."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def run(self) -> subprocess.Popen[bytes]:
        """Start the training; the process ends with it, and its log is "run"."""
        return self._start("run", "flwr", "run", str(APP), "here", "--stream")

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and those that it has started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End everything."""
        for process in reversed(self._all):
            self.end(process)


@contextlib.contextmanager
def federation(folder: Path, nodes: int = 3, settings: Mapping[str, str] | None = None) -> Iterator[Processes]:
    """Run a server and clients while the context is open."""
    processes = Processes(folder, nodes, settings)
    try:
        processes.start()
        yield processes
    finally:
        processes.stop()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
