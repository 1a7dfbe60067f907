"""Removal of whole structures on architectures of torchvision, timm and transformers, beside Torch-Pruning.

    python benchmarks/structures.py --output structures.md       # all; tens of minutes
    python benchmarks/structures.py --quick                      # two small networks
    python benchmarks/structures.py --only resnet18 swin_t
    python benchmarks/structures.py --channels                   # which numbers of channels are fast
    python benchmarks/structures.py --accuracy FASHION --seeds 5 # accuracy at equal latency

Every architecture runs in a process of its own, with a time limit for each tool. It has random weights; small and
constant parameters are drawn anew, since masking them would change no output. A row is right if at least a fifth of the
parameters is gone, the smaller model equals the masked original, and the masked original differs from the original.
Torch-Pruning removes three tenths of the channels of every layer in the same process, with its defaults and the last
linear layer left out. It runs if the pruned network does, its output has its shape, and a fifth of the parameters is
gone; equality with a masked network is not asked of it. The script needs PyTorch, and torchvision, timm, transformers
and torch-pruning as far as they are installed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import multiprocessing
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "plugins" / "structures"))

import masked_models

from onnxtrain.plugins.pruning.choose_structures import STRUCTURES, first_reaching, removal_order
from onnxtrain.plugins.pruning.structures import measured_speedup

LEAST = 0.2
"""Fraction of the parameters that must go."""

ASKED = 0.3
"""Fraction of the parameters that is asked of both tools; Torch-Pruning gets it as the fraction of channels."""

TORCHVISION = (
    *("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "densenet121", "squeezenet1_1", "googlenet"),
    *("inception_v3", "shufflenet_v2_x1_0", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"),
    *("efficientnet_v2_s", "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t", "maxvit_t"),
)
TIMM = (
    *("resnetv2_50", "res2net50_26w_4s", "ghostnet_100", "mixer_s32_224", "repvgg_a0", "deit_tiny_patch16_224"),
    *("mobilevit_xxs", "edgenext_xx_small", "poolformer_s12", "hardcorenas_a"),
)
TRANSFORMERS = (
    *("bert", "distilbert", "roberta", "albert", "electra", "mobilebert", "gpt2", "llama", "opt", "vit", "segformer"),
    "bit",
)
QUICK = ("squeezenet1_1", "bert")
LARGE = frozenset({"vit_b_16", "swin_t", "maxvit_t", "inception_v3", "mixer_s32_224", "deit_tiny_patch16_224"})
"""Networks that take images of 224 pixels only, or shrink them too often for 64."""


@dataclass
class Row:
    """The result for an architecture."""

    name: str
    library: str
    ours: str
    gone: float
    theirs: str

    @property
    def right(self) -> bool:
        """Return whether onnxtrain's smaller model is right."""
        return self.ours == "right"


