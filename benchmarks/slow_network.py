"""Simulated machines with a slow network: one network namespace each, as root, on Linux.

    with SlowNetwork(4, delay=0.002, rate=25e6) as network:
        network.mpiexec([sys.executable, "script.py"])

Each machine is a network namespace with one device, rate-limited by `tc` (token bucket: `tbf`). All packets pass
through a switch, a separate process that delays each one, so kernels without `netem` work too. MPI sees different hosts
and uses TCP.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

PACKET = 4500
"""Bytes of the largest packet."""

LATE = 1e-3
"""Timer delay in seconds, on a busy machine, that does not reduce the rate of a link."""

_SUBNET = (10, 77, 0)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUN_DEVICE, _SET_DEVICE = 0x0001 | 0x1000, 0x400454CA  # IFF_TUN | IFF_NO_PI, TUNSETIFF


class SlowNetwork:
    """Machines on one switch, within a ``with`` block.

    Args:
        machines: Number of machines.
        delay: One-way delay of a packet in seconds, beside the switch's own latency.
        rate: Bytes per second that each machine can send; ``None`` for no limit.

    Raises:
        SystemExit: No permission for namespaces and devices, or a program is missing.
    """

    def __init__(self, machines: int, delay: float = 0.0, rate: float | None = None) -> None:
        self.machines, self.delay, self.rate = machines, delay, rate
        self._names = [f"onnxtrain{os.getpid()}-{index}" for index in range(machines)]

    def __enter__(self) -> Self:
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise SystemExit(f"{program} is not installed: apt-get install iproute2")
        if os.geteuid() or not os.path.exists("/dev/net/tun"):
            raise SystemExit("Network namespaces and /dev/net/tun are for root on Linux; run this there.")
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name in self._names:
                _command("ip", "netns", "add", name)
                stack.callback(_command, "ip", "netns", "delete", name)
            command = [sys.executable, str(Path(__file__).resolve()), repr(self.delay), *self._names]
            switch = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(switch.kill)
            assert switch.stdout is not None
            if switch.stdout.readline().strip() != "ready":
                raise SystemExit("The switch did not start.")
            for index in range(self.machines):
                self._configure(index)
            self._launcher = self._folder / "launcher"
            self._launcher.write_text(_LAUNCHER.format(names=" ".join(self._names)))
            self._launcher.chmod(0o755)
            self._stack = stack.pop_all()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # remove leftover namespaces
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def mpiexec(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on every machine, one MPI rank each."""
        place = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        mpiexec = shutil.which("mpiexec", path=place)
        if mpiexec is None:
            raise SystemExit("mpiexec is not installed: pip install mpi4py mpich")
        hosts = ",".join(_address(index) for index in range(self.machines))
        launch = ["-launcher", "ssh", "-launcher-exec", str(self._launcher), "-hosts", hosts, "-ppn", "1"]
        over_tcp = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "net0", "MPICH_CH4_NETMOD": "ofi"}
        return subprocess.run(
            ["ip", "netns", "exec", self._names[0], mpiexec, *launch, "-n", str(self.machines), *command],
            env={**os.environ, **over_tcp, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def _configure(self, index: int) -> None:
        inside = ("ip", "netns", "exec", self._names[index])
        _command(*inside, "ip", "link", "set", "lo", "up")
        _command(*inside, "ip", "address", "add", f"{_address(index)}/24", "dev", "net0")
        _command(*inside, "ip", "link", "set", "net0", "mtu", str(PACKET), "txqueuelen", "10000", "up")
        # Between steps a connection is idle; TCP would restart its congestion window.
        _command(*inside, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
        if self.rate is not None:
            burst = max(PACKET + 100, int(LATE * self.rate))
            bucket = ("rate", f"{8 * self.rate:.0f}bit", "burst", str(burst), "limit", str(32 << 20))
            _command(*inside, "tc", "qdisc", "add", "dev", "net0", "root", "tbf", *bucket)


_LAUNCHER = """#!/bin/bash
# Replaces ssh for mpiexec: options, an address, a command.
while [[ $1 == -* ]]; do shift; done
names=({names})
name=${{names[${{1##*.}} - 1]}}
shift
exec ip netns exec "$name" bash -c "$*"
"""


def _address(index: int) -> str:
    return ".".join(map(str, (*_SUBNET, index + 1)))


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr.strip() or done.stdout.strip()}")


def switch(delay: float, names: Sequence[str]) -> None:
    """Forward packets between devices, each after the delay, until this process or its parent ends."""
    devices = [_device(name) for name in names]
    by_address = {bytes((*_SUBNET, index + 1)): device for index, device in enumerate(devices)}
    with contextlib.suppress(OSError):  # a real switch has its own CPU
        os.nice(-10)
    print("ready", flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):
                os.write(device, packet)
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *devices], (), (), pause)
        if sys.stdin in ready:
            return
        for packet in (packet for device in ready for packet in _arrived(device)):
            target = by_address.get(packet[16:20])
            if target is not None:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay, count, target, packet))


def _arrived(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(32):
            yield os.read(device, PACKET + 100)


def _device(name: str) -> int:
    """Open a device `net0` in a namespace, whose packets this process reads and writes."""
    system = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if system.setns(there, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22s", b"net0", _TUN_DEVICE, b""))
        system.setns(here, _NEW_NETWORK)
        return device
    finally:
        os.close(here)
        os.close(there)


if __name__ == "__main__":
    switch(float(sys.argv[1]), sys.argv[2:])
