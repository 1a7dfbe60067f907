"""Adapters of a language model: time and peak memory of a step, against PEFT.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --tokens 512 --targets all-linear --checkpointing no --cases 'onnxtrain*'
    python benchmarks/adapters.py --environment peft=PATH_OF_A_PYTHON_WITH_PEFT
    python benchmarks/adapters.py --billion

A Llama of random weights is exported by PyTorch, and written by onnxruntime-genai's builder in 16 and 4 bits.
Each run is a fresh process, the frameworks take turns, and the figures are medians; ratios are medians over the turns.
A row is printed on standard error as soon as its runs are done. ``--cases`` selects rows by name; those that they are
compared with run, too. All train adapters of rank 8 by
AdamW with the same data: one sequence of 128, 512 or 2,048 tokens, adapters on the projections of attention or on all
seven, with and without checkpointing (``recompute="layers"``). Rows in bfloat16 need a CPU with AVX512-BF16.

"Limit" is the time of the frozen matrix multiplications, of their gradients of the input and of causal attention, at
the rate of one large multiplication on this machine; in brackets its share of the CPU time of a step. Checkpointing
adds a forward pass. With ``--billion`` an int4 model of 1.1 billion parameters takes ten steps. PEFT's environment
needs PyTorch, transformers, peft, onnxruntime-genai, tokenizers, safetensors.
"""

from __future__ import annotations

import compileall
import fnmatch
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_models import Models, Sizes
from harness import ForeignLoad, environment, last_line, load_line, machine_line, make_parser, table, write_report
from products import product, seconds

import onnxtrain
from onnxtrain.runtime import native

SIZES = {"quick": Sizes(2, 64, 160, 2, 2, 512), "full": Sizes(12, 768, 2048, 24, 24, 16000)}
BILLION = Sizes(16, 2048, 8192, 32, 8, 32000, "bfloat16")

