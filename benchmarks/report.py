"""Run the benchmarks and write their tables into benchmarks/pages/: one command for a quiet machine.

    python benchmarks/report.py                                # everything that needs no data, about 45 minutes
    python benchmarks/report.py --mnist FOLDER                 # MNIST too
    python benchmarks/report.py --only step,startup            # some sections
    python benchmarks/report.py --environment onnxsim=.../python --environment onnxruntime-training=.../python

Each has a page of its name; the section between ``<!-- NAME -->`` and ``<!-- /NAME -->`` is replaced.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import FOLDER

PAGES = FOLDER / "pages"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--mnist", metavar="FOLDER", help="folder of MNIST's original files")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=PYTHON", help="see step.py")
    parser.add_argument("--quick", action="store_true", help="test runs: the figures mean nothing")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the pages (benchmarks/pages)")
    options = parser.parse_args(arguments)
    commands = sections(options.environment, options.mnist)
    chosen = options.only.split(",") if options.only else list(commands)
    unknown = [name for name in chosen if name not in commands]
    if unknown:
        parser.error(f"unknown sections: {', '.join(unknown)}; there are {', '.join(commands)}")
    failed = []
    for name in chosen:
        print(f"{name}: {' '.join(commands[name])}", flush=True)
        text = run(commands[name], quick=options.quick)
        if text is None:
            failed.append(name)
        else:
            page = page_of(name, options.pages)
            page.write_text(replaced(page.read_text(), name, text))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def sections(environments: Sequence[str], mnist: str | None) -> dict[str, list[str]]:
    """The command that writes each section."""
    peers = ["onnxtrain", "torch", "torch-compile"]
    given = {entry.split("=", 1)[0] for entry in environments}
    peers += [peer for peer in ("onnxruntime-training", "onnxsim") if peer in given]
    places = [word for entry in environments for word in ("--environment", entry)]
    models = "mlp,lenet5,conv6,resnet18,mobilenet_v2,unet,bert_mini,distilbert,gpt2,vit_tiny"
    commands = {
        "step": ["step.py", "--peers", ",".join(peers), *places],
        "zoo": ["zoo_step.py"],
        "zoo-limits": ["limits.py"],
        "side-by-side": ["side_by_side.py"],
        "recurrent": ["recurrent.py"],
        "startup": ["startup.py", "--imports"],
        "reading": ["reading.py"],
        "memory": ["memory.py"],
        "overhead": ["overhead.py"],
        "gradient-cost": ["gradient_cost.py"],
        "optimizers": ["optimizers.py"],
        "fused": ["fused.py"],
        "profile": ["profile_step.py", "--models", models, "--against-torch"],
    }
    if "peft" in given:
        commands["adapters"] = ["adapters.py", *places]
        commands["adapters-billion"] = ["adapters.py", "--billion", *places]
        commands["adapters-large"] = ["large_files.py"]
    if mnist is not None:
        commands["mnist"] = ["mnist.py", mnist, "--seeds", "0,1,2"]
    return commands


def page_of(name: str, pages: Path = PAGES) -> Path:
    """The page of a section."""
    for suffix in ("-billion", "-large", "-limits"):
        name = name.removesuffix(suffix)
    return pages / f"{name.replace('-', '_')}.md"


def run(command: Sequence[str], *, quick: bool) -> str | None:
    """Return a benchmark's report, or None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.md"
        script, *rest = command
        extra = ["--quick"] if quick else []
        words = [sys.executable, str(FOLDER / script), *rest, *extra, "--output", str(output)]
        subprocess.run(words, check=False)
        # A missed goal also exits with an error: its report counts.
        return output.read_text().strip() if output.exists() else None


def replaced(page: str, name: str, text: str) -> str:
    """Replace the text of a section of the page.

    Raises:
        ValueError: The page has no such section.
    """
    before, begin, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not begin or not end:
        raise ValueError(f"The page has no section <!-- {name} --> ... <!-- /{name} -->.")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
