"""The training half of ONNX: train, fine-tune and prune ONNX models on stock ONNX Runtime.

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.start import catch_early_interrupt

catch_early_interrupt()

from onnxtrain.lazy import lazy_names, public_names  # noqa: E402 - Ctrl-C may come meanwhile
from onnxtrain.version import __version__ as __version__  # noqa: E402

if TYPE_CHECKING:
    from onnxtrain import adapters as adapters
    from onnxtrain import backend, errors, examples, kernels, operators, parallel, pruning, testing
    from onnxtrain import callbacks as callbacks
    from onnxtrain import data as data
    from onnxtrain import layers as layers
    from onnxtrain import losses as losses
    from onnxtrain import metrics as metrics
    from onnxtrain import schedules as schedules
    from onnxtrain.adapters.lora import Lora
    from onnxtrain.autodiff import no_gradient, register_gradient, unregister_gradient
    from onnxtrain.edit.append import append
    from onnxtrain.edit.cut import cut
    from onnxtrain.edit.free_batch import free_batch
    from onnxtrain.edit.head import replace_head
    from onnxtrain.lowering.lower import lower
    from onnxtrain.operators import LAMB, SGD, SSGD, Adagrad, Adam, AdamW, Lion, Momentum, RMSprop
    from onnxtrain.operators.sparsity import Sparsity
    from onnxtrain.pruning.prune import prune
    from onnxtrain.runtime.native import custom_ops_library
    from onnxtrain.runtime.options import RuntimeOptions
    from onnxtrain.runtime.session import TrainingSession
    from onnxtrain.training.advice.inspection import inspect
    from onnxtrain.training.gradient import gradient
    from onnxtrain.training.inference.forward import evaluate, predict
    from onnxtrain.training.quantize import quantize
    from onnxtrain.training.trainer import Trainer
    from onnxtrain.training.training_model import training_model
    from onnxtrain.training.weights.ema import EMA
    from onnxtrain.training.weights.groups import Group
    from onnxtrain.training.weights.layer_decay import layer_decay

_HOMES = {
    "Adagrad": "onnxtrain.operators",
    "Adam": "onnxtrain.operators",
    "AdamW": "onnxtrain.operators",
    "EMA": "onnxtrain.training.weights.ema",
    "Group": "onnxtrain.training.weights.groups",
    "Momentum": "onnxtrain.operators",
    "LAMB": "onnxtrain.operators",
    "Lion": "onnxtrain.operators",
    "Lora": "onnxtrain.adapters.lora",
    "RMSprop": "onnxtrain.operators",
    "SGD": "onnxtrain.operators",
    "SSGD": "onnxtrain.operators",
    "RuntimeOptions": "onnxtrain.runtime.options",
    "Sparsity": "onnxtrain.operators.sparsity",
    "Trainer": "onnxtrain.training.trainer",
    "TrainingSession": "onnxtrain.runtime.session",
    "append": "onnxtrain.edit.append",
    "custom_ops_library": "onnxtrain.runtime.native",
    "cut": "onnxtrain.edit.cut",
    "evaluate": "onnxtrain.training.inference.forward",
    "free_batch": "onnxtrain.edit.free_batch",
    "gradient": "onnxtrain.training.gradient",
    "inspect": "onnxtrain.training.advice.inspection",
    "layer_decay": "onnxtrain.training.weights.layer_decay",
    "lower": "onnxtrain.lowering.lower",
    "no_gradient": "onnxtrain.autodiff",
    "predict": "onnxtrain.training.inference.forward",
    "prune": "onnxtrain.pruning.prune",
    "register_gradient": "onnxtrain.autodiff",
    "quantize": "onnxtrain.training.quantize",
    "replace_head": "onnxtrain.edit.head",
    "training_model": "onnxtrain.training.training_model",
    "unregister_gradient": "onnxtrain.autodiff",
}
_MODULES = frozenset(
    {
        "adapters",
        "backend",
        "callbacks",
        "data",
        "errors",
        "examples",
        "flower",
        "kernels",
        "layers",
        "losses",
        "metrics",
    }
    | {"operators", "parallel", "pruning", "ray", "schedules", "sklearn", "testing"}
)

__all__ = [
    "EMA",
    "LAMB",
    "SGD",
    "SSGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "Lora",
    "Momentum",
    "RMSprop",
    "RuntimeOptions",
    "Sparsity",
    "Trainer",
    "TrainingSession",
    "adapters",
    "append",
    "backend",
    "callbacks",
    "custom_ops_library",
    "cut",
    "data",
    "errors",
    "evaluate",
    "examples",
    "free_batch",
    "gradient",
    "inspect",
    "kernels",
    "layer_decay",
    "layers",
    "losses",
    "lower",
    "metrics",
    "no_gradient",
    "operators",
    "parallel",
    "predict",
    "prune",
    "pruning",
    "quantize",
    "register_gradient",
    "replace_head",
    "schedules",
    "testing",
    "training_model",
    "unregister_gradient",
]


__getattr__ = lazy_names(__name__, _HOMES | {name: f"onnxtrain.{name}" for name in _MODULES})
__dir__ = public_names(__name__)
