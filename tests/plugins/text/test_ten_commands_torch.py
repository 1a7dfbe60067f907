"""The ten commands of docs/language_models.md, on a Llama of random weights that is made on the spot."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain
from onnxtrain.plugins.text.samples import text_generator
from plugins.text.chats import CHATS, TEMPLATES, tokenizer, write_rows

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

pytestmark = [pytest.mark.torch, pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[3] / "docs" / "language_models.md"
SOURCE = Path(onnxtrain.__file__).parents[1]


def checkpoint(folder: Path) -> None:
    """Write a small Llama with a tokenizer and a chat template."""
    tokenizer(folder / "words")
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "words" / "tokenizer.json"),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
    )
    words.chat_template = TEMPLATES["chatml"]
    words.save_pretrained(folder)
    torch.manual_seed(0)
    special = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = transformers.LlamaConfig(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **special,
    )
    model = transformers.LlamaForCausalLM(config)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)


def blocks() -> tuple[list[str], str]:
    """Return the commands of the page, and ``ask.py``."""
    section = PAGE.read_text().partition("## Ten commands to an answer\n")[2].partition("\n## ")[0]
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (script,) = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    return commands.replace("\\\n", " ").strip().splitlines(), script


def test_the_commands_lead_to_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, script = blocks()
    assert len(commands) == 10
    checkpoint(tmp_path / "checkpoint")
    rows = [{"messages": chat} for chat in CHATS] * 8
    write_rows(tmp_path / "chat.jsonl", rows)
    write_rows(tmp_path / "held.jsonl", rows[:2])
    (tmp_path / "ask.py").write_text(script)
    shown = {}
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    for number, command in enumerate(commands, 1):
        words = shlex.split(command.replace("-m meta-llama/Llama-3.2-1B-Instruct", "-i checkpoint"))
        if words[0] == "pip":
            continue
        programs = {"onnxtrain": [sys.executable, "-m", "onnxtrain"], "python": [sys.executable]}
        words = [*programs.get(words[0], words[:1]), *words[1:]]
        run = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert run.returncode == 0, (command, run.stderr)
        shown[number] = run.stdout + run.stderr
    assert "self_attn.qkv_proj (q_proj, k_proj, v_proj)" in shown[3]
    before, after = (
        float(re.search(rf"{name} +([\d.]+)", text)[1])
        for name, text in (("perplexity", shown[4]), ("validation perplexity", shown[5]))
    )
    assert after < before
    assert re.findall(r"^step \d+: What is two and two\? -> ", shown[5], re.MULTILINE)
    assert "lora" in shown[6].lower()
    assert "layers.1.mlp.down_proj" in shown[9]
    assert shown[10].strip()
    lora = onnxtrain.Lora(adapter=tmp_path / "kept" / "best.onnx_adapter")
    trainer = onnxtrain.Trainer(tmp_path / "folder", loss="next_token", lora=lora)
    cached = text_generator(trainer)
    monkeypatch.setattr("onnxtrain.plugins.text.generation.cache_outputs", lambda graph: {})
    whole = text_generator(trainer)
    assert cached._model._caches
    assert not whole._model._caches
    for prompt in ("What is two and two?", "And a smile?"):
        assert cached.answer(prompt, 8) == whole.answer(prompt, 8)
