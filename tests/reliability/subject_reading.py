"""Files that are only read: many more mutants than trainings allow."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import onnx

from reliability.mutation import damage, mutate
from reliability.outcome import WrongError
from reliability.seeds import DATA_FILE, SEEDS, write_seed
from reliability.subject_checkpoints import spoil
from reliability.subject_data import Trap, make_data
from reliability.worker import Operations

NUMBERS = np.arange(12, dtype=np.float32).reshape(6, 2)


class Subject:
    """Models, arrays, archives and checkpoints: one mutant of one of them per case."""

    def __init__(self, shared: Path) -> None:
        from onnxtrain.training.checkpoints import CheckpointStore

        self._models = []
        for seed in SEEDS.values():
            write_seed(seed.build(), shared)
            self._models.append(onnx.load(shared / "model.onnx", load_external_data=False))
        self._external = (shared / DATA_FILE).read_bytes()
        folder = shared / "store"
        shutil.rmtree(folder, ignore_errors=True)
        for step in (3, 6):
            CheckpointStore(folder).save(step, {"w": NUMBERS, "T": np.array(step)}, {"epoch": 1, "losses": [0.5, 0.25]})
        self._checkpoints = {file.name: file.read_bytes() for file in folder.iterdir()}

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Write a mutant and read it."""
        generator = random.Random(f"reading {seed} {index}")
        warnings.simplefilter("ignore")
        kind = generator.choice((self._model, self._model, self._data, self._stored))
        operations.run(kind.__name__.strip("_"), lambda: kind(generator, case))

    def _model(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.model_file.file import ModelFile

        model = onnx.ModelProto()
        model.CopyFrom(generator.choice(self._models))
        (case / DATA_FILE).write_bytes(self._external)
        path = case / "model.onnx"
        damaged = generator.random() < 0.5
        path.write_bytes(damage(model.SerializeToString(), generator) if damaged else mutate(model, generator))
        ModelFile.load(path)

    def _data(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.data.files import read_arrays

        trap = case / "unpickled"
        with np.errstate(all="ignore"):
            for array in read_arrays(make_data(case, generator, Trap(trap))).values():
                np.array(array)
        if trap.exists():
            raise WrongError("code in a pickle was run")

    def _stored(self, generator: random.Random, case: Path) -> None:
        from onnxtrain.training.checkpoints import CheckpointStore

        for name, content in self._checkpoints.items():
            (case / name).write_bytes(content)
        spoil(case, generator)
        CheckpointStore(case).load_newest()
