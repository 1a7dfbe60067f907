"""Small PyTorch models of tables, graphs, sets and densities; importing this file imports torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class VariationalAutoencoder(nn.Module):
    """Returns its loss: reconstruction (binary cross-entropy) and Kullback-Leibler divergence; noise is an input."""

    def __init__(self, features: int = 8, latent: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 10), nn.Softplus())
        self.mean, self.log_variance = nn.Linear(10, latent), nn.Linear(10, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 10), nn.ELU(), nn.Linear(10, features))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        y = self.encoder(x)
        mean, log_variance = self.mean(y), self.log_variance(y)
        logits = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        reconstruction = functional.softplus(logits) - torch.sigmoid(x) * logits
        divergence = mean.square() + log_variance.exp() - 1 - log_variance
        return (reconstruction.sum(-1) + 0.5 * divergence.sum(-1)).mean()


class MatrixFactorization(nn.Module):
    """A rating is the dot product of a user's and an item's vector, plus a bias of each."""

    def __init__(self, users: int = 12, items: int = 9, width: int = 4) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.register_buffer("mean", torch.tensor(0.3))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = (self.user(user) * self.item(item)).sum(-1)
        return product + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1) + self.mean


class GraphConvolution(nn.Module):
    """Two rounds of messages along edges; ``sum_by`` says how they are added up at their targets."""

    def __init__(self, sum_by: str, features: int = 4, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, 3)
        self.self_first, self.self_second = nn.Linear(features, width), nn.Linear(width, 3)
        self.sum_by = sum_by

    def _sums(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = x[source]
        zeros = torch.zeros_like(x)
        if self.sum_by == "index_add":
            return zeros.index_add(0, target, messages)
        index = target.unsqueeze(-1).expand_as(messages)
        if self.sum_by == "scatter_add":
            return zeros.scatter_add(0, index, messages)
        return zeros.scatter_reduce(0, index, messages, self.sum_by, include_self=True)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.self_first(x) + self._sums(self.first(x), source, target))
        return self.self_second(x) + self._sums(self.second(x), source, target)


class MixtureOfExperts(nn.Module):
    """The two experts with the largest gates of four, chosen by TopK for each example."""

    def __init__(self, features: int = 6, width: int = 5, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(features, experts)
        self.weight = nn.Parameter(0.5 * torch.randn(experts, features, width))
        self.bias = nn.Parameter(0.1 * torch.randn(experts, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, indices = self.gate(x).topk(2, dim=-1)
        all_experts = torch.relu(torch.einsum("nf,efw->new", x, self.weight) + self.bias)
        chosen = all_experts.gather(1, indices.unsqueeze(-1).expand(-1, -1, all_experts.shape[-1]))
        return self.head((chosen * values.softmax(-1).unsqueeze(-1)).sum(1))


class Siamese(nn.Module):
    """One net for two inputs; returns the contrastive loss of their cosine similarity."""

    def __init__(self, features: int = 6, width: int = 5) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, width))

    def forward(self, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
        similarity = functional.cosine_similarity(self.net(first), self.net(second), dim=-1)
        return torch.where(same > 0, 1 - similarity, torch.relu(similarity + 0.2)).mean()


class Highway(nn.Module):
    """Layers whose gate mixes their result with their input."""

    def __init__(self, width: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for transform, gate in zip(self.transforms, self.gates, strict=True):
            t = torch.sigmoid(gate(x) - 1)
            x = t * torch.relu(transform(x)) + (1 - t) * x
        return self.head(x)


class NeuralOde(nn.Module):
    """Three Runge-Kutta steps through one field: every parameter is used twelve times."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for _ in range(3):
            k1 = self.field(x)
            k2 = self.field(x + h / 2 * k1)
            k3 = self.field(x + h / 2 * k2)
            k4 = self.field(x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x


class PointNet(nn.Module):
    """A function of a set of points: shared layers, and the largest value of each feature."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, width, 1), nn.ReLU(), nn.Conv1d(width, width, 1))
        self.head = nn.Sequential(nn.Linear(2 * width, 6), nn.Mish(), nn.Linear(6, 3))

    def forward(self, points: Tensor) -> Tensor:
        y = self.local(points.transpose(1, 2))
        return self.head(torch.cat([y.max(-1).values, y.std(-1)], -1))


class FactorizationMachine(nn.Module):
    """Sums of embeddings of a bag of features, their pairwise products, and a small parallel net (DeepFM)."""

    def __init__(self, vocabulary: int = 15, width: int = 4) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(vocabulary, 1), nn.Embedding(vocabulary, width)
        self.deep = nn.Sequential(nn.Linear(width, 6), nn.LeakyReLU(0.1), nn.Linear(6, 1))

    def forward(self, features: Tensor) -> Tensor:
        v = self.factors(features)
        total = v.sum(1)
        pairs = 0.5 * (total.square() - v.square().sum(1)).sum(-1, keepdim=True)
        return self.linear(features).sum(1) + pairs + self.deep(total)


class BagOfWords(nn.Module):
    """``torch.nn.EmbeddingBag`` and a linear layer."""

    def __init__(self, mode: str, vocabulary: int = 20, width: int = 6) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, width, mode=mode)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


class Coupling(nn.Module):
    """Affine coupling layers (RealNVP); returns the mean negative log-likelihood."""

    def __init__(self, features: int = 6, layers: int = 3) -> None:
        super().__init__()
        half = features // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 8), nn.Tanh(), nn.Linear(8, 2 * half)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, 0])
        for net in self.nets:
            first, second = x.chunk(2, -1)
            scale, shift = net(first).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat([second * torch.exp(scale) + shift, first], -1).flip(-1)
            total = total + scale.sum(-1)
        return (0.5 * x.square().sum(-1) + 0.5 * x.shape[-1] * math.log(2 * math.pi) - total).mean()


class MixtureDensity(nn.Module):
    """A mixture of normal distributions given x; returns the mean negative log-likelihood of y."""

    def __init__(self, features: int = 4, components: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 3 * components))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, mean, raw = self.net(x).chunk(3, -1)
        deviation = functional.softplus(raw) + 0.1
        z = (y - mean) / deviation
        terms = weight.log_softmax(-1) - 0.5 * z.square() - deviation.log()
        return -torch.logsumexp(terms, -1).mean()


class SineNet(nn.Module):
    """Sines of Fourier features of coordinates (implicit representation)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(2, width))
        self.layers = nn.ModuleList([nn.Linear(2 * width, width), nn.Linear(width, 1)])

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.frequencies
        y = torch.cat([angles.sin(), angles.cos()], -1)
        return self.layers[1](torch.sin(3 * self.layers[0](y)))


