"""Whether two versions of onnxtrain train the benchmark models to the same bits.

    python tools/compare_bits.py EARLIER_PYTHON [--steps 100] [--models mlp,lenet5]

EARLIER_PYTHON is that of an environment with the other version; this one is what runs the script. Each version trains
each model from the same file on the same batches, with native kernels and on standard operators alone, and the
parameters after the last step are compared. The exit status is 1 where one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))


def trained(model: str, steps: int, folder: str, *, kernels: bool) -> str:
    """The hash of all parameters of a model after some steps."""
    from peers import Task, batches, onnxtrain_trainer

    task = Task("onnxtrain", model, 8, 1, folder)
    trainer, batch = onnxtrain_trainer(task, kernels=None if kernels else False), batches(task)
    for step in range(steps):
        trainer.train_step(*batch(step))
    digest = hashlib.sha256()
    for name in sorted(trainer.parameters):
        digest.update(name.encode())
        digest.update(trainer.parameters[name].tobytes())
    return digest.hexdigest()


def main() -> int:
    """Compare, and print a line a model; 1 where bits differ."""
    from models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", help="the Python of the other version, or - to train one model here")
    parser.add_argument("--steps", type=int, default=100, help="steps (100)")
    parser.add_argument("--models", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument("--folder", default="build/benchmarks/models", help="where exported models are kept")
    parser.add_argument("--portable", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.earlier == "-":
        print(trained(options.models, options.steps, options.folder, kernels=not options.portable))
        return 0
    differ = 0
    for model in options.models.split(","):
        MODELS[model].onnx(options.folder)
        for flags in ([], ["--portable"]):
            hashes = [
                _run(sys.executable, model, flags, options),
                _run(options.earlier, model, flags, options, own=False),
            ]
            same = hashes[0] == hashes[1]
            differ += not same
            print(json.dumps({"model": model, "kernels": not flags, "same": same}), flush=True)
    return 1 if differ else 0


def _run(python: str, model: str, flags: list[str], options: argparse.Namespace, *, own: bool = True) -> str:
    """A version in a process of its own; the other one is what its environment has, not what PYTHONPATH names."""
    command = [python, __file__, "-", "--models", model, "--steps", str(options.steps), "--folder", options.folder]
    variables = {name: value for name, value in os.environ.items() if own or name != "PYTHONPATH"}
    result = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, env=variables)
    if result.returncode:
        raise SystemExit(f"{python} failed on {model}:\n{result.stderr}")
    return result.stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