def transformer(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A small random network of transformers, and its input."""
    import transformers as library

    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text, image = {"vocab_size": 100}, {"image_size": 32, "patch_size": 8}
    made: dict[str, Callable[[], Any]] = {
        "bert": lambda: library.BertForSequenceClassification(library.BertConfig(**text, **size)),
        "distilbert": lambda: library.DistilBertForSequenceClassification(
            library.DistilBertConfig(**text, dim=64, n_layers=2, n_heads=4, hidden_dim=128)
        ),
        "roberta": lambda: library.RobertaForSequenceClassification(
            library.RobertaConfig(**text, **size, max_position_embeddings=64)
        ),
        "albert": lambda: library.AlbertForSequenceClassification(
            library.AlbertConfig(**text, **size, embedding_size=32)
        ),
        "electra": lambda: library.ElectraForSequenceClassification(
            library.ElectraConfig(**text, **size, embedding_size=32)
        ),
        "mobilebert": lambda: library.MobileBertForSequenceClassification(
            library.MobileBertConfig(
                **text, **{**size, "intermediate_size": 64}, embedding_size=32, intra_bottleneck_size=32
            )
        ),
        "gpt2": lambda: library.GPT2LMHeadModel(
            library.GPT2Config(**text, n_embd=64, n_layer=2, n_head=4, use_cache=False)
        ),
        "llama": lambda: library.LlamaForCausalLM(
            library.LlamaConfig(**text, **size, num_key_value_heads=2, use_cache=False)
        ),
        "opt": lambda: library.OPTForCausalLM(
            library.OPTConfig(
                **text, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
                use_cache=False, max_position_embeddings=64,
            )
        ),
        "vit": lambda: library.ViTForImageClassification(library.ViTConfig(**image, **size)),
        "segformer": lambda: library.SegformerForImageClassification(
            library.SegformerConfig(depths=[1] * 4, hidden_sizes=[16, 32, 32, 64], num_attention_heads=[1, 2, 2, 4])
        ),
        "bit": lambda: library.BitForImageClassification(
            library.BitConfig(embedding_size=32, hidden_sizes=[32, 64, 64, 64], depths=[1] * 4, num_groups=8)
        ),
    }  # fmt: skip
    images = name in ("vit", "segformer", "bit")
    inputs = torch.randn(2, 3, 32, 32) if images else torch.randint(1, 99, (2, 12))
    return Logits(made[name]()), inputs


class Logits(torch.nn.Module):
    """A network of transformers with one tensor as its output."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.inner(x).logits


def names(wanted: set[str]) -> Iterator[tuple[str, str]]:
    """The libraries that are installed, and their architectures."""
    for library, own in (("torchvision", TORCHVISION), ("timm", TIMM), ("transformers", TRANSFORMERS)):
        if importlib.util.find_spec(library) is not None:
            yield from ((library, name) for name in own if not wanted or name in wanted)


def network(library: str, name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """An architecture with random weights, and an input."""
    torch.manual_seed(0)
    pixels = 224 if name in LARGE else 64
    image = torch.randn(1, 3, pixels, pixels)
    if library == "torchvision":
        import torchvision

        extra = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return torchvision.models.get_model(name, weights=None, **extra), image
    if library == "timm":
        import timm

        return timm.create_model(name, pretrained=False), image
    return transformer(name)


def draw_anew(module: torch.nn.Module) -> None:
    """Draw small and constant parameters anew, and statistics."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.numel() == 1 or parameter.std() < 1e-3:
                start = 1.0 if name.endswith("weight") and parameter.ndim == 1 else 0.0
                parameter.copy_(start + 0.3 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5, generator=generator)


def export(module: torch.nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    """The network as an ONNX model."""
    program = torch.onnx.export(module, (x,), dynamo=True, opset_version=18, verbose=False, external_data=False)
    return program.model_proto


def ours(model: onnx.ModelProto, x: torch.Tensor) -> tuple[str, float]:
    """Remove structures from a model; return "right" or what went wrong, and the fraction that is gone."""
    structures = masked_models.structures_of(model)
    order = removal_order(structures, STRUCTURES)
    if not order:
        return "nothing to remove: " + next(iter(structures.locked.values()), "no structures"), 0.0
    before = structures.size()
    try:
        removed = first_reaching(order, structures, structures.size, before * (1 - ASKED))
    except ValueError:
        removed = order
    gone = 1 - structures.size(structures.kept(removed)) / before
    try:
        masked_models.compare(model, {model.graph.input[0].name: x.numpy()}, removed)
    except AssertionError as error:
        return f"wrong: {' '.join(str(error).split())[:80]}", gone
    return ("right" if gone >= LEAST else "too little is gone"), gone


def torch_pruning(module: torch.nn.Module, x: torch.Tensor) -> str:
    """Prune a network by Torch-Pruning with its defaults; return "runs" or what went wrong."""
    if importlib.util.find_spec("torch_pruning") is None:
        return "not installed"
    import torch_pruning as tp

    network = copy.deepcopy(module)
    size = sum(parameter.numel() for parameter in network.parameters())
    last = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)][-1:]
    try:
        shape = network(x).shape
        pruner = tp.pruner.MetaPruner(
            network, x, importance=tp.importance.MagnitudeImportance(p=2), pruning_ratio=ASKED, ignored_layers=last
        )
        pruner.step()
        if network(x).shape != shape:
            return "another output shape"
    except Exception as error:  # whatever a tool raises is its result
        return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
    gone = 1 - sum(parameter.numel() for parameter in network.parameters()) / size
    return "runs" if gone >= LEAST else f"only {gone:.0%} is gone"


def measure(library: str, name: str, results: Connection) -> None:
    """Send the result of onnxtrain on one architecture, then that of Torch-Pruning."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module, x = network(library, name)
    module.eval()
    draw_anew(module)
    try:
        results.send(ours(export(module, x), x))
    except Exception as error:  # the exporter's errors are results, too
        results.send((f"{type(error).__name__}: {' '.join(str(error).split())[:60]}", 0.0))
    results.send(torch_pruning(module, x))


def limited(library: str, name: str, limit: float) -> Row:
    """Both tools on one architecture, in a process that ends at the time limit of either."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(library, name, sending), daemon=True)
    process.start()
    sending.close()
    late = f"not done after {limit:g} s"
    found: list[Any] = [(late, 0.0), late]
    for place in range(2):
        if not receiving.poll(limit):
            break
        try:
            found[place] = receiving.recv()
        except EOFError:
            process.join()
            lost = f"the process ended with code {process.exitcode}"
            found[place] = (lost, 0.0) if place == 0 else lost
            break
    process.kill()
    process.join()
    return Row(name, library, *found[0], found[1])


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, with a line of counts."""
    lines = [
        "| architecture | library | onnxtrain | parameters gone | Torch-Pruning |",
        "|---|---|---|---:|---|",
    ]
    lines += [f"| {row.name} | {row.library} | {row.ours} | {row.gone:.0%} | {row.theirs} |" for row in rows]
    right, runs = sum(row.right for row in rows), sum(row.theirs == "runs" for row in rows)
    lines += ["", f"onnxtrain: {right} of {len(rows)} right; Torch-Pruning with its defaults: {runs} run."]
    return "\n".join(lines) + "\n"


CHANNELS = (16, 20, 24, 30, 31, 32, 33, 36, 40, 44, 47, 48, 52, 56, 60, 62, 63)


def channels(widths: tuple[int, ...], repeats: int) -> str:
    """Times of four convolutions by their channels, as parts of the time with 64, as a Markdown table."""

    def stack(width: int, kernel: int) -> onnx.ModelProto:
        rng = np.random.default_rng(0)
        pads, shapes = [kernel // 2] * 4, [(width, 3, kernel, kernel), *[(width, width, kernel, kernel)] * 3]
        weights = [
            onnx.numpy_helper.from_array(0.05 * rng.normal(size=shape).astype(np.float32), f"w{number}")
            for number, shape in enumerate(shapes)
        ]
        nodes = []
        for number in range(len(shapes)):
            nodes += [
                onnx.helper.make_node("Conv", [f"x{number}", f"w{number}"], [f"c{number}"], pads=pads),
                onnx.helper.make_node("Relu", [f"c{number}"], [f"x{number + 1}"]),
            ]
        graph = onnx.helper.make_graph(
            nodes,
            "stack",
            [onnx.helper.make_tensor_value_info("x0", 1, [1, 3, 56, 56])],
            [onnx.helper.make_tensor_value_info(f"x{len(shapes)}", 1, [1, width, 56, 56])],
            weights,
        )
        return onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])

    lines = ["| channels | 3 x 3 | 1 x 1 |", "|---|---:|---:|"]
    for width in widths:
        parts = [
            statistics.median(1 / measured_speedup(stack(64, kernel), stack(width, kernel)) for _ in range(repeats))
            for kernel in (3, 1)
        ]
        lines.append(f"| {width} | {parts[0]:.2f} | {parts[1]:.2f} |")
    return "\n".join(lines) + "\n"


def accuracy(folder: Path, examples: int, seeds: int, file: Path | None) -> str:
    """Accuracy at equal latency, as a Markdown table."""
    import structures_accuracy

    rows = []
    for row in structures_accuracy.pairs(folder, examples, seeds, file):
        rows.append(row)
        print(row, flush=True)
    return structures_accuracy.table(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small networks, or two numbers of channels")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="architectures to try")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="time for each tool on each")
    parser.add_argument("--channels", action="store_true", help="time convolutions by their channels instead")
    parser.add_argument("--accuracy", type=Path, metavar="FOLDER", help="compare accuracy on Fashion-MNIST instead")
    parser.add_argument("--examples", type=int, default=10_000, help="images for --accuracy, of each part")
    parser.add_argument("--seeds", type=int, default=5, help="seeds for --accuracy")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="continue the rows of --accuracy in this file")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the table to this file")
    arguments = parser.parse_args()
    if arguments.channels:
        text = channels((32, 63), 1) if arguments.quick else channels(CHANNELS, 3)
    elif arguments.accuracy:
        text = accuracy(arguments.accuracy, arguments.examples, arguments.seeds, arguments.csv)
    else:
        rows = []
        for entry in names(set(QUICK) if arguments.quick else set(arguments.only)):
            rows.append(limited(*entry, arguments.limit))
            print(f"{rows[-1].name}: {rows[-1].ours}, {rows[-1].gone:.0%} gone; {rows[-1].theirs}", flush=True)
        text = table(rows)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
