"""Peak memory of a process, for programs of tests."""

PEAK = r"""
def peak():
    "Bytes. The figure of getrusage begins with what the process had that started this one."
    import re
    from pathlib import Path
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""
"""Defines ``peak()``; Linux."""
