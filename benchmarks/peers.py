"""The compared frameworks: each builds one training task and then runs steps.

A peer is built in a separate process (``worker.py``), so that its imports, threads and memory are its own. Work that
needs another framework (exporting the model, other peers' artifacts) is done earlier by ``prepare``, in a process that
is not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from models import LOSS, find_model

LEARNING_RATE = 1e-3
# The same in all peers. ONNX adds epsilon before the bias correction, PyTorch after it; a small one keeps the losses
# comparable for a few steps.
EPSILON = 1e-8


@dataclass(frozen=True)
class Task:
    """The training task of one worker.

    Attributes:
        peer: A key of ``PEERS``.
        model: A name known to ``find_model``.
        batch: Examples per step.
        threads: Threads of the peer's pool.
        folder: Folder of exported models and artifacts.
    """

    peer: str
    model: str
    batch: int
    threads: int
    folder: str

    def to_json(self) -> str:
        """Encode the task for a worker's command line."""
        return json.dumps(asdict(self))

    @property
    def model_path(self) -> Path:
        """Path of the exported model, exported at the first use."""
        return find_model(self.model).onnx(self.folder)

    @property
    def parameters_path(self) -> Path:
        """Path of the names of the trained initializers as JSON, for peers that need them."""
        return Path(self.folder) / f"{self.model}.parameters.json"


