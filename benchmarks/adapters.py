"""Adapters of a language model: time and peak memory of a step, and time to the first, against PEFT.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --environment peft=PATH_OF_A_PYTHON_WITH_PEFT

A Llama of random weights is exported once by PyTorch. Each run is a fresh process, the frameworks take turns, and the
figures are medians. Both train the projections of attention, rank 8, by AdamW, with the same data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ForeignLoad, environment, last_line, load_line, machine_line, table, write_report

SIZES = {"quick": (2, 64, 256), "full": (12, 768, 16000)}
"""Layers, width, vocabulary."""

EXPORT = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
layers, width, vocabulary = json.loads(sys.argv[2])
torch.manual_seed(0)
config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3 // 16 * 16,
    num_hidden_layers=layers, num_attention_heads=width // 32, num_key_value_heads=width // 32,
    max_position_embeddings=512, tie_word_embeddings=False, use_cache=False, attn_implementation="eager")
inner = LlamaForCausalLM(config).eval()
inner.save_pretrained(sys.argv[1])
class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = inner
    def forward(self, input_ids):
        return self.inner(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
torch.onnx.export(Logits(), (torch.ones(2, 64, dtype=torch.int64),), sys.argv[1] + "/model.onnx",
    input_names=["input_ids"], output_names=["logits"], dynamo=True, opset_version=18, external_data=True)
"""

# What a user would write. Each prints when the first step ended, the times of later steps, and the losses.
ONNXTRAIN = """
import json, sys, time
import numpy as np
import onnxtrain
folder, vocabulary, threads, steps, dtype = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
lora = onnxtrain.Lora(rank=8, alpha=16, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
trainer = onnxtrain.Trainer(folder + "/model.onnx", loss="softmax_cross_entropy", optimizer="adamw(lr=1e-3)",
    lora=lora, threads=threads)
drawn = np.random.default_rng(0).integers(0, vocabulary, (2, 65))
losses, times = [trainer.train_step(drawn[:, :-1], drawn[:, 1:])], []
first = time.monotonic()
for _ in range(steps):
    start = time.monotonic()
    losses.append(trainer.train_step(drawn[:, :-1], drawn[:, 1:]))
    times.append(time.monotonic() - start)
"""
PEFT = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
folder, vocabulary, threads, steps, dtype = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
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
losses, times = [train_step()], []
first = time.monotonic()
for _ in range(steps):
    start = time.monotonic()
    losses.append(train_step())
    times.append(time.monotonic() - start)
"""
ENDING = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak, file = (int(status[name].split()[0]) for name in ("VmHWM", "RssFile"))
print(json.dumps({"first": first, "steps": times, "peak": peak / 1024, "file": file / 1024, "losses": losses}))
"""
PROGRAMS = {
    "onnxtrain": (ONNXTRAIN, "float32"),
    "PEFT": (PEFT, "float32"),
    "PEFT, bfloat16": (PEFT, "bfloat16"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one run each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3, help="processes of each framework")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each process")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/models"), help="of the exported model")
    parser.add_argument("--environment", action="append", default=[], metavar="peft=PYTHON", help="where PEFT is")
    parser.add_argument("--output", help="write the report here")
    options = parser.parse_args(arguments)
    runs, steps = (1, 2) if options.quick else (options.runs, options.steps)
    python = dict(item.split("=", 1) for item in options.environment).get("peft", sys.executable)
    size = SIZES["quick" if options.quick else "full"]
    folder = export(options.folder / f"llama-{'-'.join(map(str, size))}", size, python)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with ForeignLoad() as foreign:
        for _ in range(runs):
            for name, (program, dtype) in PROGRAMS.items():
                runner = sys.executable if program == ONNXTRAIN else python
                result = run(runner, program, folder, size[2], options.threads, steps, dtype)
                if result is not None:
                    found[name].append(result)
    lines = [machine_line(), load_line(foreign), "", report(found, size, options.threads)]
    write_report("\n".join(lines), options.output)


def export(folder: Path, size: Sequence[int], python: str) -> Path:
    """The folder of the model; exported where it is not there yet."""
    if not (folder / "model.onnx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, "-c", EXPORT, str(folder), json.dumps(size)], check=True, capture_output=True)
    return folder


def run(
    python: str, program: str, folder: Path, vocabulary: int, threads: int, steps: int, dtype: str
) -> dict[str, Any] | None:
    """One process: seconds to the end of the first step, of each step, peak in MiB, losses."""
    start = time.monotonic()  # before Python starts; the clock is the same in all processes
    command = [python, "-c", program + ENDING, str(folder), str(vocabulary), str(threads), str(steps), dtype]
    result = subprocess.run(command, env=environment(threads), capture_output=True, text=True)
    if result.returncode:
        print(last_line(result.stderr), file=sys.stderr)
        return None
    found = json.loads(result.stdout.splitlines()[-1])
    return found | {"first": found["first"] - start}


def report(found: dict[str, list[dict[str, Any]]], size: Sequence[int], threads: int) -> str:
    """The tables."""
    rows = []
    for name, results in found.items():
        step = statistics.median(seconds for result in results for seconds in result["steps"])
        first = statistics.median(result["first"] for result in results)
        peak = statistics.median(result["peak"] for result in results)
        losses = " → ".join(f"{results[0]['losses'][place]:.3f}" for place in (0, -1))
        rows.append([name, f"{step * 1000:.0f}", f"{first:.1f}", f"{peak:.0f}", losses])
    head = ["framework", "step, ms", "start to the end of the first step, s", "peak, MiB", "loss"]
    layers, width, vocabulary = size
    title = f"Llama, {layers} layers of width {width}, {vocabulary} tokens; batches of 2 x 64; threads: {threads}"
    return "\n".join([title, "", table(head, rows)])


if __name__ == "__main__":
    main()
