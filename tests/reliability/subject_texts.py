"""Chats and texts with their tokenizer's settings and templates, damaged byte by byte or changed field by field."""

from __future__ import annotations

import copy
import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from reliability.mutation import damage
from reliability.subject_adapters import spoil_json
from reliability.subject_small import TOKENIZER
from reliability.worker import Operations

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b", "tool_calls": []}]},
    {"prompt": "a b", "completion": "b a"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}],
     "tools": [{"name": "f"}], "chat_template_kwargs": {"x": 1}},
    {"instruction": "a", "input": "b", "output": "a b"},
    {"text": "a b a b"},
]  # fmt: skip
GROUPS: dict[str, list[dict[str, Any]]] = {
    "pairs": [
        {"prompt": "a b", "chosen": "b", "rejected": "a a", "margin": 0.5},
        {"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}],
         "rejected": [{"role": "assistant", "content": "a"}], "tools": [{"name": "f"}]},
        {"chosen": "a b b", "rejected": "a b a"},
    ],
    "rewards": [{"chosen": "a b", "rejected": "a", "margin": 1}, {"prompt": "a", "chosen": "b", "rejected": "a b"}],
    "judged": [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "b", "completion": "a b", "label": 0}],
    "embeddings": [{"query": "a", "positive": "b", "negative": ["a b"]}, {"anchor": "b", "positive": "a"}],
    "ranking": [
        {"query": "a", "documents": ["a", "b"], "labels": [1, 0.5]},
        {"query": "a", "positive": "b", "negative": ["a", "b b"]},
    ],
}  # fmt: skip
BLOCKS = (
    "{% for m in messages %}{{ m.role ~ ':' ~ m.content }}{% endfor %}", "{{ bos_token }}", "{{ messages | tojson }}",
    "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}", "{{ tools[0].name }}",
    "{% if add_generation_prompt %}assistant:{% endif %}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}",
    "{% for i in range(3000) %}{{ i }}{% if i > 9 %}{% break %}{% endif %}{% endfor %}", "{{ messages[-1].x.y }}",
    "{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ 'a' * ns.n }}", "{{ ''.__class__ }}", "{% macro f() %}",
    "{{ (messages | map(attribute='role') | list)[5] }}", "\u03bb\U0001f600 ", "{{ 1 / 0 }}", "{%", "}}",
)  # fmt: skip
CONFIG: dict[str, Any] = {
    "bos_token": {"content": "<s>"}, "eos_token": "</s>", "model_max_length": 100, "chat_template": "",
}  # fmt: skip


class Subject:
    """A folder with a tokenizer and a file of rows, read as the data of a language model."""

    def __init__(self, shared: Path) -> None:
        warnings.simplefilter("ignore")
        self._shared = shared
        (shared / "tokenizer.json").write_text(json.dumps(TOKENIZER))

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Write the files and read them."""
        generator = random.Random(f"texts {seed} {index}")
        warnings.simplefilter("ignore")
        operations.run("texts", lambda: self._read(generator, case))

    def _read(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.data import TensorSpec, open_dataset
        from onnxtrain.plugins.text import ChatData, ComparisonData
        from onnxtrain.plugins.text.comparison_data import Comparisons

        os.link(self._shared / "tokenizer.json", case / "tokenizer.json")
        config = copy.deepcopy(CONFIG)
        template = "".join(
            generator.choices(BLOCKS, weights=(30, *[1] * (len(BLOCKS) - 1)), k=generator.randrange(1, 4))
        )
        config["chat_template"] = generator.choice((template, template, [{"name": "default", "template": template}]))
        self._write(case / "tokenizer_config.json", [config], generator)
        if generator.random() < 0.2:
            (case / "chat_template.jinja").write_bytes(damage(template.encode(), generator))
        if generator.random() < 0.2:
            self._write(case / "genai_config.json", [{"model": {"context_length": 50}}], generator)
        kind = generator.choice((None, None, *GROUPS))
        rows = generator.choices(ROWS if kind is None else GROUPS[kind], k=generator.randrange(1, 6))
        name = generator.choice(("d.jsonl", "d.jsonl", "d.jsonl", "d.txt", "d.csv"))
        if name == "d.csv":
            text = "prompt,completion\n" + "".join(f"{row.get('prompt', '')!s},a b\n" for row in rows)
            (case / name).write_bytes(damage(text.encode(), generator))
        else:
            self._write(case / name, rows, generator)
        if kind is not None:
            compared = Comparisons(
                ComparisonData(case / name, case, max_length=generator.choice((None, 2, 50))), kind, has_reference=False
            )
            groups = [TensorSpec("input_ids", np.dtype(np.int64), ("N", "k", "T"))]
            groups += [TensorSpec("labels", np.dtype(np.int64), ("N", "k", "T"))]
            for batch in open_dataset(compared, groups, need_target=False).batches(2, shuffle=True):
                assert batch.inputs["labels"].shape == batch.inputs["input_ids"].shape
            return
        data = ChatData(
            case / name,
            case,
            train_on=generator.choice(("answers", "all")),
            max_length=generator.choice((None, 2, 50)),
            pack=generator.choice((None, None, 8)),
        )
        specs = [TensorSpec("input_ids", np.dtype(np.int64), ("N", "T"))]
        specs += [TensorSpec("position_ids", np.dtype(np.int64), ("N", "T"))]
        for batch in open_dataset(data, specs).batches(2, shuffle=True):
            assert batch.targets is not None
            assert batch.targets.shape == batch.inputs["input_ids"].shape

    def _write(self, path: Path, documents: list[Any], generator: random.Random) -> None:
        """Write JSON lines, some of them spoiled."""
        found = copy.deepcopy(documents)
        for document in found:
            if generator.random() < 0.2:
                spoil_json(document, generator)
        data = "\n".join(json.dumps(document) for document in found).encode()
        path.write_bytes(damage(data, generator) if generator.random() < 0.15 else data)
