"""Small PyTorch models of sequences: recurrent, attentive, convolutional; importing this file imports torch."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, and logits of the next token; tied: the embedding is the last layer, too."""

    def __init__(
        self, kind: str, layers: int = 2, tied: bool = False, vocabulary: int = 20, width: int = 6, **options: str
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = getattr(nn, kind)(width, width, layers, batch_first=True, **options)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


class BidirectionalTagger(nn.Module):
    """Two bidirectional layers; labels every token, with the final states added."""

    def __init__(self, kind: str = "LSTM", vocabulary: int = 20, width: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = getattr(nn, kind)(width, width, 2, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)
        self.final = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        y, states = self.recurrent(self.embedding(tokens.T))
        final = states[0] if isinstance(states, tuple) else states
        return (self.head(y) + self.final(final[-1])).transpose(0, 1)


class UnrolledCells(nn.Module):
    """An LSTM cell and a GRU cell, written out for a sequence of known length."""

    def __init__(self, features: int = 4, width: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(features, width)
        self.gru = nn.GRUCell(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = state = x.new_zeros(x.shape[0], self.lstm.hidden_size)
        for step in x.unbind(1):
            hidden, cell = self.lstm(step, (hidden, cell))
            state = self.gru(hidden, state)
        return self.head(state)


class Seq2Seq(nn.Module):
    """A GRU encoder, and a GRU decoder that attends to it (additive attention)."""

    def __init__(self, vocabulary: int = 20, width: int = 6) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        y, _ = self.decoder(self.target(target), state)
        energy = torch.tanh(self.query(y).unsqueeze(2) + self.key(memory).unsqueeze(1)) @ self.score
        context = energy.softmax(-1) @ memory
        return self.head(torch.cat([y, context], -1))


class Positions(nn.Module):
    """Token embeddings with learned positions."""

    def __init__(self, vocabulary: int, width: int, longest: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.1 * torch.randn(longest, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class TransformerEncoder(nn.Module):
    """``torch.nn.TransformerEncoder`` with a padding mask; classifies the mean over the tokens that count."""

    def __init__(self, norm_first: bool, activation: str, vocabulary: int = 20, width: int = 8) -> None:
        super().__init__()
        self.embedding = Positions(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        y = self.encoder(self.embedding(tokens), src_key_padding_mask=mask == 0)
        weights = mask.to(y.dtype).unsqueeze(-1)
        return self.head((y * weights).sum(1) / weights.sum(1))


class TransformerDecoder(nn.Module):
    """``torch.nn.TransformerDecoder``: causal attention to the tokens, cross-attention to a given memory."""

    def __init__(self, vocabulary: int = 20, width: int = 8) -> None:
        super().__init__()
        self.embedding = Positions(vocabulary, width)
        layer = nn.TransformerDecoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.decoder(x, memory, tgt_mask=causal(x), tgt_is_causal=False))


class Translator(nn.Module):
    """``torch.nn.Transformer``: encoder and decoder, with one embedding for both and for the last layer."""

    def __init__(self, vocabulary: int = 20, width: int = 8) -> None:
        super().__init__()
        self.embedding = Positions(vocabulary, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(target)
        y = self.transformer(self.embedding(source), x, tgt_mask=causal(x), tgt_is_causal=False)
        return y @ self.embedding.tokens.weight.T


def causal(x: Tensor) -> Tensor:
    """An additive mask [S, S] for x [N, S, ...]: minus infinity above the diagonal."""
    ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)
    return torch.zeros_like(ones).masked_fill(ones.triu(1) > 0, -math.inf)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) with a learned scale."""

    def __init__(self, width: int, library: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.library = library

    def forward(self, x: Tensor) -> Tensor:
        if self.library:
            return functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, then SwiGLU, both behind RMS normalization."""

    def __init__(self, width: int, heads: int, groups: int, library: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.library = heads, groups, width // heads, library
        self.attention_norm, self.mlp_norm = RmsNorm(width, library), RmsNorm(width, library)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def _rotated(self, x: Tensor) -> Tensor:
        frequencies = 100.0 ** (-torch.arange(0, self.size, 2, dtype=x.dtype) / self.size)
        angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), frequencies)
        cosine, sine = angles.cos(), angles.sin()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    def _split(self, x: Tensor, count: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], count, self.size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q = self._rotated(self._split(self.q(y), self.heads))
        k = self._rotated(self._split(self.k(y), self.groups))
        v = self._split(self.v(y), self.groups)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        if self.library:
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = (q @ k.transpose(-1, -2) / math.sqrt(self.size) + causal(x)).softmax(-1) @ v
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A LLaMA-style language model; ``library``: torch's own normalization and attention functions."""

    def __init__(self, library: bool = False, vocabulary: int = 20, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, 4, 2, library) for _ in range(2)))
        self.norm = RmsNorm(width, library)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class WaveNet(nn.Module):
    """Causal convolutions of dilation 1, 2, 4 with gated activations, residuals and skip connections."""

    def __init__(self, channels: int = 2, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=1 << i) for i in range(3))
        self.residuals = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.last = nn.Conv1d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for i, layer in enumerate(self.filters):
            value, gate = layer(functional.pad(x, (1 << i, 0))).chunk(2, 1)
            y = torch.tanh(value) * torch.sigmoid(gate)
            total = total + self.skips[i](y)
            x = x + self.residuals[i](y)
        return self.last(torch.relu(total))


class TextConvNet(nn.Module):
    """1-D convolutions of widths 2, 3 and 4 over embeddings, the largest value over time of each filter."""

    def __init__(self, vocabulary: int = 20, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 4, size, padding="same") for size in (2, 3, 4))
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        return self.head(torch.cat([torch.relu(layer(x)).amax(-1) for layer in self.layers], -1))