class Peer:
    """One framework at one task.

    Attributes:
        title: Its name in tables.
        interpreter: The Python that runs it: ``"own"`` for the benchmark's, else the name of an environment.
        rounds: Whether operands are rounded to bfloat16, so that losses differ more.
    """

    title: ClassVar[str]
    interpreter: ClassVar[str] = "own"
    rounds: ClassVar[bool] = False

    def __init__(self, task: Task) -> None:
        raise NotImplementedError

    @staticmethod
    def prepare(task: Task) -> None:
        """Write the peer's input files, in a process that is not measured."""

    def step(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> float:
        """Run one step: forward, backward, update; return the loss before it."""
        raise NotImplementedError


class OnnxTrain(Peer):
    """onnxtrain, with native kernels where available."""

    title = "onnxtrain"
    kernels: ClassVar[bool | None] = None
    precision: ClassVar[str | None] = None

    def __init__(self, task: Task) -> None:
        self.trainer = onnxtrain_trainer(task, kernels=self.kernels, precision=self.precision)

    @staticmethod
    def prepare(task: Task) -> None:  # noqa: D102
        # Exporting imports torch, which must not happen in the measured process.
        path = task.model_path
        if not task.parameters_path.exists():
            from onnxtrain import inspect

            names = [row.name for row in inspect(path).initializers if row.trainable]
            task.parameters_path.write_text(json.dumps(names))

    def step(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> float:  # noqa: D102
        return self.trainer.train_step(inputs, target)


class Earlier(OnnxTrain):
    """An earlier version of onnxtrain, in its own environment."""

    title = "earlier onnxtrain"
    interpreter = "earlier"


class OnnxTrainBfloat16(OnnxTrain):
    """onnxtrain with bfloat16 states."""

    title = "onnxtrain, states in bfloat16"
    precision = "states=bfloat16"


class OnnxTrain8Bit(OnnxTrain):
    """onnxtrain with 8-bit states."""

    title = "onnxtrain, states in 8 bits"
    precision = "states=8bit"


class OnnxTrainInBfloat16(OnnxTrain):
    """onnxtrain with operands of layers rounded to bfloat16."""

    title = "onnxtrain, bfloat16"
    precision = "bfloat16"
    rounds = True


class OnnxTrainBodies(OnnxTrain):
    """onnxtrain on standard operators only."""

    title = "onnxtrain without kernels"
    kernels = False


class Torch(Peer):
    """PyTorch eager with fused Adam."""

    title = "PyTorch"

    def __init__(self, task: Task) -> None:
        import torch

        torch.set_num_threads(task.threads)
        self.torch = torch
        self.model = find_model(task.model)
        module = self.model.module()
        self.module = self.compiled(module)
        self.optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, eps=EPSILON, fused=True)

    def compiled(self, module: Any) -> Any:
        """The callable of a step."""
        return module

    def step(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> float:  # noqa: D102
        from_numpy = self.torch.from_numpy
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.module(*(from_numpy(array) for array in inputs.values()))
        loss = self.model.torch_loss(logits, from_numpy(target))
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


class TorchCompile(Torch):
    """PyTorch with torch.compile and fused Adam."""

    title = "PyTorch, torch.compile"

    def compiled(self, module: Any) -> Any:  # noqa: D102
        return self.torch.compile(module)


class TorchAutocast(Torch):
    """PyTorch eager with fused Adam, under autocast to bfloat16."""

    title = "PyTorch, autocast"
    rounds = True

    def compiled(self, module: Any) -> Any:  # noqa: D102
        def computed(*inputs: Any) -> Any:
            with self.torch.autocast("cpu", self.torch.bfloat16):
                return module(*inputs).float()

        return computed


class OnnxRuntimeTraining(Peer):
    """onnxruntime-training-cpu 1.19.2 through its own API; AdamW without decay is Adam."""

    title = "onnxruntime-training 1.19.2"
    interpreter = "onnxruntime-training"

    def __init__(self, task: Task) -> None:
        import onnxruntime
        from onnxruntime.training import api

        folder = self.folder(task)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = task.threads
        state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        self.module = api.Module(str(folder / "training_model.onnx"), state, session_options=options)
        self.optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), self.module)
        self.optimizer.set_learning_rate(LEARNING_RATE)
        self.module.train()

    @staticmethod
    def folder(task: Task) -> Path:
        """Folder of the artifacts: gradient and optimizer graphs and initial weights."""
        return Path(task.folder) / f"{task.model}.onnxruntime-training"

    @staticmethod
    def prepare(task: Task) -> None:  # noqa: D102
        folder = OnnxRuntimeTraining.folder(task)
        if (folder / "optimizer_model.onnx").exists():
            return
        import onnx
        from onnxruntime.training import artifacts, onnxblock

        folder.mkdir(parents=True, exist_ok=True)
        model = onnx.load(task.model_path)
        for node in model.graph.node:
            if node.op_type == "LayerNormalization" and len(node.output) == 1:
                # Its gradient reads the mean and the inverse deviation, and does not add them itself.
                node.output.extend(f"{node.output[0]}_{name}" for name in ("mean", "inverse_deviation"))
        artifacts.generate_artifacts(
            model,
            requires_grad=json.loads(task.parameters_path.read_text()),
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=onnxblock.optim.AdamW(eps=EPSILON, weight_decay=0.0),
            artifact_directory=str(folder),
        )

    def step(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> float:  # noqa: D102
        loss = self.module(*inputs.values(), target)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(loss)


class OnnxSim(Peer):
    """The training loop of onnxsim 0.8.1: static shapes, opset 17, a scalar loss inside the model."""

    title = "onnxsim 0.8.1"
    interpreter = "onnxsim"

    def __init__(self, task: Task) -> None:
        import onnx
        import onnxsim

        self.classes = find_model(task.model).classes
        self.loop = onnxsim.compile_training_loop(
            onnx.load(self.path(task)),
            "loss",
            json.loads(task.parameters_path.read_text()),
            providers=[("CPUExecutionProvider", {})],
        )

    @staticmethod
    def path(task: Task) -> Path:
        """Path of the model with its loss, at this batch size."""
        return Path(task.folder) / f"{task.model}.onnxsim-{task.batch}.onnx"

    @staticmethod
    def prepare(task: Task) -> None:  # noqa: D102
        if not OnnxSim.path(task).exists():
            import onnx
            from onnxsim_model import with_loss

            parameters = json.loads(task.parameters_path.read_text())
            model = with_loss(onnx.load(task.model_path), task.batch, find_model(task.model).classes, parameters)
            onnx.save(model, OnnxSim.path(task))

    def step(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> float:  # noqa: D102
        one_hot = np.eye(self.classes, dtype=np.float32)[target]
        return float(self.loop({**inputs, "one_hot": one_hot}, lr=LEARNING_RATE))


PEERS: dict[str, type[Peer]] = {
    "onnxtrain": OnnxTrain,
    "onnxtrain-bfloat16": OnnxTrainBfloat16,
    "onnxtrain-8bit": OnnxTrain8Bit,
    "onnxtrain-in-bfloat16": OnnxTrainInBfloat16,
    "onnxtrain-bodies": OnnxTrainBodies,
    "earlier": Earlier,
    "torch": Torch,
    "torch-compile": TorchCompile,
    "torch-autocast": TorchAutocast,
    "onnxruntime-training": OnnxRuntimeTraining,
    "onnxsim": OnnxSim,
}


def onnxtrain_trainer(
    task: Task,
    *,
    kernels: bool | None = None,
    profile: str | None = None,
    precision: str | None = None,
    providers: Sequence[str] | None = None,
) -> Any:
    """The onnxtrain trainer for a task whose model is already exported."""
    import onnxtrain

    return onnxtrain.Trainer(
        task.model_path,
        loss=LOSS,
        optimizer=onnxtrain.Adam(LEARNING_RATE, epsilon=EPSILON),
        batch_norm="train",
        tie=True,  # exporters write an output layer that is the embedding as a tensor of its own
        untie=True,  # they merge equal running statistics
        **({} if precision is None else {"precision": precision}),
        runtime=onnxtrain.RuntimeOptions(
            threads=task.threads,
            kernels=kernels,
            profile=profile,
            **({} if providers is None else {"providers": providers}),
        ),
    )


def batches(task: Task, count: int = 4) -> Callable[[int], tuple[dict[str, np.ndarray], np.ndarray]]:
    """The batch of step i: a few seeded ones in rotation, the same for every peer."""
    made = [find_model(task.model).batch(task.batch, seed) for seed in range(count)]
    return lambda step: made[step % count]
