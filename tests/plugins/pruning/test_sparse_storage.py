"""A file with sparse initializers is edited as the same file with dense ones."""

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.training.examples import mlp

X = np.random.default_rng(0).normal(size=(32, 40)).astype(np.float32)
DATA = X, np.arange(32) % 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A pruned model in both storages; half of its hidden units are zero."""
    folder = tmp_path_factory.mktemp("stored")
    model = mlp((40, 16, 3))
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).copy()
        if tensor.name != "layer2.bias":
            array[(slice(None), slice(8)) if tensor.name == "layer2.weight" else slice(8)] = 0
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    result = onnxtrain.prune(
        model, DATA, loss="softmax_cross_entropy", method="magnitude", sparsity=0.8, epochs=0, fine_tune_epochs=0
    )
    paths = {storage: str(folder / f"{storage}.onnx") for storage in ("dense", "sparse")}
    for storage, path in paths.items():
        result.save(path, storage=storage)
    assert onnx.load(paths["sparse"]).graph.sparse_initializer
    return paths


def trained(path, **options):
    trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer="adam(lr=1e-3)", **options)
    trainer.fit(DATA, epochs=1, progress=False)
    return trainer.model()


EDITS = {
    "append": lambda path: onnxtrain.append(path, onnxtrain.layers.Linear(4)),
    "cut": lambda path: onnxtrain.cut(path, at="Relu_1"),
    "dynamic_batch": onnxtrain.dynamic_batch,
    "jacobian": onnxtrain.jacobian,
    "lora": lambda path: trained(path, lora=onnxtrain.Lora(rank=2)),
    "masks": lambda path: trained(path, masks="keep"),
    "prune": lambda path: onnxtrain.prune(
        path, DATA, loss="softmax_cross_entropy", structure="hidden", sparsity=0.2, epochs=1, fine_tune_epochs=1
    ).model(),
    "quantize": lambda path: onnxtrain.quantize(path, X),
    "shrink": onnxtrain.shrink,
}


@pytest.mark.filterwarnings("ignore::onnxtrain.plugins.structures.shrink.ShrinkWarning")  # pixels without a weight stay
@pytest.mark.parametrize("name", EDITS)
def test_the_storage_changes_no_result(files, name):
    found = []
    for path in files.values():
        session = onnxruntime.InferenceSession(
            EDITS[name](path).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        found.append(session.run(None, {session.get_inputs()[0].name: X}))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