class AttentionPooling(nn.Module):
    """Tokens weighted by a learned query, padding masked out by minus infinity; one logit per example."""

    def __init__(self, vocabulary: int = 20, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.key = nn.Linear(width, width)
        self.query = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = (torch.tanh(self.key(x)) * self.query).sum(-1).masked_fill(mask == 0, -math.inf)
        return self.head((scores.softmax(-1).unsqueeze(-1) * x).sum(1)).squeeze(-1)


class LinearAttention(nn.Module):
    """Causal attention without a softmax: cumulative sums of keys times values (Katharopoulos et al. 2020)."""

    def __init__(self, vocabulary: int = 20, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k = functional.elu(self.q(x)) + 1, functional.elu(self.k(x)) + 1
        state = torch.einsum("nsk,nsv->nskv", k, self.v(x)).cumsum(1)
        norm = torch.einsum("nsk,nsk->ns", q, k.cumsum(1))
        return self.head(torch.einsum("nsk,nskv->nsv", q, state) / norm.unsqueeze(-1))


class SpectralMixer(nn.Module):
    """Mixes tokens by the real part of a discrete Fourier transform (Lee-Thorp et al. 2021)."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.norm(y + torch.fft.rfft(y, dim=1, norm="ortho").abs().square().mean(1, keepdim=True)))


class ScriptedLoop(nn.Module):
    """A recurrence whose number of steps is an input: a loop in the graph."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for _ in range(int(steps)):
            x = torch.tanh(self.inner(x)) + 0.5 * x
        return self.head(x)


class ScriptedRecurrence(nn.Module):
    """A list of inputs, a list of results, and the loop between them: sequences in the graph."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.split(1, 1)
        state = torch.zeros_like(steps[0])
        collected: list[Tensor] = []
        for index in range(len(steps)):
            state = torch.tanh(self.inner(state) + steps[index])
            collected.append(state.squeeze(1))
        return self.head(torch.stack(collected, 1))


class ScriptedLayers(nn.Module):
    """Two recurrent layers whose states are a list that each step changes in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])]
        for index in range(x.shape[1]):
            states[0] = torch.tanh(self.first(states[0]) + x[:, index])
            states[1] = torch.tanh(self.second(states[1]) + states[0])
        return self.head(states[0] + states[1])


class ScriptedHistory(nn.Module):
    """Each step reads the previous step's item of a list."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        history = [x[:, 0]]
        for index in range(1, x.shape[1]):
            history.append(torch.tanh(self.inner(history[-1]) * x[:, index]))
        return self.head(torch.cat(history, 0))


class ScriptedContext(nn.Module):
    """Each step reads all before it and appends itself: a tensor that grows from step to step."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        context = x[:, :1]
        for index in range(1, x.shape[1]):
            step = torch.tanh(self.inner(context.mean(1)) + x[:, index])
            context = torch.cat([context, step.unsqueeze(1)], 1)
        return self.head(context)


class ScriptedBranch(nn.Module):
    """One of two layers, whichever the data choose: a branch in the graph."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 3), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if bool(x.sum() > 0):
            return torch.tanh(y) * 2
        return y + self.second(torch.relu(x))


class TracedBranch(ScriptedBranch):
    """The same by ``torch.cond``, which the dynamo exporter writes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return torch.cond(
            x.sum() > 0, lambda x, y: torch.tanh(y) * 2, lambda x, y: y + self.second(torch.relu(x)), (x, y)
        )


class TracedScan(nn.Module):
    """A recurrence over the sequence by torch's ``scan``, which the dynamo exporter writes as Scan."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Parameter(0.5 * torch.randn(width, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.scan import scan

        def step(state: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(item + state @ self.inner)
            return new, new * 1.0

        _, states = scan(step, torch.zeros_like(x[:, 0]), x, dim=1)
        return self.head(states.mean(0) if states.shape[0] != x.shape[0] else states.mean(1))


def scripted(module: nn.Module) -> nn.Module:
    """The module compiled, so that the exporter keeps its control flow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)
