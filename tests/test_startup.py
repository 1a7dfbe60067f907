"""What a process imports and builds until the end of its first step is what that step needs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import onnxtrain

FIRST_STEP = """
import sys
import numpy as np
import onnxtrain
trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam())
trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.arange(3))
print(*sys.modules)
"""

UNUSED = {
    "the rules of other operators": (
        "onnxtrain.autodiff.rules.",
        "branches einsum gated grid_sample loops microsoft normalization quantized recurrent resize roi",
    ),
    "documentation of optimizers": ("onnxtrain.operators.", "documentation"),
    "passes for other models and for graphs of other runtimes": (
        "onnxtrain.lowering.",
        "fit_webgpu fuse_recurrent keep_updates lower_optimizers split_recurrent_gradients write_activation_defaults",
    ),
    "other losses": ("onnxtrain.training.losses.", "contrastive_losses ctc_loss custom_loss dice_loss elementwise"),
    "data sets": ("onnxtrain.training.data.", "array_dataset csv_file hashing map_dataset opening pictures shares"),
    "what fit does": ("onnxtrain.training.", "callbacks checkpoints fitting inference loop run_folder"),
    "other things to do": (
        "onnxtrain.",
        "adapters.attached cli edit parallel.mpi pruning report runtime.cuda_updates training.advice.inspection "
        "training.import_states training.quantize",
    ),
    "the standard library for files and networks": (
        "",
        "argparse bz2 calendar concurrent.futures csv email http importlib.metadata ipaddress json.tool lzma "
        "shutil socket subprocess tarfile tempfile uuid zipfile",
    ),
    "formats that are not asked for": (
        "",
        "google.protobuf.internal.python_message google.protobuf.json_format google.protobuf.text_format "
        "onnx.compose onnx_ir.schemas packaging.version safetensors sympy",
    ),
}


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules of a process after the first step of a small classifier."""
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("family", UNUSED)
def test_a_first_step_imports_nothing_that_it_does_not_need(imported, family):
    prefix, names = UNUSED[family]
    assert not {prefix + name for name in names.split()} & imported


def test_a_first_step_imports_what_it_needs(imported):
    """The names above are compared with names like these."""
    assert {"onnxtrain.operators.adam", "onnxtrain.autodiff.rules.matmul", "onnxtrain.lowering.pipeline"} <= imported


def test_labels_for_rows_of_scores_build_nothing_again():
    """Which axis has the classes is clear before the first labels come."""
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
    steps = trainer._steps
    trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.arange(3))
    assert trainer._steps is steps
    trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.eye(3, dtype=np.float32))
    assert trainer._steps is not steps  # distributions make another loss
