"""Two outputs, as in object detection: class and position of the object in an image.

Each output has its loss, cross-entropy for the class and squared error for the position; the weighted sum is minimized.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

SIZE = 12


def pictures(count: int, seed: int) -> dict[str, np.ndarray]:
    """Squares and crosses [N, 1, 12, 12] in noise, their class [N], and the center of their position [N, 2], 0 to 1."""
    rng = np.random.default_rng(seed)
    image = rng.normal(0, 0.1, (count, 1, SIZE, SIZE)).astype(np.float32)
    label, corner = rng.integers(0, 2, count), rng.integers(0, SIZE - 4, (count, 2))
    for picture, kind, (top, left) in zip(image[:, 0], label, corner, strict=True):
        patch = picture[top : top + 5, left : left + 5]
        if kind == 0:
            patch[[0, -1]] = patch[:, [0, -1]] = 1
        else:
            patch[2] = patch[:, 2] = 1
    return {"image": image, "label": label, "place": ((corner + 2.5) / SIZE).astype(np.float32)}


def detector() -> onnx.ModelProto:
    """`image` to `logits` [N, 2] and `position` [N, 2]: one convolution, and a head for each."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        scale = np.sqrt(2 / np.prod(shape[1:]))
        return numpy_helper.from_array(rng.normal(0, scale, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["image", "conv.weight"], ["conv"], kernel_shape=[5, 5]),
        helper.make_node("Relu", ["conv"], ["relu"]),
        helper.make_node("Flatten", ["relu"], ["features"]),
        helper.make_node("Gemm", ["features", "class.weight", "class.bias"], ["logits"], transB=1),
        helper.make_node("Gemm", ["features", "place.weight", "place.bias"], ["position"], transB=1),
    ]
    weights = [
        weight("conv.weight", 8, 1, 5, 5),
        weight("class.weight", 2, 512),
        weight("place.weight", 2, 512),
        numpy_helper.from_array(np.zeros(2, np.float32), "class.bias"),
        numpy_helper.from_array(np.full(2, 0.5, np.float32), "place.bias"),
    ]
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, SIZE, SIZE])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("logits", "position")]
    graph = helper.make_graph(nodes, "detector", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def main(folder: Path) -> tuple[float, float]:
    """Train, write `detector.onnx`, and return accuracy and mean error of the position, in pixels, on new images."""
    data = pictures(1500, seed=0)
    targets = {"logits": data["label"], "position": data["place"]}
    trainer = onnxtrain.Trainer(
        detector(), loss={"logits": "cross_entropy", "position": "mse(weight=10)"}, optimizer="adam(lr=3e-3)"
    )
    trainer.fit(data["image"], targets, epochs=15, schedule="cosine", progress=False)
    trainer.save(folder / "detector.onnx")

    test = pictures(200, seed=1)
    found = onnxtrain.predict(folder / "detector.onnx", {"image": test["image"]})
    right = (found["logits"].argmax(axis=1) == test["label"]).mean()
    apart = np.abs(found["position"] - test["place"]).mean() * SIZE
    return float(right), float(apart)


if __name__ == "__main__":
    print("accuracy {:.2f}, places off by {:.2f} pixels".format(*main(Path.cwd())))
