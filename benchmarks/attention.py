"""Attention in float32 and bfloat16, forward and backward, beside PyTorch's.

    python benchmarks/attention.py
    python benchmarks/attention.py --against-torch

The native kernels on one thread against ``scaled_dot_product_attention`` and its gradient. The variants alternate; a
figure is the CPU time of the fastest call. bfloat16 columns are meaningful only on a CPU with AVX512-BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from harness import ForeignLoad, load_line, machine_line, make_parser, milliseconds, table, write_report
from native_node import seconds, session_of
from onnx import helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN


class Sizes(NamedTuple):
    """Self-attention of some heads."""

    batch: int
    heads: int
    tokens: int
    size: int
    causal: bool

    def __str__(self) -> str:
        numbers = f"{self.batch} x {self.heads} x {self.tokens:,} x {self.size}"
        return numbers + (", causal" if self.causal else "")


SIZES = (
    Sizes(1, 24, 512, 32, True),
    Sizes(1, 24, 2048, 32, True),
    Sizes(1, 12, 2048, 64, True),
    Sizes(8, 12, 128, 64, False),
    Sizes(2, 12, 197, 64, False),
)
QUICK = (Sizes(1, 2, 40, 32, True),)
TYPES = ("float32", "bfloat16")

Calls = tuple[Callable[[], object], Callable[[], object]]
"""Forward, and backward."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, "one small case, one round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--against-torch", action="store_true", help="also compute by PyTorch")
    options = parser.parse_args(arguments)
    rows = []
    with ForeignLoad() as foreign:
        for sizes in QUICK if options.quick else SIZES:
            calls = {kind: attention(sizes, kind) for kind in TYPES}
            if options.against_torch:
                calls |= {f"PyTorch, {kind}": attention_of_torch(sizes, kind) for kind in TYPES}
            best = {name: [float("inf")] * 2 for name in calls}
            for _ in range(1 if options.quick else options.rounds):
                for name, pair in calls.items():
                    best[name] = [min(old, seconds(call)) for old, call in zip(best[name], pair, strict=True)]
            rows.append([str(sizes), *(" + ".join(milliseconds(value) for value in pair) for pair in best.values())])
    head = ["batch x heads x tokens x size", *best]
    title = "Milliseconds of CPU time of one thread: forward + backward"
    write_report("\n".join([title, "", table(head, rows), "", machine_line(), load_line(foreign)]), options.output)


def inputs_of(sizes: Sizes) -> dict[str, np.ndarray]:
    """q, k, v and dy, each [batch, tokens, heads, size]."""
    random = np.random.default_rng(0)
    shape = (sizes.batch, sizes.tokens, sizes.heads, sizes.size)
    return {name: random.standard_normal(shape).astype(np.float32) for name in ("q", "k", "v", "dy")}


def attention(sizes: Sizes, compute: str) -> Calls:
    """Calls of the native kernels."""
    feeds = inputs_of(sizes)
    dy = feeds.pop("dy")
    if sizes.causal:
        lower = np.tril(np.ones((sizes.tokens, sizes.tokens), bool))
        feeds["bias"] = np.where(lower, np.float32(0), np.finfo(np.float32).min)
    forward = _session("Attention", feeds, ("y", "log_sum"), sizes, compute)
    y, log_sum = forward.run(None, feeds)
    given = {"dy": dy} | {name: feeds[name] for name in "qkv"} | {"y": y, "log_sum": log_sum}
    given |= {name: feeds[name] for name in feeds if name == "bias"}
    backward = _session("AttentionGradient", given, ("dq", "dk", "dv"), sizes, compute)
    return lambda: forward.run(None, feeds), lambda: backward.run(None, given)


def _session(
    operator: str, feeds: dict[str, np.ndarray], outputs: Sequence[str], sizes: Sizes, compute: str
) -> onnxruntime.InferenceSession:
    settings: dict[str, Any] = {"scale": sizes.size**-0.5, "compute": compute}
    node = helper.make_node(operator, list(feeds), outputs, domain=ONNXTRAIN_DOMAIN, **settings)
    return session_of(node, feeds)


def attention_of_torch(sizes: Sizes, kind: str) -> Calls:
    """Calls of PyTorch's kernels, with everything in one type."""
    import torch

    torch.set_num_threads(1)
    arrays = {name: torch.from_numpy(array).to(getattr(torch, kind)) for name, array in inputs_of(sizes).items()}
    q, k, v = (arrays[name].requires_grad_().transpose(1, 2) for name in "qkv")

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=sizes.causal)

    y, dy = forward(), arrays["dy"].transpose(1, 2)
    return forward, lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)


if __name__ == "__main__":
    main()
