"""Adapters of a language model: time and peak memory of a step, and time to the first, against PEFT.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --environment peft=PATH_OF_A_PYTHON_WITH_PEFT
    python benchmarks/adapters.py --billion

A Llama of random weights is exported by PyTorch, and written by onnxruntime-genai's builder in 16 and 4 bits.
Each run is a fresh process, the frameworks take turns, and the figures are medians. All train the projections of
attention, rank 8, by AdamW, with the same data. Rows in bfloat16 need a CPU with AVX512-BF16.
With ``--billion`` an int4 model of 1.1 billion parameters takes ten steps. PEFT's environment needs PyTorch,
transformers, peft, onnxruntime-genai, tokenizers, safetensors.
"""

from __future__ import annotations

import argparse
import compileall
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_models import Models, Sizes
from harness import ForeignLoad, environment, last_line, load_line, machine_line, table, write_report

import onnxtrain

SIZES = {"quick": Sizes(2, 64, 160, 2, 2, 512), "full": Sizes(12, 768, 2048, 24, 24, 16000)}
BILLION = Sizes(16, 2048, 8192, 32, 8, 32000, "bfloat16")

# User code; each then prints the end of the first step, the duration of later ones, and the losses.
ONNXTRAIN = """
import json, sys, time
import numpy as np
import onnxtrain
folder, vocabulary, threads, steps, form, compute = sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:]
lora = onnxtrain.Lora(rank=8, alpha=16, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
trainer = onnxtrain.Trainer(folder + "/model.onnx", loss="softmax_cross_entropy", optimizer="adamw(lr=1e-3)",
    lora=lora, threads=threads, precision=compute)
drawn = np.random.default_rng(0).integers(0, vocabulary, (2, 65))
inputs = {"input_ids": drawn[:, :-1]} | ({} if form == "float32" else {"attention_mask": np.ones((2, 64), np.int64)})
def train_step():
    return trainer.train_step(inputs, drawn[:, 1:])
"""
PEFT = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
folder, vocabulary, threads, steps, dtype = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[6]
torch.set_num_threads(threads)
inner = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
model = get_peft_model(inner, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
drawn = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (2, 65)))
def train_step():
    optimizer.zero_grad()
    logits = model(input_ids=drawn[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocabulary), drawn[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    return loss.item()
"""
ENDING = """
losses = [train_step()]
first, times = (time.monotonic(), time.process_time()), []
for _ in range(steps):
    start = time.monotonic(), time.process_time()
    losses.append(train_step())
    times.append((time.monotonic() - start[0], time.process_time() - start[1]))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak, file = (int(status[name].split()[0]) for name in ("VmHWM", "RssFile"))
print(json.dumps({"first": first, "steps": times, "peak": peak / 1024, "file": file / 1024, "losses": losses}))
"""


@dataclass(frozen=True)
class Case:
    """A framework, a form of the model, and a compute type; PEFT uses one checkpoint for all types."""

    program: str
    form: str
    compute: str = "float32"

    def folder(self, models: Models) -> Path:
        """Folder of its model."""
        if self.program == ONNXTRAIN:
            return models.onnx(self.form)
        return models.dequantized if self.form == "int4" else models.checkpoint


CASES = {
    "PEFT": Case(PEFT, "float32"),
    "PEFT, bfloat16": Case(PEFT, "float32", "bfloat16"),
    "PEFT, weights of int4 in float32": Case(PEFT, "int4"),
    "onnxtrain": Case(ONNXTRAIN, "float32"),
    "onnxtrain, float16 file": Case(ONNXTRAIN, "float16"),
    "onnxtrain, bfloat16 file": Case(ONNXTRAIN, "bfloat16"),
    "onnxtrain, int4 file": Case(ONNXTRAIN, "int4"),
    "onnxtrain, compute in bfloat16": Case(ONNXTRAIN, "float32", "bfloat16"),
    "onnxtrain, bfloat16 file, compute in bfloat16": Case(ONNXTRAIN, "bfloat16", "bfloat16"),
    "onnxtrain, int4 file, compute in bfloat16": Case(ONNXTRAIN, "int4", "bfloat16"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one run each")
    parser.add_argument("--billion", action="store_true", help="a model of 1.1 billion parameters in 4 bits, by itself")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3, help="processes of each framework")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each process")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/models"), help="of the models")
    parser.add_argument("--environment", action="append", default=[], metavar="peft=PYTHON", help="where PEFT is")
    parser.add_argument("--output", help="write the report here")
    options = parser.parse_args(arguments)
    python = dict(item.split("=", 1) for item in options.environment).get("peft", sys.executable)
    runs, steps = (1, 2) if options.quick else (options.runs, options.steps)
    sizes, cases = SIZES["quick" if options.quick else "full"], CASES
    if options.billion:
        sizes, cases = BILLION, {"onnxtrain, int4 file": CASES["onnxtrain, int4 file"]}
        runs, steps = 1, 9
    name = "-".join(map(str, vars(sizes).values()))
    models = Models(options.folder / f"llama-{name}", sizes, python)
    compileall.compile_dir(Path(onnxtrain.__file__).parent, quiet=2)  # as pip does
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    folders = {name: case.folder(models) for name, case in cases.items()}
    with ForeignLoad() as foreign:
        for _ in range(runs):
            for name, case in cases.items():
                runner = sys.executable if case.program == ONNXTRAIN else python
                result = run(runner, case, folders[name], sizes.vocabulary, options.threads, steps)
                if result is not None:
                    found[name].append(result)
    title = f"{sizes}; batches of 2 x 64; threads: {options.threads}"
    lines = [title, "", report(found), "", machine_line(), load_line(foreign)]
    write_report("\n".join(lines), options.output)


def run(python: str, case: Case, folder: Path, vocabulary: int, threads: int, steps: int) -> dict[str, Any] | None:
    """Run one process: wall and CPU seconds to the end of the first step and of each step, MiB, losses."""
    start = time.monotonic()  # before Python starts; all processes share the clock
    numbers = map(str, (vocabulary, threads, steps))
    command = [python, "-c", case.program + ENDING, str(folder), *numbers, case.form, case.compute]
    result = subprocess.run(command, env=environment(threads), capture_output=True, text=True)
    if result.returncode:
        print(last_line(result.stderr), file=sys.stderr)
        return None
    found = json.loads(result.stdout.splitlines()[-1])
    clock, processor = found["first"]
    return found | {"first": (clock - start, processor)}


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """Format the table; figures in brackets are relative to PEFT in float32."""
    rows = []
    reference = figures(found["PEFT"]) if found.get("PEFT") else None
    for name, results in found.items():
        own = figures(results)
        digits = (0, 0, 1, 1, 0)
        cells = [f"{value:,.{places}f}" for value, places in zip(own, digits, strict=True)]
        if reference is not None and name != "PEFT":
            cells = [f"{cell} ({value / whole:.2f})" for cell, value, whole in zip(cells, own, reference, strict=True)]
        mapped = statistics.median(result["file"] for result in results)
        losses = " → ".join(f"{results[0]['losses'][place]:.4f}" for place in (0, -1))
        rows.append([name, *cells, f"{mapped:,.0f}", losses])
    head = ["framework", "step, ms", "CPU time, ms", "first step done after, s", "CPU time, s"]
    return table([*head, "peak, MiB", "of which files, MiB", "loss"], rows)


def figures(results: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Medians: wall and CPU milliseconds of a step, wall and CPU seconds to the end of the first, MiB."""
    steps = [[1000 * step[place] for result in results for step in result["steps"]] for place in (0, 1)]
    firsts = [[result["first"][place] for result in results] for place in (0, 1)]
    peaks = [result["peak"] for result in results]
    return tuple(statistics.median(values) for values in (*steps, *firsts, peaks))


if __name__ == "__main__":
    main()
