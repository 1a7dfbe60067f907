"""Compare two versions of onnxtrain bit for bit: gradients, training, predictions, resume, LoRA, int4, two ranks.

    python tools/compare_bits.py EARLIER_PYTHON [--steps 3] [--models mlp,lenet5] [--extras resume,lora]

EARLIER_PYTHON is the interpreter of an environment with the other version; the interpreter that runs the script has
this one. Each version runs ``compare_bits_driver.py`` in a separate process, on the same files and batches, with
native kernels and with standard operators alone. The last case resumes a checkpoint of the earlier version with this
one. The script prints a line for every case that differs, and a summary; it exits with 1 if a case differs or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DRIVER = ROOT / "tools" / "compare_bits_driver.py"
EXTRAS = ("resume", "optimizers", "lora", "int4", "ranks")
BATCHES, EXAMPLES = 4, 8


def main() -> int:
    """Compare, and return 1 where bits differ."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", help="the Python of the other version")
    parser.add_argument("--steps", type=int, default=100, help="steps of each training (100)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"models ({','.join(MODELS)})")
    parser.add_argument("--extras", default=",".join(EXTRAS), help=f"further trainings ({','.join(EXTRAS)})")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/models"), help="exported models")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for name in filter(None, options.models.split(",")):
            os.symlink(MODELS[name].onnx(options.folder).resolve(), folder / f"{name}.onnx")
            batches = [MODELS[name].batch(EXAMPLES, seed) for seed in range(BATCHES)]
            inputs = {f"input:{key}": np.stack([inputs[key] for inputs, _ in batches]) for key in MODELS[name].inputs}
            np.savez(folder / f"{name}.npz", target=np.stack([target for _, target in batches]), **inputs)
        common = [str(folder), "--models", options.models, "--steps", str(options.steps), "--extras", options.extras]
        kept = [folder / "this version", folder / "earlier version"]
        running = [
            start([sys.executable], [*common, "--work", str(kept[0])]),
            start([options.earlier], [*common, "--work", str(kept[1])], other=True),
        ]
        here, earlier = (read(process) for process in running)
        if "resume" in options.extras.split(","):
            continued = [str(folder), "--extras", "continue", "--work", str(kept[1])]
            here |= read(start([sys.executable], continued))
            earlier["continue: resumed"] = earlier.get("resume: resumed", "missing")
    found = differences(here, earlier)
    for line in found:
        print(line)
    print(f"{len(earlier | here)} results compared, {len(found)} differ.")
    return 1 if found else 0


def start(python: Sequence[str], arguments: Sequence[str], *, other: bool = False) -> subprocess.Popen[str]:
    """Start the driver; for the other version without PYTHONPATH, so that its environment's package runs."""
    variables = {name: value for name, value in os.environ.items() if not other or name != "PYTHONPATH"}
    return subprocess.Popen([*python, str(DRIVER), *arguments], stdout=subprocess.PIPE, text=True, env=variables)


def read(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the result of each case: a hash, or an error."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}.")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["case"]: line["hash"] if "hash" in line else f"error: {line['error']}" for line in lines}


def differences(here: dict[str, str], earlier: dict[str, str]) -> list[str]:
    """Return a line for each case that differs, that one version lacks, or that failed."""
    return [
        f"{case}: {here.get(case, 'missing')} here, {earlier.get(case, 'missing')} in the earlier version"
        for case in sorted(here.keys() | earlier.keys())
        if here.get(case) != earlier.get(case) or here[case].startswith("error")
    ]


if __name__ == "__main__":
    sys.exit(main())
