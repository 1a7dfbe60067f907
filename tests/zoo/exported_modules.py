"""Modules of ``torch.nn`` and small transformers of random weights.

Nothing here imports torch before a function is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo.exporting import Exported, module_class


def _nn(name: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda torch: getattr(torch.nn, name)(*arguments, **options)


def _after(*makers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Modules one after the other."""
    return lambda torch: torch.nn.Sequential(*(maker(torch) for maker in makers))


def _first(name: str, **options: Any) -> Callable[[Any], Any]:
    """A recurrent layer, whose sequence of outputs is the result."""
    return lambda torch: module_class(
        torch, lambda self, x: self.layer(x)[0], layer=getattr(torch.nn, name)(4, 5, **options)
    )


def _with_state(name: str, state: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A recurrent layer with learned initial states."""

    def forward(self: Any, x: Any) -> Any:
        start = self.h0.expand(-1, x.shape[0], -1).contiguous()
        given = (start, self.c0.expand(-1, x.shape[0], -1).contiguous()) if name == "LSTM" else start
        return self.layer(x, given)[0]

    def build(torch: Any) -> Any:
        parts = {"h0": torch.nn.Parameter(state(torch))}
        if name == "LSTM":
            parts["c0"] = torch.nn.Parameter(state(torch) + 1)
        return module_class(torch, forward, layer=getattr(torch.nn, name)(4, 5, batch_first=True), **parts)

    return build


def _cell(name: str, **options: Any) -> Callable[[Any], Any]:
    def forward(self: Any, x: Any) -> Any:
        state = None
        for step in range(3):
            state = self.cell(x[:, step], state)
        return state[0] if isinstance(state, tuple) else state

    return lambda torch: module_class(torch, forward, cell=getattr(torch.nn, name)(4, 5, **options))


def _scalar(forward: Callable[..., Any], value: Any, name: str = "p") -> Callable[[Any], Any]:
    """A linear layer, and behind it something with a parameter of this value."""

    def build(torch: Any) -> Any:
        parameter = torch.nn.Parameter(torch.as_tensor(value, dtype=torch.float32))
        return module_class(
            torch,
            lambda self, x: forward(torch, self.linear(x), getattr(self, name)),
            linear=torch.nn.Linear(6, 6),
            **{name: parameter},
        )

    return build


def _vision_tokens(torch: Any) -> Any:
    def forward(self: Any, x: Any) -> Any:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1) + self.pos_embed
        return self.norm(tokens)[:, 0]

    return module_class(
        torch,
        forward,
        patches=torch.nn.Conv2d(3, 8, 4, 4),
        cls_token=torch.nn.Parameter(torch.zeros(1, 1, 8)),
        pos_embed=torch.nn.Parameter(torch.randn(1, 5, 8) * 0.02),
        norm=torch.nn.LayerNorm(8),
    )


def _normalized_input(torch: Any) -> Any:
    net = module_class(
        torch, lambda self, x: self.conv((x - self.mean) / self.std).mean((2, 3)), conv=torch.nn.Conv2d(3, 4, 3)
    )
    net.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
    net.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
    return net


def _rotary(rows: int) -> Callable[[Any], Any]:
    def build(torch: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            q = self.q(x)
            first, second = q.chunk(2, -1)
            length = x.shape[1]
            turned = q * self.cos[:length] + torch.cat([-second, first], -1) * self.sin[:length]
            scores = torch.softmax(turned @ turned.transpose(1, 2) + self.causal[:length, :length], -1)
            return self.o(scores @ q)

        net = module_class(torch, forward, q=torch.nn.Linear(6, 8), o=torch.nn.Linear(8, 2))
        angles = torch.outer(torch.arange(float(rows)), 10000.0 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2)
        net.register_buffer("cos", angles.cos())
        net.register_buffer("sin", angles.sin())
        net.register_buffer("causal", torch.triu(torch.full((rows, rows), float("-inf")), 1))
        return net

    return build


def _rms(torch: Any) -> Any:
    def forward(self: Any, x: Any) -> Any:
        h = self.linear(x)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))

    return module_class(torch, forward, linear=torch.nn.Linear(6, 6), weight=torch.nn.Parameter(torch.ones(6)))


def _transformer(name: str, method: str = "", **options: Any) -> Callable[[Any], Any]:
    """A model of transformers; its first output."""

    def build(torch: Any) -> Any:
        import transformers

        kind = getattr(transformers, name)
        config = kind.config_class(**options)
        config._attn_implementation = "eager"
        model = kind(config).eval()

        def forward(self: Any, *inputs: Any) -> Any:
            call = getattr(self.model, method) if method else self.model
            return call(*inputs)[0]

        return module_class(torch, forward, model=model)

    return build


IMAGE, SEQUENCE, VOLUME = ((2, 4, 8, 8),), ((2, 5, 4),), ((2, 4, 4, 4, 4),)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {"vocab_size": 30}
LINEAR = _nn("Linear", 6, 6)
CONVOLUTION = _nn("Conv2d", 4, 8, 3)
TOKENS = {"shapes": ((2, 6),), "ids": 30}
PICTURES = {"shapes": ((2, 3, 16, 16),)}
DYNAMO = ("dynamo",)

MODULES: dict[str, Exported] = {
    # Linear
    "linear": Exported(LINEAR),
    "linear without bias": Exported(_nn("Linear", 6, 3, bias=False)),
    "linear of sequences": Exported(_nn("Linear", 4, 3), SEQUENCE),
    "linear of one output": Exported(_nn("Linear", 6, 1)),
    "bilinear": Exported(_nn("Bilinear", 6, 4, 3), ((2, 6), (2, 4)), exporters=DYNAMO),
    "two linear": Exported(_after(LINEAR, _nn("Tanh"), _nn("Linear", 6, 2))),
    # Convolutions
    "conv1d": Exported(_nn("Conv1d", 5, 3, 3), SEQUENCE),
    "conv2d": Exported(CONVOLUTION, IMAGE),
    "conv2d without bias": Exported(_nn("Conv2d", 4, 8, 3, bias=False), IMAGE),
    "conv2d in groups": Exported(_nn("Conv2d", 4, 8, 3, groups=4), IMAGE),
    "conv2d of reflections": Exported(_nn("Conv2d", 4, 2, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv3d": Exported(_nn("Conv3d", 4, 2, 3), VOLUME),
    "transposed conv1d": Exported(_nn("ConvTranspose1d", 5, 3, 3), SEQUENCE),
    "transposed conv2d": Exported(_nn("ConvTranspose2d", 4, 3, 3, stride=2), IMAGE),
    "transposed conv3d": Exported(_nn("ConvTranspose3d", 4, 2, 2), VOLUME),
    # Normalizations
    "batch norm 1d": Exported(_after(LINEAR, _nn("BatchNorm1d", 6))),
    "batch norm 2d": Exported(_nn("BatchNorm2d", 4), IMAGE),
    "conv and batch norm": Exported(_after(CONVOLUTION, _nn("BatchNorm2d", 8)), IMAGE),
    "batch norm without affine": Exported(_after(_nn("Tanh"), _nn("BatchNorm2d", 4, affine=False), CONVOLUTION), IMAGE),
    "batch norm 3d": Exported(_nn("BatchNorm3d", 4), VOLUME),
    "group norm": Exported(_nn("GroupNorm", 2, 4), IMAGE),
    "conv and group norm": Exported(_after(CONVOLUTION, _nn("GroupNorm", 4, 8), _nn("ReLU")), IMAGE),
    "two group norms": Exported(_after(_nn("GroupNorm", 2, 4), _nn("Conv2d", 4, 4, 1), _nn("GroupNorm", 2, 4)), IMAGE),
    "group norm without affine": Exported(_after(CONVOLUTION, _nn("GroupNorm", 4, 8, affine=False)), IMAGE),
    "instance norm": Exported(_after(CONVOLUTION, _nn("InstanceNorm2d", 8, affine=True)), IMAGE),
    "instance norm without affine": Exported(_after(CONVOLUTION, _nn("InstanceNorm2d", 8)), IMAGE),
    "instance norm 1d": Exported(_after(_nn("Conv1d", 5, 3, 3), _nn("InstanceNorm1d", 3)), SEQUENCE),
    "instance norm 3d": Exported(_after(_nn("Conv3d", 4, 2, 2), _nn("InstanceNorm3d", 2)), VOLUME),
    "layer norm": Exported(_after(LINEAR, _nn("LayerNorm", 6))),
    "layer norm without bias": Exported(_after(LINEAR, _nn("LayerNorm", 6, bias=False))),
    "layer norm without affine": Exported(_after(LINEAR, _nn("LayerNorm", 6, elementwise_affine=False))),
    "layer norm of images": Exported(_nn("LayerNorm", [4, 8, 8]), IMAGE),
    "rms norm": Exported(_after(LINEAR, _nn("RMSNorm", 6)), exporters=DYNAMO, free=DYNAMO),
    "rms norm without affine": Exported(
        _after(LINEAR, _nn("RMSNorm", 6, elementwise_affine=False)), exporters=DYNAMO, free=DYNAMO
    ),
    "rms norm by hand": Exported(_rms),
    "local response norm": Exported(_after(CONVOLUTION, _nn("LocalResponseNorm", 2)), IMAGE),
    # Recurrent layers
    "lstm": Exported(_first("LSTM", batch_first=True), SEQUENCE),
    "lstm of two layers": Exported(_first("LSTM", batch_first=True, num_layers=2), SEQUENCE),
    "lstm of both directions": Exported(_first("LSTM", batch_first=True, bidirectional=True), SEQUENCE),
    "lstm without bias": Exported(_first("LSTM", batch_first=True, bias=False), SEQUENCE),
    "lstm with projection": Exported(_first("LSTM", batch_first=True, proj_size=3), SEQUENCE, exporters=DYNAMO),
    "gru": Exported(_first("GRU", batch_first=True), SEQUENCE),
    "gru of two layers": Exported(_first("GRU", batch_first=True, num_layers=2), SEQUENCE),
    "gru of both directions": Exported(_first("GRU", batch_first=True, bidirectional=True), SEQUENCE),
    "rnn": Exported(_first("RNN", batch_first=True), SEQUENCE),
    "rnn of relu": Exported(_first("RNN", batch_first=True, nonlinearity="relu"), SEQUENCE),
    "lstm cell": Exported(_cell("LSTMCell"), SEQUENCE),
    "gru cell": Exported(_cell("GRUCell"), SEQUENCE),
    "rnn cell": Exported(_cell("RNNCell"), SEQUENCE),
    "lstm with learned states": Exported(_with_state("LSTM", lambda torch: torch.zeros(1, 1, 5)), SEQUENCE),
    "gru with learned state": Exported(_with_state("GRU", lambda torch: torch.randn(1, 1, 5)), SEQUENCE),
    "rnn with learned state": Exported(_with_state("RNN", lambda torch: torch.randn(1, 1, 5)), SEQUENCE),
    # Embeddings
    "embedding": Exported(_nn("Embedding", 30, 6), **TOKENS),
    "embedding with padding": Exported(_nn("Embedding", 30, 6, padding_idx=0), **TOKENS),
    "embedding and linear": Exported(_after(_nn("Embedding", 30, 6), LINEAR), **TOKENS),
    "embedding bag": Exported(_nn("EmbeddingBag", 30, 6, mode="sum"), **TOKENS, free=()),
    # Attention and transformers of torch.nn
    "attention": Exported(
        lambda torch: module_class(
            torch,
            lambda self, x: self.layer(x, x, x)[0],
            layer=torch.nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        SEQUENCE,
    ),
    "encoder layer": Exported(_nn("TransformerEncoderLayer", 4, 2, 8, batch_first=True), SEQUENCE, exporters=DYNAMO),
    "encoder layer, norm first": Exported(
        _nn("TransformerEncoderLayer", 4, 2, 8, batch_first=True, norm_first=True, activation="gelu"),
        SEQUENCE,
        exporters=DYNAMO,
    ),
    "decoder layer": Exported(
        _nn("TransformerDecoderLayer", 4, 2, 8, batch_first=True), ((2, 5, 4), (2, 3, 4)), exporters=DYNAMO
    ),
    "transformer": Exported(
        _nn("Transformer", 4, 2, 1, 1, 8, batch_first=True), ((2, 5, 4), (2, 3, 4)), exporters=DYNAMO
    ),
    # Activations
    "prelu": Exported(_after(LINEAR, _nn("PReLU"))),
    "prelu by channel": Exported(_after(CONVOLUTION, _nn("PReLU", 8)), IMAGE),
    "gelu": Exported(_after(LINEAR, _nn("GELU"))),
    "gelu of tanh": Exported(_after(LINEAR, _nn("GELU", approximate="tanh"))),
    **{
        name.lower(): Exported(_after(LINEAR, _nn(name), _nn("Linear", 6, 2)))
        for name in (
            "CELU",
            "ELU",
            "Hardshrink",
            "Hardsigmoid",
            "Hardswish",
            "Hardtanh",
            "LeakyReLU",
            "LogSigmoid",
            "Mish",
            "ReLU",
            "ReLU6",
            "SELU",
            "SiLU",
            "Sigmoid",
            "Softplus",
            "Softshrink",
            "Softsign",
            "Tanhshrink",
        )
    },
    "threshold": Exported(_after(LINEAR, _nn("Threshold", 0.1, 20.0)), exporters=DYNAMO),
    "glu": Exported(_after(_nn("Linear", 6, 8), _nn("GLU"))),
    "softmax": Exported(_after(LINEAR, _nn("Softmax", dim=-1))),
    "log softmax": Exported(_after(LINEAR, _nn("LogSoftmax", dim=-1))),
    # Others
    "adaptive pool": Exported(
        _after(CONVOLUTION, _nn("AdaptiveAvgPool2d", 1), _nn("Flatten"), _nn("Linear", 8, 2)), IMAGE
    ),
    "power pool": Exported(_after(CONVOLUTION, _nn("LPPool2d", 2, 2)), IMAGE),
    "average pool": Exported(_after(CONVOLUTION, _nn("AvgPool2d", 2)), IMAGE),
    "upsample": Exported(_after(CONVOLUTION, _nn("Upsample", scale_factor=2, mode="bilinear")), IMAGE),
    "pixel shuffle": Exported(_after(CONVOLUTION, _nn("PixelShuffle", 2)), IMAGE),
    "padding": Exported(_after(_nn("ConstantPad2d", 1, 0.3), CONVOLUTION), IMAGE),
    "cosine similarity": Exported(
        lambda torch: module_class(
            torch,
            lambda self, x, z: torch.nn.functional.cosine_similarity(self.linear(x), self.linear(z)),
            linear=torch.nn.Linear(6, 6),
        ),
        ((2, 6), (2, 6)),
    ),
    "weight norm": Exported(lambda torch: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6))),
    # Scalars and tokens
    "logit scale": Exported(_scalar(lambda torch, x, p: x * p.exp(), 2.6592, "logit_scale")),
    "temperature": Exported(_scalar(lambda torch, x, p: x / p, 1.0, "temperature")),
    "layer scale": Exported(_scalar(lambda torch, x, p: x + p * x.tanh(), [1e-5] * 6, "gamma")),
    "gate at zero": Exported(_scalar(lambda torch, x, p: x + p * x.tanh(), 0.0, "resweight")),
    "power": Exported(_scalar(lambda torch, x, p: x.abs().clamp(min=1e-6).pow(p).mean(1), 3.0, "p")),
    "added scalar": Exported(_scalar(lambda torch, x, p: x + p, [0.0], "bias")),
    "fixed scalars": Exported(
        _after(LINEAR, lambda torch: module_class(torch, lambda self, x: (x * 0.3337 + 1.5) ** 2 / 8**0.5), LINEAR)
    ),
    "class token and positions": Exported(_vision_tokens, ((2, 3, 8, 8),)),
    "normalized images": Exported(_normalized_input, ((2, 3, 8, 8),)),
    "rotary of many positions": Exported(_rotary(16), ((2, 5, 6),)),
    "rotary of few positions": Exported(_rotary(5), ((2, 5, 6),)),
    # transformers
    "BERT": Exported(
        _transformer("BertForSequenceClassification", **SMALL, **WORDS, max_position_embeddings=16), **TOKENS
    ),
    "DistilBERT": Exported(
        _transformer(
            "DistilBertForSequenceClassification",
            **WORDS,
            dim=16,
            hidden_dim=32,
            n_layers=2,
            n_heads=2,
            max_position_embeddings=16,
        ),
        **TOKENS,
    ),
    "RoBERTa": Exported(
        _transformer("RobertaForSequenceClassification", **SMALL, **WORDS, max_position_embeddings=16), **TOKENS
    ),
    "ELECTRA": Exported(
        _transformer(
            "ElectraForSequenceClassification", **SMALL, **WORDS, embedding_size=8, max_position_embeddings=16
        ),
        **TOKENS,
    ),
    "ALBERT": Exported(
        _transformer("AlbertForSequenceClassification", **SMALL, **WORDS, embedding_size=8, max_position_embeddings=16),
        **TOKENS,
    ),
    "GPT-2": Exported(
        _transformer("GPT2LMHeadModel", **WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, use_cache=False),
        **TOKENS,
        exporters=DYNAMO,
    ),
    "GPT-NeoX": Exported(
        _transformer("GPTNeoXForCausalLM", **SMALL, **WORDS, max_position_embeddings=16, use_cache=False),
        **TOKENS,
        exporters=DYNAMO,
    ),
    "OPT": Exported(
        _transformer(
            "OPTForCausalLM",
            **WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=16,
            word_embed_proj_dim=16,
            use_cache=False,
        ),
        **TOKENS,
    ),
    "Llama": Exported(
        _transformer("LlamaForCausalLM", **SMALL, **WORDS, max_position_embeddings=16, use_cache=False),
        **TOKENS,
        exporters=DYNAMO,
    ),
    "Qwen2": Exported(
        _transformer("Qwen2ForCausalLM", **SMALL, **WORDS, num_key_value_heads=1, use_cache=False),
        **TOKENS,
        exporters=DYNAMO,
    ),
    "Gemma": Exported(
        _transformer("GemmaForCausalLM", **SMALL, **WORDS, num_key_value_heads=1, head_dim=8, use_cache=False),
        **TOKENS,
        exporters=DYNAMO,
    ),
    "T5 encoder": Exported(
        _transformer("T5EncoderModel", **WORDS, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2), **TOKENS
    ),
    "ViT": Exported(_transformer("ViTForImageClassification", **SMALL, image_size=16, patch_size=8), **PICTURES),
    "DeiT": Exported(_transformer("DeiTForImageClassification", **SMALL, image_size=16, patch_size=8), **PICTURES),
    "ResNet": Exported(
        _transformer(
            "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        ),
        ((2, 3, 32, 32),),
    ),
    "ConvNeXt": Exported(
        _transformer("ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        ((2, 3, 32, 32),),
    ),
    "MobileNetV2": Exported(
        _transformer("MobileNetV2ForImageClassification", depth_multiplier=0.25, image_size=32), ((2, 3, 32, 32),)
    ),
    "SegFormer": Exported(
        _transformer(
            "SegformerForImageClassification",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_encoder_blocks=2,
            num_attention_heads=[1, 2],
            sr_ratios=[2, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
        ),
        ((2, 3, 32, 32),),
    ),
    "Wav2Vec2": Exported(
        _transformer(
            "Wav2Vec2ForSequenceClassification",
            **SMALL,
            **WORDS,
            conv_dim=(8, 8),
            conv_kernel=(4, 2),
            conv_stride=(2, 2),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_feat_extract_layers=2,
        ),
        ((2, 200),),
    ),
    "CLIP vision": Exported(_transformer("CLIPVisionModel", **SMALL, image_size=16, patch_size=8), **PICTURES),
    "Swin": Exported(
        _transformer(
            "SwinForImageClassification",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
        **PICTURES,
    ),
    "BEiT": Exported(
        _transformer(
            "BeitForImageClassification",
            **SMALL,
            image_size=16,
            patch_size=8,
            use_relative_position_bias=True,
            use_mask_token=False,
        ),
        **PICTURES,
    ),
    "DINOv2": Exported(
        _transformer(
            "Dinov2ForImageClassification",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            mlp_ratio=2,
            image_size=16,
            patch_size=8,
        ),
        **PICTURES,
    ),
    "ConvNeXt V2": Exported(
        _transformer("ConvNextV2ForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        ((2, 3, 32, 32),),
    ),
    "PoolFormer": Exported(
        _transformer(
            "PoolFormerForImageClassification",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_encoder_blocks=2,
            patch_sizes=[7, 3],
            strides=[4, 2],
            padding=[2, 1],
        ),
        ((2, 3, 32, 32),),
    ),
    "BLOOM": Exported(
        _transformer("BloomForCausalLM", **WORDS, hidden_size=16, n_layer=2, n_head=2, use_cache=False), **TOKENS
    ),
    "MPNet": Exported(
        _transformer("MPNetForSequenceClassification", **SMALL, **WORDS, max_position_embeddings=16), **TOKENS
    ),
    "RoFormer": Exported(
        _transformer("RoFormerForSequenceClassification", **SMALL, **WORDS, max_position_embeddings=16), **TOKENS
    ),
    "ESM": Exported(
        _transformer(
            "EsmForSequenceClassification",
            **SMALL,
            **WORDS,
            max_position_embeddings=16,
            pad_token_id=1,
            position_embedding_type="rotary",
        ),
        **TOKENS,
    ),
    "Mamba": Exported(
        _transformer("MambaForCausalLM", **WORDS, hidden_size=16, num_hidden_layers=1, state_size=4, use_cache=False),
        **TOKENS,
    ),
    "Hubert": Exported(
        _transformer(
            "HubertForSequenceClassification",
            **SMALL,
            **WORDS,
            conv_dim=(8, 8),
            conv_kernel=(4, 2),
            conv_stride=(2, 2),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_feat_extract_layers=2,
        ),
        ((2, 200),),
    ),
    "Mixer by hand": Exported(
        lambda torch: module_class(
            torch,
            lambda self, x: self.mix(x.transpose(1, 2)).transpose(1, 2) * self.scale[None, None] + x,
            mix=torch.nn.Linear(5, 5),
            scale=torch.nn.Parameter(torch.ones(4)),
        ),
        SEQUENCE,
    ),
    "queries": Exported(
        lambda torch: module_class(
            torch,
            lambda self, x: self.attend(self.queries.expand(x.shape[0], -1, -1), x, x)[0],
            queries=torch.nn.Parameter(torch.randn(1, 3, 4)),
            attend=torch.nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        SEQUENCE,
    ),
    "CLIP": Exported(lambda torch: _clip(torch), ((2, 6), (2, 3, 16, 16)), ids=30, free=()),
    "literals of an inner module": Exported(_after(LINEAR, lambda torch: _literals(torch))),
    "names that mislead": Exported(lambda torch: _misleading(torch), exporters=DYNAMO),
    "parameters that meet the input": Exported(lambda torch: _memberships(torch), exporters=DYNAMO),
}


def _memberships(torch: Any) -> Any:
    """Gaussian memberships of a scaled and shifted input, by names of preprocessing, and a table of sinusoids."""
    random = lambda *shape: torch.nn.Parameter(torch.rand(*shape) + 0.5)  # noqa: E731
    angles = torch.arange(24.0)[:, None] * 10000.0 ** (-torch.arange(0, 4) / 4)
    parts = {"gain": random(6), "offset": random(6), "mean": random(6, 4), "std": random(6, 4)}

    def forward(self: Any, x: Any) -> Any:
        members = torch.exp(-((((x * self.gain + self.offset)[:, :, None] - self.mean) / self.std) ** 2))
        return (members.prod(1) @ self.table.T).sum(-1, keepdim=True)

    return module_class(torch, forward, **parts, table=torch.nn.Parameter(angles.sin()))


def _misleading(torch: Any) -> Any:
    """Parameters that are called like buffers, and buffers that are called like parameters."""

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(6, 6)
            self.eps = torch.nn.Parameter(torch.tensor(0.5))
            self.scale_factor = torch.nn.Parameter(torch.tensor(2.0))
            self.alibi_slopes = torch.nn.Parameter(torch.rand(6))
            self.mask = torch.nn.Parameter(torch.rand(6))
            self.register_buffer("weight", torch.rand(6))
            self.register_buffer("gamma", torch.tensor(0.73))
            self.register_buffer("proj", torch.rand(6, 6))

        def forward(self, x: Any) -> Any:
            y = (self.fc(x) * self.eps + self.alibi_slopes) * self.scale_factor
            return (y * self.weight * self.gamma * self.mask) @ self.proj

    return torch.nn.Sequential(torch.nn.Linear(6, 6), Inner())


def _literals(torch: Any) -> Any:
    """A module whose code has tensors, besides a scale and a shift that are parameters."""

    def forward(self: Any, x: Any) -> Any:
        y = self.fc(x) * self.scale * torch.tensor(0.3337) + torch.tensor([1.5, 2.5, 3.5, 4.5, 5.5, 6.5])
        y = y * torch.hann_window(6) + torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]] * 3).sum(0) + self.shift
        return y * torch.full((6,), 0.26) + torch.linspace(0.0, 1.3, 6)

    scale, shift = torch.nn.Parameter(torch.tensor(0.7)), torch.nn.Parameter(torch.rand(6))
    return module_class(torch, forward, fc=torch.nn.Linear(6, 6), scale=scale, shift=shift)


def _clip(torch: Any) -> Any:
    import transformers

    text = {**SMALL, **WORDS, "max_position_embeddings": 6, "eos_token_id": 2}
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    config._attn_implementation = "eager"
    model = transformers.CLIPModel(config)

    def forward(self: Any, words: Any, pixels: Any) -> Any:
        return self.model(input_ids=words, pixel_values=pixels).logits_per_image

    return module_class(torch, forward, model=model)
