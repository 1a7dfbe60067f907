"""Untrusted small files, given to their readers, damaged byte by byte or changed field by field."""

from __future__ import annotations

import copy
import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from plugins.text.chats import decoder
from reliability.mutation import damage
from reliability.subject_adapters import spoil_json
from reliability.worker import Operations

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "a"},
    "added_tokens": [{"id": 3, "content": "[S]", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"},
                   {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "aa"}]},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|b)+"}, "behavior": "Isolated", "invert": False},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"},
}  # fmt: skip
NAMES = {"labels": ["a", "b"], "mean": [0.5], "std": [0.2], "resize": [12], "crop": [9, 8], "resample": "bicubic"}
PREPROCESSOR = {
    "do_resize": True, "size": {"shortest_edge": 10}, "resample": 3, "do_center_crop": True, "crop_size": 8,
    "crop_pct": 0.875, "do_rescale": True, "rescale_factor": 0.00392, "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "do_flip_channel_order": False,
}  # fmt: skip
CHECKPOINT: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4, "num_hidden_layers": 1,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": {"bits": 4},
}  # fmt: skip
RUN = {"rows": [{"loss": 1.0, "epoch": 1}], "facts": {"model": "m"}, "finished": True, "seconds": 1.5, "title": "t"}
TOML = 'model = "m.onnx"\nepochs = 5\ntrain = ["a.*"]\nlearning_rate = 0.5\nshuffle = true\n'
PIECES = ("[", "]", "{", "}", '"', "'", '"""', "\\", "\n", ".", "=", "a", "9" * 50, "0x" + "f" * 99, "1e999", "nan",
          "[[a]]\n", "\x00", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "2020-99-99")  # fmt: skip


