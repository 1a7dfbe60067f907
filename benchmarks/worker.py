"""The process of one peer: build a task, then wait for commands on standard input, one JSON object per line.

    {"steps": 20}   run 20 steps: answers {"seconds": [...], "processor": [...], "losses": [...]}
    {"memory": 1}   answers {"peak": bytes, "resident": bytes}

``python worker.py prepare TASK`` writes the peer's files and exits. Started by ``harness.py``, not by hand.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import sys
import time
from pathlib import Path


def memory() -> dict[str, int]:
    """Peak and current resident memory of this process in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # outside Linux: the peak only
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak": peak, "resident": peak}
    sizes = {key: 1024 * int(kib) for key, kib in re.findall(r"(VmHWM|VmRSS):\s*(\d+) kB", status)}
    return {"peak": sizes["VmHWM"], "resident": sizes["VmRSS"]}


def main() -> None:
    # Keep the output of libraries out of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter()
    import peers

    task = peers.Task(**json.loads(sys.argv[2]))
    peer_class = peers.PEERS[task.peer]
    if sys.argv[1] == "prepare":
        peer_class.prepare(task)
        return
    batch = peers.batches(task)
    peer = peer_class(task)
    print(json.dumps({"build": time.perf_counter() - start}), file=answers)
    done = 0
    for line in sys.stdin:
        command = json.loads(line)
        if "memory" in command:
            print(json.dumps(memory()), file=answers)
            continue
        seconds, processor, losses = [], [], []
        gc.collect()
        gc.disable()  # no garbage collection within a measured step
        for step in range(done, done + command["steps"]):
            inputs, target = batch(step)
            begin, used = time.perf_counter(), time.process_time()
            losses.append(peer.step(inputs, target))
            seconds.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
        gc.enable()
        done += command["steps"]
        print(json.dumps({"seconds": seconds, "processor": processor, "losses": losses}), file=answers)


if __name__ == "__main__":
    main()
