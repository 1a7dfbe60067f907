"""Small PyTorch models of images, sounds and volumes; importing this file imports torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNeXt(nn.Module):
    """A patch stem and two ConvNeXt blocks: depthwise 7x7, LayerNorm over channels, GELU, layer scale."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.expand = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.project = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(0.1 * torch.ones(width)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for i, depthwise in enumerate(self.depthwise):
            y = self.norms[i](depthwise(x).permute(0, 2, 3, 1))
            y = self.scales[i] * self.project[i](functional.gelu(self.expand[i](y)))
            x = x + y.permute(0, 3, 1, 2)
        return self.head(self.norm(x.mean((-2, -1))))


class MixedUNet(nn.Module):
    """A U-Net whose three ways up are a transposed convolution, a nearest and a bilinear Resize."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Conv2d(c, f, 3, padding=1) for c, f in ((1, 4), (4, 8), (8, 8), (8, 8)))
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        self.merges = nn.ModuleList(nn.Conv2d(c, f, 3, padding=1) for c, f in ((16, 8), (16, width), (8, 4)))
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        levels = [torch.relu(self.downs[0](image))]
        for i, pool in enumerate((functional.max_pool2d, functional.avg_pool2d, functional.max_pool2d)):
            levels.append(torch.relu(self.downs[i + 1](pool(levels[-1], 2))))
        x = torch.relu(self.merges[0](torch.cat([self.up(levels[3]), levels[2]], 1)))
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        x = torch.relu(self.merges[1](torch.cat([x, levels[1]], 1)))
        x = functional.interpolate(x, size=image.shape[-2:], mode="bilinear", align_corners=True)
        return self.head(torch.relu(self.merges[2](torch.cat([x, levels[0]], 1))))


class NormNet(nn.Module):
    """Convolutions with group or instance normalization between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            self._norm(kind),
            nn.ReLU(),
            nn.ReflectionPad2d(1),
            nn.Conv2d(8, 8, 3, stride=2),
            self._norm(kind),
            nn.SiLU(),
        )
        self.head = nn.Conv2d(8, 4, 1)

    @staticmethod
    def _norm(kind: str) -> nn.Module:
        return nn.GroupNorm(4, 8) if kind == "group" else nn.InstanceNorm2d(8, affine=True)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(image)).mean((2, 3))


class SqueezeExcite(nn.Module):
    """An inverted residual with squeeze-and-excitation; Hardswish and Hardsigmoid."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 2 * width, 1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.squeeze = nn.Conv2d(2 * width, 3, 1)
        self.excite = nn.Conv2d(3, 2 * width, 1)
        self.project = nn.Conv2d(2 * width, 3, 1)
        self.head = nn.Linear(3, 4)

    def forward(self, image: Tensor) -> Tensor:
        y = functional.hardswish(self.depthwise(functional.hardswish(self.expand(image))))
        weights = self.excite(torch.relu(self.squeeze(functional.adaptive_avg_pool2d(y, 1))))
        y = image + self.project(y * functional.hardsigmoid(weights))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(y, 1), 1))


class SuperResolution(nn.Module):
    """Sub-pixel convolution: PixelShuffle makes an image of twice the size."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2), nn.PReLU(width), nn.Conv2d(width, 4, 3, padding=1), nn.PixelShuffle(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image) + functional.interpolate(image, scale_factor=2.0, mode="bicubic")


class SeparableNet(nn.Module):
    """Depthwise separable convolutions with batch normalization (frozen statistics) and overlapping pooling."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False),
            nn.Conv2d(3, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU6(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(width, width, 3, stride=2, padding=1, groups=width, bias=False),
            nn.Conv2d(width, 2 * width, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU6(),
        )
        self.head = nn.Linear(2 * width, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(functional.adaptive_avg_pool2d(self.layers(image), 1).flatten(1))


class Mixer(nn.Module):
    """MLP-Mixer: fully connected layers over patches, then over channels, each behind LayerNorm."""

    def __init__(self, patches: int = 16, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(patches, 12), nn.GELU(), nn.Linear(12, patches))
        self.channels = nn.Sequential(nn.Linear(width, 12), nn.GELU(approximate="tanh"), nn.Linear(12, width))
        self.head = nn.Linear(width, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.head(x.mean(1))


class VolumeNet(nn.Module):
    """3-D convolutions with maximum and average pooling, and a 3-D transposed convolution beside them."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, width, 3, padding=1)
        self.second = nn.Conv3d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose3d(width, width, 2, stride=2)
        self.head = nn.Linear(2 * width, 4)

    def forward(self, volume: Tensor) -> Tensor:
        x = functional.max_pool3d(torch.relu(self.first(volume)), 2)
        y = functional.avg_pool3d(torch.relu(self.second(x)), 2)
        z = torch.tanh(self.up(x))
        return self.head(torch.cat([y.mean((2, 3, 4)), z.amax((2, 3, 4))], 1))


