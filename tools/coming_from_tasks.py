"""Code of forty tasks, here and in the shortest peer; `coming_from.py` counts the lines and writes them.

``HERE`` and ``PEERS`` precede every task: a model, data and other setup. A test runs the code of scikit-learn, PyTorch
and Keras if these are installed; code marked "not run" is from their manuals.
"""

from __future__ import annotations

from dataclasses import dataclass

HERE = """
import copy
from pathlib import Path
import numpy as np
import onnxtrain
from onnxtrain import Adam, AdamW, Group, RuntimeOptions, layer_decay
from onnxtrain.training.callbacks import CsvLogger, EarlyStopping
from onnxtrain.editing.layers import Activation, Linear

rng = np.random.default_rng(0)
x = rng.normal(size=(60, 4)).astype(np.float32)
y = x[:, :3].argmax(axis=1)
model = onnxtrain.examples.mlp((4, 16, 3))
loss = "cross_entropy"
trainer = onnxtrain.Trainer(model, loss=loss)
pictures = onnxtrain.Trainer(onnxtrain.examples.digits_cnn(), loss=loss)
"""

PEERS = {
    "PyTorch": """
import copy
import torch
from torch import nn
from torch.nn import functional as F

x = torch.randn(60, 4)
y = x[:, :3].argmax(dim=1)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
""",
    "Keras": """
import numpy as np
import keras

rng = np.random.default_rng(0)
x = rng.normal(size=(60, 4)).astype(np.float32)
y = x[:, :3].argmax(axis=1)
net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
net.compile("adam", loss, metrics=["accuracy"])
""",
    "scikit-learn": """
import numpy as np
from sklearn import metrics
from sklearn.neural_network import MLPClassifier

rng = np.random.default_rng(0)
x = rng.normal(size=(60, 4)).astype(np.float32)
y = x[:, :3].argmax(axis=1)
scores = rng.dirichlet(np.ones(3), 60)
""",
    "nobody": "",
}


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        title: The task.
        here: The lines with onnxtrain.
        peer: The peer with the fewest lines.
        there: Its lines; empty if no peer offers the task.
        runs: True if a test runs them.
    """

    title: str
    here: str
    peer: str
    there: str = ""
    runs: bool = True


TASKS = {
    "Train": [
        Task(
            "train ten epochs on arrays",
            'trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam")\ntrainer.fit(x, y, epochs=10)',
            "Keras",
            'net.compile("adam", loss)\nnet.fit(x, y, epochs=10)',
        ),
        Task(
            "hold out a fifth and measure accuracy",
            'trainer.fit(x, y, validation=0.2, metrics="accuracy")',
            "Keras",
            "net.fit(x, y, validation_split=0.2)",
        ),
        Task("one step", "value = trainer.train_step(x, y)", "Keras", "value = net.train_on_batch(x, y)"),
        Task(
            "your own training loop",
            "for start in range(0, 60, 20):\n    batch = slice(start, start + 20)\n    trainer.train_step(x[batch], y[batch])",
            "PyTorch",
            "for inputs, labels in loader:\n    optimizer.zero_grad()\n    loss(net(inputs), labels).backward()\n    optimizer.step()",
        ),
        Task(
            "warm-up, then a cosine",
            'trainer.fit(x, y, epochs=10, schedule="warmup(5)+cosine")',
            "Keras",
            "rate = keras.optimizers.schedules.CosineDecay(0.0, 20, warmup_target=1e-3, warmup_steps=5)\n"
            "net.compile(keras.optimizers.Adam(rate), loss)\nnet.fit(x, y, epochs=10)",
        ),
        Task(
            "early stopping that restores the best weights",
            "trainer.fit(x, y, validation=0.2, epochs=9, callbacks=[EarlyStopping(patience=3)])",
            "Keras",
            "net.fit(x, y, validation_split=0.2, epochs=9, callbacks=[keras.callbacks.EarlyStopping("
            "patience=3, restore_best_weights=True)])",
        ),
        Task(
            "AdamW without weight decay of biases and normalizations",
            'trainer = onnxtrain.Trainer(model, loss=loss, optimizer="adamw", groups=[Group("*.bias|*norm*", weight_decay=0.0)])',
            "Keras",
            "adamw = keras.optimizers.AdamW()\n"
            'adamw.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])\nnet.compile(adamw, loss)',
        ),
        Task(
            "layer-wise learning-rate decay",
            "trainer = onnxtrain.Trainer(model, loss=loss, groups=layer_decay(model, 0.8))",
            "PyTorch",
            "layers = list(net)[::-1]\n"
            'groups = [{"params": layer.parameters(), "lr": 1e-3 * 0.8**depth} for depth, layer in enumerate(layers)]\n'
            "optimizer = torch.optim.Adam(groups)",
        ),
        Task(
            "gradient clipping by norm",
            "trainer = onnxtrain.Trainer(model, loss=loss, clip_norm=1.0)",
            "Keras",
            "net.compile(keras.optimizers.Adam(global_clipnorm=1.0), loss)",
        ),
        Task(
            "gradient accumulation over four micro-batches",
            "trainer = onnxtrain.Trainer(model, loss=loss, accumulate=4)",
            "Keras",
            "net.compile(keras.optimizers.Adam(gradient_accumulation_steps=4), loss)",
        ),
        Task(
            "reproducible results from a seed",
            "trainer = onnxtrain.Trainer(model, loss=loss, seed=1)",
            "PyTorch",
            "torch.manual_seed(1)\ntorch.use_deterministic_algorithms(True)",
        ),
        Task(
            "batch normalization and dropout in training mode",
            'trainer = onnxtrain.Trainer(model, loss=loss, batch_norm="train", dropout=True)',
            "PyTorch",
            "net.train()",
        ),
        Task(
            "one thread",
            "trainer = onnxtrain.Trainer(model, loss=loss, runtime=RuntimeOptions(threads=1))",
            "PyTorch",
            "torch.set_num_threads(1)",
        ),
        Task(
            "activation checkpointing",
            'trainer = onnxtrain.Trainer(model, loss=loss, recompute=("*Relu*",))',
            "PyTorch",
            "from torch.utils.checkpoint import checkpoint_sequential\nlogits = checkpoint_sequential(net, 2, x, use_reentrant=False)",
        ),
    ],
    "Losses": [
        Task(
            "class weights",
            'trainer = onnxtrain.Trainer(model, loss="cross_entropy(class_weights=(1, 1, 2))")',
            "Keras",
            "net.fit(x, y, class_weight={0: 1, 1: 1, 2: 2})",
        ),
        Task(
            "label smoothing",
            'trainer = onnxtrain.Trainer(model, loss="cross_entropy(label_smoothing=0.1)")',
            "PyTorch",
            "loss = nn.CrossEntropyLoss(label_smoothing=0.1)",
        ),
        Task(
            "ignored labels",
            'trainer = onnxtrain.Trainer(model, loss="cross_entropy(ignore_index=0)")',
            "PyTorch",
            "loss = nn.CrossEntropyLoss(ignore_index=0)",
        ),
        Task(
            "sample weights",
            "trainer.fit(x, y, sample_weight=np.linspace(0, 1, 60))",
            "Keras",
            "net.fit(x, y, sample_weight=np.linspace(0, 1, 60))",
        ),
        Task(
            "a custom loss",
            "def log_cosh(op, prediction, target):\n    return op.ReduceMean(op.Log(op.Cosh(prediction - target)), keepdims=0)\n"
            "trainer = onnxtrain.Trainer(model, loss=log_cosh)",
            "PyTorch",
            "def log_cosh(prediction, target):\n    return torch.log(torch.cosh(prediction - target)).mean()",
        ),
        Task(
            "distillation from another model",
            'student = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="distillation(teacher=model.onnx)")\n'
            "student.fit(x, y)",
            "PyTorch",
            "student = nn.Linear(4, 3)\nwith torch.no_grad():\n    soft = F.softmax(net(x) / 2, dim=1)\n"
            "F.cross_entropy(student(x), soft).backward()",
        ),
    ],
    "Exported models": [
        Task(
            "train an `.onnx` file",
            'trainer = onnxtrain.Trainer("model.onnx", loss=loss)',
            "PyTorch",
            'import onnx2torch\nnet = onnx2torch.convert("model.onnx")',
            runs=False,
        ),
        Task("save the same file with new weights", 'trainer.save("tuned.onnx")', "nobody"),
        Task("list the trainable tensors, and why others are not", "found = onnxtrain.inspect(model)", "nobody"),
        Task(
            "a new head for other classes",
            "tuned = onnxtrain.replace_head(model, classes=5)",
            "PyTorch",
            "net[-1] = nn.Linear(16, 5)",
        ),
        Task(
            "train only the last layer",
            'trainer = onnxtrain.Trainer(model, loss=loss, train="layer2.*")',
            "PyTorch",
            "net.requires_grad_(False)\nnet[-1].requires_grad_(True)",
        ),
        Task(
            "extract a model's features",
            "body = onnxtrain.cut(model, at=model.graph.node[-1].input[0])",
            "PyTorch",
            "body = net[:-1]",
        ),
        Task(
            "append layers",
            'bigger = onnxtrain.append(model, Activation("Relu"), Linear(2))',
            "PyTorch",
            "bigger = nn.Sequential(net, nn.ReLU(), nn.Linear(3, 2))",
        ),
        Task(
            "tie weights that the file stores twice",
            "trainer = onnxtrain.Trainer(model, loss=loss, tie=True)",
            "PyTorch",
            "net[2].weight = net[0].weight",
        ),
        Task(
            "write the gradient as a model",
            'derivative = onnxtrain.gradient(onnxtrain.examples.mlp((4, 1)), xs=["input"])',
            "nobody",
        ),
    ],
    "Data": [
        Task(
            "a CSV file with text labels",
            'trainer.fit("data.csv", target="kind")',
            "Keras",
            'import pandas\ntable = pandas.read_csv("data.csv")\nlabels = table.pop("kind").astype("category").cat.codes\n'
            "net.fit(table, labels)",
            runs=False,
        ),
        Task(
            "a folder of images",
            'pictures.fit("pictures")',
            "Keras",
            'data = keras.utils.image_dataset_from_directory("pictures", image_size=(8, 8))\nnet.fit(data)',
            runs=False,
        ),
        Task(
            "a loader of batches",
            "trainer.fit([(x[:32], y[:32]), (x[32:], y[32:])])",
            "Keras",
            "net.fit(loader)",
            runs=False,
        ),
    ],
    "Measure": [
        Task(
            "accuracy, F1 and AUC",
            'found = trainer.evaluate((x, y), metrics=["accuracy", "f1", "auc"])',
            "scikit-learn",
            "answers = scores.argmax(axis=1)\naccuracy = metrics.accuracy_score(y, answers)\n"
            'f1 = metrics.f1_score(y, answers, average="macro")\nauc = metrics.roc_auc_score(y, scores, multi_class="ovr")',
        ),
        Task("predictions", "logits = trainer.predict(x)", "Keras", "logits = net.predict(x)"),
        Task(
            "a custom metric",
            "def unsure(y_true, y_pred):\n    return float(np.mean(np.ptp(y_pred, axis=1) < 1))\n"
            "found = trainer.evaluate((x, y), metrics=unsure)",
            "Keras",
            "def unsure(y_true, y_pred):\n    return keras.ops.mean(keras.ops.max(y_pred, axis=1) < 1)\n"
            "net.compile(loss=loss, metrics=[unsure])\nnet.evaluate(x, y)",
        ),
        Task(
            "log every epoch to a file",
            'trainer.fit(x, y, callbacks=[CsvLogger("rows.csv")])',
            "Keras",
            'net.fit(x, y, callbacks=[keras.callbacks.CSVLogger("rows.csv")])',
        ),
    ],
    "Keep": [
        Task(
            "resume a killed run",
            'trainer.fit(x, y, epochs=3, checkpoint="checkpoints", resume=True)',
            "Keras",
            'net.fit(x, y, epochs=3, callbacks=[keras.callbacks.BackupAndRestore("checkpoints")])',
            runs=False,
        ),
        Task(
            "all weights as one array, and back",
            "flat = trainer.get_weights(flat=True)\ntrainer.set_weights(flat)",
            "PyTorch",
            "flat = nn.utils.parameters_to_vector(net.parameters())\nnn.utils.vector_to_parameters(flat, net.parameters())",
        ),
        Task(
            "an independent copy of a trainer",
            "other = copy.deepcopy(trainer)",
            "PyTorch",
            "other = copy.deepcopy((net, optimizer))",
        ),
        Task(
            "prune to 90 % zeros",
            "result = onnxtrain.prune(model, (x, y), loss=loss, sparsity=0.9)",
            "PyTorch",
            "from torch.nn.utils import prune\nweights = [(net[0], 'weight'), (net[2], 'weight')]\n"
            "prune.global_unstructured(weights, prune.L1Unstructured, amount=0.9)\n"
            "for inputs, labels in loader:\n    optimizer.zero_grad()\n    loss(net(inputs), labels).backward()\n    optimizer.step()\n"
            "for layer, name in weights:\n    prune.remove(layer, name)",
        ),
    ],
}