class Subject:
    """One file a case."""

    def __init__(self, shared: Path) -> None:
        import onnx

        import onnxtrain

        warnings.simplefilter("ignore")
        self._shared = shared
        model = onnxtrain.examples.mlp((4, 5, 3))
        onnx.save(model, shared / "model.onnx")
        onnx.save(decoder(), shared / "decoder.onnx")
        self._training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer="sgd", recompute="*")

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Write a file and read it."""
        generator = random.Random(f"small {seed} {index}")
        warnings.simplefilter("ignore")
        kinds = (self._tokenizer, self._labels, self._labels, self._preprocessor, self._run, self._run, self._toml,
                 self._toml, self._weights, self._states, self._metadata, self._leftover,
                 self._checkpoint)  # fmt: skip
        kind = generator.choice(kinds)
        operations.run(kind.__name__.strip("_"), lambda: kind(generator, case))

    def _json(self, found: Any, generator: random.Random, path: Path) -> None:
        found = copy.deepcopy(found)
        spoil_json(found, generator)
        text = json.dumps(found).encode()
        path.write_bytes(damage(text, generator) if generator.random() < 0.3 else text)

    def _tokenizer(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.data.tokenizer import open_tokenizer

        self._json(TOKENIZER, generator, case / "tokenizer.json")
        open_tokenizer(case / "tokenizer.json").encode(["a b", "", "b" * 40, "zz \u03bb"])

    def _labels(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.data.data_names import read_names
        from onnxtrain.model_file.file import ModelFile

        os.link(self._shared / "model.onnx", case / "model.onnx")
        self._json(generator.choice((["a", "b", "c"], NAMES)), generator, case / "model.labels.json")
        read_names(ModelFile.load(case / "model.onnx"))

    def _preprocessor(self, generator: random.Random, case: Path) -> None:
        from PIL import Image

        from onnxtrain.data.conversion import TensorSpec
        from onnxtrain.data.data_names import read_preprocessor
        from onnxtrain.data.images import Layout, factors, pixels_of

        config = {**PREPROCESSOR, "image_processor_type": generator.choice(("ConvNext", "ViT", "CLIP", "Levit"))}
        if generator.random() < 0.5:
            config["size"] = {"height": 9, "width": 8}
        self._json(config, generator, case / "preprocessor_config.json")
        pixels, resizing = read_preprocessor(case)
        spec = TensorSpec("x", np.dtype(np.float32), ("N", 3, "H", "W"), pixels=pixels, resizing=resizing)
        layout = Layout.of(spec, "the data")
        found = pixels_of(Image.new("RGB", (12, 7)), layout)
        assert layout.size is None or found.shape == (*layout.size, 3)
        factors(pixels, layout)

    def _run(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.training.report.record import differences, read_runs

        self._json(RUN, generator, case / "run.json")
        (case / "config.toml").write_bytes(_toml(generator))
        runs = read_runs([case])
        differences(runs)
        for run in runs:
            assert run.best is not None

    def _toml(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.cli.configuration import _read

        (case / "f.toml").write_bytes(_toml(generator))
        _read(case / "f.toml")

    def _weights(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.cli.fit import _sample_weight

        name = generator.choice(("w.npy", "w.txt"))
        if name == "w.npy":
            np.save(case / name, np.ones(5, generator.choice(("f4", "f8", "i8", "U3"))))
        else:
            (case / name).write_text("\n".join(generator.choice(("1", "0.5", "nan", "a", "", "1 2")) for _ in range(5)))
        (case / name).write_bytes(damage((case / name).read_bytes(), generator))
        _sample_weight(str(case / name))

    def _states(self, generator: random.Random, case: Path) -> None:
        from safetensors.numpy import save_file

        from onnxtrain.plugins.step_graphs.import_states import import_states
        from reliability.subject_adapters import spoil_file

        save_file({"layer1.bias": np.ones(5, np.float32)}, case / "s.safetensors")
        spoil_file(case / "s.safetensors", generator)
        import_states(self._shared / "model.onnx", case / "s.safetensors", case / "o.onnx")

    def _checkpoint(self, generator: random.Random, case: Path) -> None:
        from safetensors.numpy import load_file, save_file

        from onnxtrain.plugins.text.hugging_face import save_checkpoint
        from reliability.subject_adapters import spoil_file

        config = {**CHECKPOINT, "model_type": generator.choice(("llama", "gpt2", "phi3", "gemma"))}
        source = case / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        (source / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        if generator.random() < 0.5:
            self._json(config, generator, source / "config.json")
        if generator.random() < 0.5:
            weights = {"model.norm.weight": np.ones(4, np.float32), "lm_head.weight": np.ones((7, 4), np.float32)}
            names = ("embed_tokens", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj")
            save_file(weights | {f"model.{name}.weight": np.ones(3) for name in names}, source / "model.safetensors")
            if generator.random() < 0.8:
                spoil_file(source / "model.safetensors", generator)
        save_checkpoint(self._shared / "decoder.onnx", case / "out", base_model=source)
        assert load_file(case / "out" / "model.safetensors").keys() >= {"lm_head.weight"}
        assert isinstance(json.loads((case / "out" / "config.json").read_text()), dict)

    def _metadata(self, generator: random.Random, case: Path) -> None:
        import onnx

        import onnxtrain

        training = onnx.ModelProto()
        training.CopyFrom(self._training)
        key = generator.choice(("straight_through", "recompute", "compute", "dropout_counters", "states", "step"))
        found: Any = copy.deepcopy([["T", "input"], ["*"], {"version": 1, "feeds": {}}][generator.randrange(3)])
        spoil_json(found, generator)
        text = json.dumps(found) if generator.random() < 0.7 else generator.choice(("[" * 100_000, "", "true", "{"))
        kept = [entry for entry in training.metadata_props if entry.key != f"onnxtrain.{key}"]
        del training.metadata_props[:]
        training.metadata_props.extend(kept)
        training.metadata_props.add(key=f"onnxtrain.{key}", value=text.encode("utf-8", "replace"))
        onnxtrain.lower(training)

    def _leftover(self, generator: random.Random, case: Path) -> None:
        """Put something in the path of a temporary file: the output is written, and nothing else is lost."""
        from onnxtrain.model_file.writing import AtomicFiles
        from reliability.outcome import WrongError

        folder, kept = case / "folder", case / "kept"
        folder.mkdir()
        kept.write_bytes(b"kept")
        (folder / "probe").mkdir()
        with AtomicFiles() as files, files.create(folder / "probe" / "out"):
            (temporary,) = (folder / "probe").iterdir()
        planted = folder / temporary.name
        match generator.randrange(5):
            case 0:
                planted.symlink_to(generator.choice(("../kept", "missing", planted.name)))
            case 1:
                planted.hardlink_to(kept)
            case 2:
                planted.mkdir()
            case 3:
                os.mkfifo(planted)
            case _:
                planted.write_bytes(generator.randbytes(generator.randrange(10)))
        with AtomicFiles() as files, files.create(folder / "out") as file:
            file.write(b"new")
        if (folder / "out").read_bytes() != b"new":
            raise WrongError("the output holds something else", "other content")
        if kept.read_bytes() != b"kept":
            raise WrongError("another file was written", "lost")


def _toml(generator: random.Random) -> bytes:
    text = TOML
    for _ in range(generator.randrange(4)):
        at = generator.randrange(len(text) + 1)
        text = text[:at] + generator.choice(PIECES) * generator.choice((1, 1, 2, 3000)) + text[at:]
    data = text.encode("utf-8", "surrogatepass")
    return damage(data, generator) if generator.random() < 0.3 else data