# User code; each then prints the end of the first step, the duration of later ones, and the losses.
ONNXTRAIN = """
import json, sys, time
import numpy as np
import onnxtrain
folder, vocabulary, threads, steps, tokens, again, targets, form, compute = (
    sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7].split(","), *sys.argv[8:])
lora = onnxtrain.Lora(rank=8, alpha=16, targets=targets)
trainer = onnxtrain.Trainer(folder + "/model.onnx", loss="softmax_cross_entropy", optimizer="adamw(lr=1e-3)",
    lora=lora, threads=threads, precision=compute, recompute="layers" if again else ())
drawn = np.random.default_rng(0).integers(0, vocabulary, (1, tokens + 1))
inputs = {"input_ids": drawn[:, :-1]}
if form != "float32":
    inputs["attention_mask"] = np.ones((1, tokens), np.int64)
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
folder, vocabulary, threads, steps, tokens, again, targets, _, dtype = (
    sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7].split(","), *sys.argv[8:])
torch.set_num_threads(threads)
inner = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
model = get_peft_model(inner, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
model.train()
if again:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
drawn = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (1, tokens + 1)))
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
    """A framework, a form of the model, and a compute type; PEFT uses one checkpoint for all types.

    Attributes:
        program: The user code.
        form: Type of the weights.
        compute: Type in which matrices are multiplied.
    """

    program: str
    form: str
    compute: str = "float32"

    @property
    def reference(self) -> str:
        """The case that it is compared with."""
        return "PEFT" if self.compute == "float32" else "PEFT, bfloat16"

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
    "onnxtrain, int4 file": Case(ONNXTRAIN, "int4"),
    "onnxtrain, compute in bfloat16": Case(ONNXTRAIN, "float32", "bfloat16"),
    "onnxtrain, int4 file, compute in bfloat16": Case(ONNXTRAIN, "int4", "bfloat16"),
}
HALVES = {
    "onnxtrain, float16 file": Case(ONNXTRAIN, "float16"),
    "onnxtrain, bfloat16 file": Case(ONNXTRAIN, "bfloat16"),
    "onnxtrain, bfloat16 file, compute in bfloat16": Case(ONNXTRAIN, "bfloat16", "bfloat16"),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"attention": ATTENTION, "all-linear": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
TOKENS = (512, 2048, 128)


@dataclass(frozen=True)
class Setting:
    """Options of a measured step.

    Attributes:
        tokens: Length of the sequence.
        targets: Name of the layers with adapters.
        again: True if activations are recomputed.
    """

    tokens: int
    targets: str
    again: bool

    def operations(self, sizes: Sizes) -> float:
        """Count multiplications and additions: once or twice forward, once for the gradients of the inputs."""
        passes = 3 if self.again else 2
        frozen = sizes.parameters - sizes.vocabulary * sizes.width
        head = sizes.vocabulary * sizes.width
        products = 2.0 * self.tokens * (passes * (frozen - head) + 2 * head)
        return products + sizes.layers * sizes.width * self.tokens**2 * (2 * (passes - 1) + 5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, "a tiny model, one run each, one length and set of layers", threads=2)
    parser.add_argument("--billion", action="store_true", help="a model of 1.1 billion parameters in 4 bits, by itself")
    parser.add_argument("--halves", action="store_true", help="files of 16 bits, too")
    parser.add_argument("--tokens", type=lambda text: [int(number) for number in text.split(",")], default=list(TOKENS))
    parser.add_argument("--targets", type=lambda text: text.split(","), default=[*reversed(TARGETS)])
    parser.add_argument("--checkpointing", choices=("no", "yes"), help="only without, or only with it")
    parser.add_argument("--cases", default="*", help="patterns of the frameworks' names, separated by semicolons")
    parser.add_argument("--runs", type=int, default=3, help="processes of each framework")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each process")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/models"), help="of the models")
    parser.add_argument("--environment", action="append", default=[], metavar="peft=PYTHON", help="where PEFT is")
    options = parser.parse_args(arguments)
    python = dict(item.split("=", 1) for item in options.environment).get("peft", sys.executable)
    runs, steps = options.runs, options.steps
    sizes, cases = SIZES["full"], selected(CASES | (HALVES if options.halves else {}), options.cases.split(";"))
    again = {"no": [False], "yes": [True]}.get(options.checkpointing, [False, True])
    settings = [Setting(*row) for row in itertools.product(options.tokens, options.targets, again)]
    if options.quick:
        runs, steps, sizes = 1, 2, SIZES["quick"]
        settings = [Setting(64, "all-linear", again) for again in (False, True)]
    if options.billion:
        sizes, cases = BILLION, {"onnxtrain, int4 file": CASES["onnxtrain, int4 file"]}
        runs, steps, settings = 1, 9, [Setting(128, "attention", False)]
    name = "-".join(map(str, vars(sizes).values()))
    models = Models(options.folder / f"llama-{name}", sizes, python)
    compileall.compile_dir(Path(onnxtrain.__file__).parent, quiet=2)  # as pip does
    folders = {name: case.folder(models) for name, case in cases.items()}
    measured = []
    with ForeignLoad() as foreign:
        for setting in settings:
            found: dict[str, list[dict[str, Any] | None]] = defaultdict(list)
            for turn in range(runs):
                for name, case in cases.items():
                    if options.quick and setting.again and name not in ("PEFT", "onnxtrain"):
                        continue
                    runner = sys.executable if case.program == ONNXTRAIN else python
                    numbers = (sizes.vocabulary, options.threads, steps)
                    found[name].append(run(runner, case, folders[name], setting, numbers))
                    if any(found[name]) and turn + 1 == runs:
                        print(" | ".join(row_of(setting, name, found, sizes, cases, None)), file=sys.stderr, flush=True)
            measured.append((setting, found))
    rates = {kind: rate((64, 64, 64) if options.quick else LARGE, kind) for kind in computable(cases)}
    title = f"{sizes}; one sequence; threads: {options.threads}"
    peaks = ", ".join(f"{value / 1e9:,.0f} in {kind}" for kind, value in rates.items())
    ending = f"One large multiplication on one thread, in GFLOP/s: {peaks}."
    lines = [title, "", report(measured, sizes, cases, rates), "", ending, "", machine_line(), load_line(foreign)]
    write_report("\n".join(lines), options.output)


LARGE = (2048, 2048, 2048)


def selected(cases: Mapping[str, Case], patterns: Sequence[str]) -> dict[str, Case]:
    """Return the cases whose names match, and those that they are compared with."""
    names = {name for name in cases if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    if not names:
        raise SystemExit(f"No case is named {' or '.join(patterns)}; there are {'; '.join(cases)}.")
    names |= {cases[name].reference for name in names}
    return {name: case for name, case in cases.items() if name in names}


def computable(cases: Mapping[str, Case]) -> list[str]:
    """Return the compute types that this machine has."""
    kinds = dict.fromkeys(case.compute for case in cases.values())
    return [kind for kind in kinds if kind == "float32" or native.multiplies_bfloat16()]


def rate(sizes: tuple[int, int, int], compute: str) -> float:
    """Return the operations per second of one multiplication on one thread, best of several."""
    call = product(sizes, "float32", compute)
    return 2.0 * math.prod(sizes) / min(seconds(call) for _ in range(5))


def run(
    python: str, case: Case, folder: Path, setting: Setting, numbers: tuple[int, int, int]
) -> dict[str, Any] | None:
    """Run one process: wall and CPU seconds to the end of the first step and of each step, MiB, losses."""
    start = time.monotonic()  # before Python starts; all processes share the clock
    given = (*numbers, setting.tokens, int(setting.again), ",".join(TARGETS[setting.targets]), case.form, case.compute)
    command = [python, "-c", case.program + ENDING, str(folder), *map(str, given)]
    result = subprocess.run(command, env=environment(numbers[1]), capture_output=True, text=True)
    if result.returncode:
        print(last_line(result.stderr), file=sys.stderr)
        return None
    found = json.loads(result.stdout.splitlines()[-1])
    clock, processor = found["first"]
    return found | {"first": (clock - start, processor)}


def report(
    measured: Sequence[tuple[Setting, Mapping[str, list[dict[str, Any] | None]]]],
    sizes: Sizes,
    cases: Mapping[str, Case],
    rates: Mapping[str, float],
) -> str:
    """Format the table; figures in brackets are relative to PEFT in the same type."""
    rows = [
        row_of(setting, name, found, sizes, cases, rates)
        for setting, found in measured
        for name, results in found.items()
        if any(results)
    ]
    head = [
        "framework",
        "tokens",
        "adapters on",
        "checkpointing",
        "step, ms",
        "CPU time, ms",
        "first step done after, s",
    ]
    return table([*head, "peak, MiB", "limit, ms", "loss"], rows)


def row_of(
    setting: Setting,
    name: str,
    found: Mapping[str, list[dict[str, Any] | None]],
    sizes: Sizes,
    cases: Mapping[str, Case],
    rates: Mapping[str, float] | None,
) -> list[str]:
    """Format one row; without rates, before they are measured, it has no limit.

    A turn whose run failed is None; it counts neither in the medians nor, as another's partner, in the ratios.
    """
    case, results = cases[name], [result for result in found[name] if result is not None]
    own = figures(results)
    cells = [f"{value:,.{places}f}" for value, places in zip(own, DIGITS, strict=True)]
    turns = [
        [one / other for one, other in zip(figures([mine]), figures([theirs]), strict=True)]
        for mine, theirs in zip(found[name], found.get(case.reference, ()), strict=False)
        if mine is not None and theirs is not None
    ]
    if turns and name != case.reference:
        ratios = [statistics.median(ratio) for ratio in zip(*turns, strict=True)]
        cells = [f"{cell} ({ratio:.2f})" for cell, ratio in zip(cells, ratios, strict=True)]
    if rates is not None:
        limit = 1000 * setting.operations(sizes) / rates.get(case.compute, math.nan)
        cells.append(f"{limit:,.0f} ({limit / own[1]:.2f})")
    losses = " → ".join(f"{results[0]['losses'][place]:.4f}" for place in (0, -1))
    return [name, f"{setting.tokens:,}", setting.targets, "yes" if setting.again else "no", *cells, losses]


DIGITS = (0, 0, 1, 0)


def figures(results: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Medians: wall and CPU milliseconds of a step, wall seconds to the end of the first, MiB."""
    steps = [[1000 * step[place] for result in results for step in result["steps"]] for place in (0, 1)]
    firsts, peaks = [result["first"][0] for result in results], [result["peak"] for result in results]
    return tuple(statistics.median(values) for values in (*steps, firsts, peaks))


if __name__ == "__main__":
    main()
