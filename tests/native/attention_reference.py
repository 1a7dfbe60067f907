"""Attention and its gradient in NumPy's float64, and one-node models of them on ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from optimizer_sessions import run_node

INPUTS = {
    "Attention": ("q", "k", "v", "bias"),
    "AttentionGradient": ("dy", "q", "k", "v", "y", "log_sum", "bias"),
    "PackedAttention": ("qkv", "bias"),
    "PackedAttentionGradient": ("dy", "qkv", "y", "log_sum", "bias"),
}
OUTPUTS = {
    "Attention": ("y", "log_sum"),
    "AttentionGradient": ("dq", "dk", "dv", "dbias"),
    "PackedAttention": ("y", "log_sum"),
    "PackedAttentionGradient": ("dqkv", "dbias"),
}


@dataclass(frozen=True)
class Attention:
    """Sizes, the shape of the bias (``None``: no bias), and its masks.

    Attributes:
        masked: True if about a third of the bias is -inf.
        empty: Rows of queries whose bias is all -inf.
        causal: True if a query sees no later key.
        compute: The attribute; "float32" is left out.
    """

    batch: int = 2
    heads: int = 3
    queries: int = 5
    keys: int = 5
    size: int = 32
    value_size: int = 32
    bias: tuple[int, ...] | None = None
    masked: bool = False
    empty: tuple[int, ...] = ()
    causal: bool = False
    zero_empty_rows: int = 0
    compute: str = "float32"

    @property
    def attributes(self) -> dict[str, float | str]:
        scale = float(np.float32(1 / np.sqrt(max(1, self.size))))
        attributes: dict[str, float | str] = {"scale": scale, "zero_empty_rows": self.zero_empty_rows}
        return attributes if self.compute == "float32" else attributes | {"compute": self.compute}

    def draw(self, dtype) -> dict[str, np.ndarray]:
        """q, k, v, dy and, where there is one, the bias."""
        rng = np.random.default_rng((self.queries, self.keys, self.size))
        shapes = {
            "q": (self.batch, self.queries, self.heads, self.size),
            "k": (self.batch, self.keys, self.heads, self.size),
            "v": (self.batch, self.keys, self.heads, self.value_size),
            "dy": (self.batch, self.queries, self.heads, self.value_size),
        }
        feeds = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        if self.bias is not None:
            bias = np.asarray(rng.standard_normal(self.bias))
            if self.masked:
                bias = np.where(rng.random(self.bias) < 0.35, -np.inf, bias)
                bias[..., self.keys // 2] = 0
            if self.causal:
                bias = np.where(np.tril(np.ones((self.queries, self.keys))) > 0, bias, -np.inf)
            if self.empty:
                bias[..., list(self.empty), :] = -np.inf
            feeds["bias"] = bias.astype(dtype)
        return feeds

    def expected(self, feeds: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """y, log_sum, dq, dk, dv and, with a bias, dbias; and of each the size of the terms that it is the sum of.

        Rounding errors are in proportion to these sizes: that of a score to the size of its own terms, that of its
        exponential to the score's.
        """
        q, k, v, dy = (feeds[name].astype(np.float64) for name in ("q", "k", "v", "dy"))
        scale = self.attributes["scale"]
        bias = feeds.get("bias", np.zeros(())).astype(np.float64)
        scores = scale * np.einsum("bshd,bthd->bhst", q, k) + bias
        score_sizes = scale * np.einsum("bshd,bthd->bhst", abs(q), abs(k)) + np.where(np.isinf(bias), 0, abs(bias))
        with np.errstate(all="ignore"):
            largest = scores.max(-1, keepdims=True, initial=-np.inf)
            e = np.exp(scores - largest)
            p = e / e.sum(-1, keepdims=True)
            log_sum = largest[..., 0] + np.log(e.sum(-1))
        log_sum[(scores == -np.inf).all(-1)] = -np.inf
        if self.zero_empty_rows:
            p = np.where(np.isnan(p), 0, p)
        p_sizes = p * (1 + score_sizes.max(-1, keepdims=True, initial=0))
        dp = np.einsum("bshe,bthe->bhst", dy, v)
        dp_sizes = np.einsum("bshe,bthe->bhst", abs(dy), abs(v))
        slopes = p * (dp - (dp * p).sum(-1, keepdims=True))
        slope_sizes = p_sizes * (dp_sizes + (dp_sizes * p).sum(-1, keepdims=True))
        values = {
            "y": np.einsum("bhst,bthe->bshe", p, v),
            "log_sum": log_sum,
            "dq": scale * np.einsum("bhst,bthd->bshd", slopes, k),
            "dk": scale * np.einsum("bhst,bshd->bthd", slopes, q),
            "dv": np.einsum("bhst,bshe->bthe", p, dy),
        }
        sizes = {
            "y": np.einsum("bhst,bthe->bshe", p_sizes, abs(v)),
            "log_sum": 1 + score_sizes.max(-1, initial=0),
            "dq": scale * np.einsum("bhst,bthd->bshd", slope_sizes, abs(k)),
            "dk": scale * np.einsum("bhst,bshd->bthd", slope_sizes, abs(q)),
            "dv": np.einsum("bhst,bshe->bthe", p_sizes, abs(dy)),
        }
        if "bias" in feeds:
            values["dbias"], sizes["dbias"] = (summed_to(each, bias.shape) for each in (slopes, slope_sizes))
        return values, sizes


def summed_to(scores, shape):
    """The sum of [batch, heads, queries, keys] over the axes along which an array of the shape is repeated."""
    full = (1,) * (4 - len(shape)) + tuple(shape)
    repeated = tuple(axis for axis, size in enumerate(full) if size == 1)
    return scores.sum(axis=repeated, keepdims=True).reshape(shape)


def run(path, operator, feeds, attributes, threads=1, wanted=None):
    """The outputs of one node by name; a gradient of the bias where there is one."""
    if wanted is None:
        wanted = [name for name in OUTPUTS[operator] if name != "dbias" or "bias" in feeds]
    return run_node(path, operator, INPUTS[operator], OUTPUTS[operator], feeds, attributes, threads, wanted)


def run_both(path, case, feeds, threads=1):
    """Forward pass and gradient."""
    found = run(path, "Attention", feeds, case.attributes, threads)
    return found | run(path, "AttentionGradient", feeds | found, case.attributes, threads)
