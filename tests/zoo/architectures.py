"""PyTorch modules that the tests and the benchmarks train; importing this file imports torch.

Each takes its sizes as arguments, so that a test can build a small one and a benchmark the full one.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Mlp(nn.Sequential):
    """Fully connected layers with an activation between them, and ``final`` after the last."""

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Callable[[], nn.Module],
        final: Callable[[], nn.Module] | None = None,
    ) -> None:
        layers: list[nn.Module] = []
        for position, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            if position:
                layers.append(activation())
            layers.append(nn.Linear(fan_in, fan_out))
        if final is not None:
            layers.append(final())
        super().__init__(*layers)


class LeNet5(nn.Module):
    """LeNet-5 for [N, 1, 28, 28] with ReLU and max pooling: 61,706 parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(image), 1))


class StridedConvNet(nn.Sequential):
    """Six convolutions, every second one with stride 2 instead of pooling, for [N, 3, 32, 32]."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for stage in range(3):
            filters = width << stage
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(filters, filters, 3, stride=2, padding=1), nn.ReLU()]
            channels = filters
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization around a shortcut (He et al. 2015)."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for 32x32 images; ``ResNet()`` is ResNet-18 with the 3x3 stem used on CIFAR."""

    def __init__(self, width: int = 64, blocks: Sequence[int] = (2, 2, 2, 2), classes: int = 10) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.stem = nn.Sequential(*stem)
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            filters = width << stage
            for position in range(count):
                stages.append(BasicBlock(channels, filters, 2 if stage and not position else 1))
                channels = filters
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.stages(self.stem(image))), 1))


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter by depthwise 3x3, project by linear 1x1 convolution (Sandler et al. 2018)."""

    def __init__(self, channels: int, filters: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, filters, 1, bias=False),
            nn.BatchNorm2d(filters),
        ]
        self.layers = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and channels == filters

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.has_shortcut else y


# (expansion, filters, blocks, stride of the first block), with the early strides of 32x32 images.
MOBILENET_V2_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """MobileNetV2 for 32x32 images (Sandler et al. 2018); ``width`` scales every number of filters."""

    def __init__(
        self,
        width: float = 1.0,
        stages: Sequence[tuple[int, int, int, int]] = MOBILENET_V2_STAGES,
        last: int = 1280,
        dropout: float = 0.0,
        classes: int = 10,
    ) -> None:
        super().__init__()
        channels = self._scaled(32, width)
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU6(),
        ]
        for expansion, filters, count, stride in stages:
            for position in range(count):
                scaled = self._scaled(filters, width)
                layers.append(InvertedResidual(channels, scaled, 1 if position else stride, expansion))
                channels = scaled
        layers += [nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6()]
        self.features = nn.Sequential(*layers)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.classifier = nn.Linear(last, classes)

    @staticmethod
    def _scaled(filters: int, width: float) -> int:
        return max(8, int(filters * width + 4) // 8 * 8)

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.features(image).mean((2, 3))))


class UNet(nn.Module):
    """A two-level U-Net (Ronneberger et al. 2015) that labels every pixel of [N, channels, H, W].

    ``upsampling`` is "transpose" (ConvTranspose), "nearest" or "bilinear" (Resize and a 1x1 convolution).
    """

    def __init__(self, upsampling: str, channels: int = 1, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down1 = self._double(channels, width)
        self.down2 = self._double(width, 2 * width)
        self.bottom = self._double(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = self._up(upsampling, 4 * width, 2 * width)
        self.merge2 = self._double(4 * width, 2 * width)
        self.up1 = self._up(upsampling, 2 * width, width)
        self.merge1 = self._double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(channels: int, filters: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, filters, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1),
            nn.ReLU(),
        )

    @staticmethod
    def _up(upsampling: str, channels: int, filters: int) -> nn.Module:
        if upsampling == "transpose":
            return nn.ConvTranspose2d(channels, filters, 2, stride=2)
        align = False if upsampling == "bilinear" else None
        resize = nn.Upsample(scale_factor=2, mode=upsampling, align_corners=align)
        return nn.Sequential(resize, nn.Conv2d(channels, filters, 1))

    def forward(self, image: Tensor) -> Tensor:
        level1 = self.down1(image)
        level2 = self.down2(self.pool(level1))
        y = self.bottom(self.pool(level2))
        y = self.merge2(torch.cat([self.up2(y), level2], 1))
        y = self.merge1(torch.cat([self.up1(y), level1], 1))
        return self.head(y)


def folded(module: nn.Module) -> nn.Module:
    """The module for inference with batch normalization merged into the convolution before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the import itself warns
        from torch.fx.experimental.optimization import fuse

    return fuse(module.eval()).requires_grad_()


class Logits(nn.Module):
    """A model of the transformers library as a function of tensors that returns its logits alone."""

    def __init__(self, model: nn.Module, argument_names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.argument_names = tuple(argument_names)

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        arguments = (first,) if second is None else (first, second)
        return self.model(**dict(zip(self.argument_names, arguments, strict=True))).logits


def distilbert(
    attention: str = "sdpa",
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 100,
    length: int = 32,
    classes: int = 3,
) -> nn.Module:
    """A DistilBERT sequence classifier of (token ids [N, S], attention mask [N, S]) with random weights."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        n_layers=layers,
        n_heads=heads,
        dim=width,
        hidden_dim=2 * width,
        num_labels=classes,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        attn_implementation=attention,
    )
    return Logits(DistilBertForSequenceClassification(config), ["input_ids", "attention_mask"])


def gpt2(
    attention: str = "sdpa",
    masked: bool = True,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 100,
    length: int = 32,
    tied: bool = True,
) -> nn.Module:
    """A GPT-2 language model of (token ids [N, S], attention mask [N, S]) with random weights.

    Its embedding is also its last layer where ``tied``. Without a mask (``masked=False``) the library looks for packed
    sequences in the positions, which only the dynamo exporter can write.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation=attention,
    )
    names = ["input_ids", "attention_mask"] if masked else ["input_ids"]
    return Logits(GPT2LMHeadModel(config), names)


def bert(layers: int = 4, width: int = 256, heads: int = 4, vocabulary: int = 30522, classes: int = 10) -> nn.Module:
    """A BERT sequence classifier of (token ids [N, S], attention mask [N, S]); the default is BERT-mini."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Logits(BertForSequenceClassification(config), ["input_ids", "attention_mask"])


def vit(
    attention: str = "sdpa",
    layers: int = 12,
    width: int = 192,
    heads: int = 3,
    image: int = 32,
    patch: int = 4,
    classes: int = 10,
) -> nn.Module:
    """A vision transformer of images [N, 3, image, image]; the default is ViT-tiny on 32x32 images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
        attn_implementation=attention,
    )
    return Logits(ViTForImageClassification(config), ["pixel_values"])


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 of images [N, 3, 224, 224] with random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return Logits(ResNetForImageClassification(ResNetConfig(num_labels=classes)), ["pixel_values"])


def llama(layers: int, width: int, inner: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    """A Llama language model of token ids [N, S] with random weights; its output layer has weights of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="eager",
    )
    return Logits(LlamaForCausalLM(config), ["input_ids", "attention_mask"])
