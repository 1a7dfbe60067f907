"""Small tokenizers, templates and models for tests of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
        "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "chatml with a default system message": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{{ message['content'] | trim }}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "headers": (  # as of Llama 3
        "{{ bos_token }}{% for message in messages %}{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + "
        "message['content'] | trim + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
    ),
    "turns": (  # as of Gemma: no system message, the assistant is called model
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<turn>' + role + '\n' + message['content'] | trim + '</turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
    ),
    "instructions": (  # as of Mistral: roles must alternate, and only answers end with a token
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
}
"""Templates in the manner of well-known ones."""

THINKING = (  # as of Qwen 3: the last answer has a thought, perhaps empty, and earlier ones have none
    "{%- set ns = namespace(question=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.question = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{- '<|im_start|>system\nTools:' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- set text = message.content if message.content is string else '' %}{%- set thought = '' %}"
    "{%- if message.reasoning_content is defined %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in text %}{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.question and (loop.last or thought) %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{- text }}"
    "{%- for call in message.tool_calls or [] %}{{- '\n<call>' + (call.function | tojson) + '</call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

ENDED = (  # as of Phi 3: the text ends with a token where no answer is asked for
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
"""Templates that render an answer in another way where messages follow it."""

GENERATION = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that marks its answers."""

SPECIAL = (
    *("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<turn>", "</turn>"),
    *(" [INST] ", " [/INST]"),
)

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}],
    [
        {"role": "user", "content": "Say hello in German."},
        {"role": "assistant", "content": "Guten Tag, schöne Grüße!"},
        {"role": "user", "content": "And a smile?"},
        {"role": "assistant", "content": "Sure: \U0001f600 \U0001f600"},
    ],
]


def tokenizer(folder: Path, template: Any = TEMPLATES["chatml"], **config: Any) -> Path:
    """Write the files of a byte-level tokenizer to a folder."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256 + 60,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([message["content"] for chat in CHATS for message in chat] * 5, trainer)
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(exist_ok=True, parents=True)
    words.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def language_model(path: Path, *, inputs: str = "input_ids, int64[N, T] attention_mask", vocabulary: int = 330) -> Path:
    """Write a model that reads one token and predicts the next; it ignores other inputs than tokens."""
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        f (int64[N, T] {inputs}) => (float[N, T, {vocabulary}] logits) {{
            e = Gather(words, input_ids)  m = MatMul(e, mix)  hidden = Tanh(m)  logits = MatMul(hidden, head) }}"""
    )
    rng = np.random.default_rng(0)
    model.graph.initializer.extend(
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32) / 2, name)
        for name, shape in {"words": (vocabulary, 16), "mix": (16, 16), "head": (16, vocabulary)}.items()
    )
    path.parent.mkdir(exist_ok=True, parents=True)
    onnx.save(model, path)
    return path


def decoder(seed: int = 0) -> onnx.ModelProto:
    """Return a language model whose weights have the names of a checkpoint of transformers."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        f (int64[N, T] input_ids) => (float[N, T, 7] logits) {
            x = Gather(words, input_ids)
            u = Transpose<perm = [1, 0]>(up)    h = MatMul(x, u)  a = Tanh(h)
            d = Transpose<perm = [1, 0]>(down)  z = MatMul(a, d)  y = Add(x, z)
            o = Transpose<perm = [1, 0]>(head)  logits = MatMul(y, o) }"""
    )
    rng = np.random.default_rng(seed)
    layer = "model.layers.0.mlp"
    weights = {"words": ("model.embed_tokens", (7, 4)), "up": (f"{layer}.up_proj", (5, 4))}
    weights |= {"down": (f"{layer}.down_proj", (4, 5)), "head": ("lm_head", (7, 4))}
    for node in model.graph.node:
        node.input[:] = [f"{weights[name][0]}.weight" if name in weights else name for name in node.input]
    model.graph.initializer.extend(
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), f"{name}.weight")
        for name, shape in weights.values()
    )
    return model


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