class SoundNet(nn.Module):
    """1-D convolutions with strides, pooling with ceil_mode, and transposed convolution back to the input."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, width, 5, stride=2, padding=2), nn.ELU(), nn.Conv1d(width, width, 3, padding=1, groups=2)
        )
        self.pool = nn.AvgPool1d(3, 2, 1, ceil_mode=False)
        self.decoder = nn.ConvTranspose1d(width, 1, 4, stride=4)

    def forward(self, sound: Tensor) -> Tensor:
        return self.decoder(self.pool(self.encoder(sound)))


class Decoder(nn.Module):
    """From a latent vector to an image by transposed convolutions (DCGAN's generator)."""

    def __init__(self, latent: int = 5, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(latent, width * 4)
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False),
        )
        self.width = width

    def forward(self, latent: Tensor) -> Tensor:
        return self.layers(self.first(latent).view(-1, self.width, 2, 2))


class SpatialTransformer(nn.Module):
    """A localization net predicts an affine map; affine_grid and grid_sample warp the image by it."""

    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1))
        self.theta = nn.Linear(3, 6)
        self.head = nn.Linear(64, 4)
        with torch.no_grad():
            self.theta.bias.copy_(torch.tensor([0.9, 0.1, 0.05, -0.1, 0.85, 0.02]))

    def forward(self, image: Tensor) -> Tensor:
        theta = self.theta(self.localization(image).flatten(1)).view(-1, 2, 3)
        grid = functional.affine_grid(theta, list(image.shape), align_corners=False)
        warped = functional.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return self.head(warped.flatten(1))


class VisionTransformer(nn.Module):
    """A class token and learned positions before ``torch.nn.MultiheadAttention`` blocks."""

    def __init__(self, width: int = 8, patches: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, patches + 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x)[:, 0])


class Discriminator(nn.Module):
    """DCGAN's discriminator: strided convolutions, LeakyReLU, Dropout that lets everything through."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.4),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout2d(0.4),
            nn.Flatten(),
            nn.Linear(8 * width, 1),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


class Capsules(nn.Module):
    """Capsules with two iterations of dynamic routing; einsum computes the predictions (Sabour et al. 2017)."""

    def __init__(self, capsules: int = 8, size: int = 4, classes: int = 3, out: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(6, capsules * size)
        self.weight = nn.Parameter(0.3 * torch.randn(capsules, classes, size, out))
        self.shape = (capsules, size)

    @staticmethod
    def _squashed(x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return x * square / (1 + square) / (square + 1e-7).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        primary = self._squashed(self.first(x).view(-1, *self.shape))
        predictions = torch.einsum("nis,icso->nico", primary, self.weight)
        logits = torch.zeros_like(predictions[..., 0])
        for _ in range(2):
            v = self._squashed(torch.einsum("nic,nico->nco", logits.softmax(-1), predictions))
            logits = logits + torch.einsum("nico,nco->nic", predictions, v)
        return v.norm(dim=-1)


class DensePyramid(nn.Module):
    """Dilated convolutions side by side with global pooling resized back (ASPP), concatenated as in DenseNet."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, padding_mode="circular")
        self.branches = nn.ModuleList(nn.Conv2d(width, width, 3, padding=d, dilation=d) for d in (1, 2, 3))
        self.context = nn.Conv2d(width, width, 1)
        self.head = nn.Conv2d(5 * width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.avg_pool2d(torch.relu(self.stem(image)), 3, 1, 1, count_include_pad=False)
        context = self.context(x.mean((2, 3), keepdim=True))
        context = functional.interpolate(context, size=x.shape[2:], mode="nearest")
        y = torch.cat([x, *(torch.relu(branch(x)) for branch in self.branches), context], 1)
        return functional.interpolate(self.head(y), size=image.shape[2:], mode="bilinear", align_corners=False)


class ShiftedWindows(nn.Module):
    """Attention in windows of a rolled image, with relative position biases from a table (Liu et al. 2021)."""

    def __init__(self, width: int = 8, window: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(0.2 * torch.randn((2 * window - 1) ** 2, 2))
        self.head = nn.Linear(width, 4)
        self.window = window
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = grid[:, :, None] - grid[:, None] + window - 1
        self.register_buffer("index", relative[0] * (2 * window - 1) + relative[1])

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).permute(0, 2, 3, 1).roll((-1, -1), (1, 2))
        n, h, w, c = x.shape
        size = self.window
        x = x.view(n, h // size, size, w // size, size, c).transpose(2, 3).reshape(-1, size * size, c)
        q, k, v = self.qkv(x).view(-1, size * size, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (c // 2) ** -0.5 + self.table[self.index].permute(2, 0, 1)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head((x + y).view(n, -1, c).mean(1))