class RadialBasis(nn.Module):
    """Gaussians of the distances to learned centers."""

    def __init__(self, features: int = 4, centers: int = 7) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(centers, features))
        self.log_width = nn.Parameter(torch.zeros(centers))
        self.head = nn.Linear(centers, 2)

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.cdist(x, self.centers)
        return self.head(torch.exp(-distance.square() * torch.exp(self.log_width)))


class WordVectors(nn.Module):
    """Skip-gram with negative samples; returns the loss."""

    def __init__(self, vocabulary: int = 20, width: int = 5) -> None:
        super().__init__()
        self.words, self.contexts = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)

    def forward(self, word: Tensor, context: Tensor, negatives: Tensor) -> Tensor:
        w = self.words(word)
        positive = functional.logsigmoid((w * self.contexts(context)).sum(-1))
        negative = functional.logsigmoid(-torch.bmm(self.contexts(negatives), w.unsqueeze(-1)).squeeze(-1))
        return -(positive + negative.sum(-1)).mean()


class Perceiver(nn.Module):
    """Learned latent vectors attend to a set of any size, which may have other features than they."""

    def __init__(self, features: int = 3, width: int = 8, latents: int = 4) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.attention = nn.MultiheadAttention(width, 2, kdim=features, vdim=features, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(latents * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.latents.expand(x.shape[0], -1, -1)
        y, weights = self.attention(queries, x, x)
        return self.head((self.norm(queries + y) * (1 + weights.amax(-1, keepdim=True))).flatten(1))


class TwoHeads(nn.Module):
    """Two outputs, one without a loss; a layer that nothing reads; one weight used in both directions."""

    def __init__(self, features: int = 6, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(features, width)
        self.back = nn.Parameter(0.1 * torch.randn(features))
        self.first, self.second = nn.Linear(features, 3), nn.Linear(width, 2)
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.body(x))
        return self.first(torch.tanh(y @ self.body.weight + self.back)), self.second(y)
