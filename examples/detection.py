"""Object detection: a YOLO-like and a DETR-like detector learn to find coloured shapes, and draw their boxes.

Both models end as exported detectors do: the first in a decoder behind its raw head, the second in logits and boxes
of a few slots. `detection.png` shows the boxes in new images before and after training. Needs `onnxtrain[images]`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

SIZE, REG_MAX, SLOTS, WIDTH = 64, 8, 9, 48
CLASSES = ("disc", "square", "triangle")


def shapes_in_noise(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 3, 64, 64] and their boxes [N, 3, 5]: one to three shapes of random colours in noise."""
    random = np.random.default_rng(seed)
    images = random.normal(0.2, 0.02, (count, 3, SIZE, SIZE)).astype(np.float32)
    boxes = np.full((count, 3, 5), -1, np.float32)
    y, x = np.mgrid[:SIZE, :SIZE] + 0.5
    for image, rows in zip(images, boxes, strict=True):
        free = np.ones((SIZE, SIZE), bool)
        for row in range(random.integers(1, 4)):
            kind, size = random.integers(len(CLASSES)), random.integers(14, 30)
            left, top = random.integers(0, SIZE - size, 2)
            if not free[top : top + size, left : left + size].all():
                continue
            free[top : top + size, left : left + size] = False
            right, down = (x - left) / size, (y - top) / size  # 0 to 1 in the box
            shapes = (
                (right - 0.5) ** 2 + (down - 0.5) ** 2 < 0.25,
                (abs(right - 0.5) < 0.5) & (abs(down - 0.5) < 0.5),
                (abs(right - 0.5) < down / 2) & (down < 1),
            )
            image[:, shapes[kind]] += random.uniform(0.3, 0.8, (3, 1)).astype(np.float32)
            rows[row] = kind, *((np.array([left, top]) + size / 2) / SIZE), size / SIZE, size / SIZE
    return images, boxes


class Network:
    """Nodes and weights of a model in the making."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, array: np.ndarray) -> str:
        """Add a weight."""
        name = f"weight{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def normal(self, *shape: int, scale: float) -> str:
        """Add a random weight."""
        return self.weight(self.random.normal(0, scale, shape).astype(np.float32))

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        """Add a node and return its output."""
        name = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def convolved(self, x: str, width: int, channels: int, stride: int = 1) -> str:
        """Add a 3 x 3 convolution and Relu."""
        kernel, bias = self.normal(channels, width, 3, 3, scale=(2 / 9 / width) ** 0.5), np.zeros(channels, np.float32)
        return self.add("Relu", self.add("Conv", x, kernel, self.weight(bias), strides=[stride] * 2, pads=[1, 1, 1, 1]))

    def linear(self, x: str, width: int, columns: int, scale: float = 1.0, bias: np.ndarray | None = None) -> str:
        """Add a linear layer."""
        bias = np.zeros(columns, np.float32) if bias is None else bias.astype(np.float32)
        product = self.add("MatMul", x, self.normal(width, columns, scale=scale * width**-0.5))
        return self.add("Add", product, self.weight(bias))

    def backbone(self) -> str:
        """Add four convolutions to [N, 48, 8, 8]."""
        x = self.convolved("image", 3, 16, 2)
        x = self.convolved(x, 16, 32, 2)
        x = self.convolved(x, 32, WIDTH, 2)
        return self.convolved(x, WIDTH, WIDTH)

    def model(self, outputs: dict[str, tuple[str, list[int]]]) -> onnx.ModelProto:
        """Return the model; ``outputs`` are values and shapes by name."""
        nodes = [*self.nodes, *(helper.make_node("Identity", [value], [name]) for name, (value, _) in outputs.items())]
        images = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, SIZE, SIZE])
        shown = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", *shape]) for n, (_, shape) in outputs.items()
        ]
        graph = helper.make_graph(nodes, "detector", [images], shown, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def ints(network: Network, *numbers: int) -> str:
    """Add a constant of integers."""
    return network.add("Constant", value_ints=list(numbers))


def yolo_like() -> onnx.ModelProto:
    """Return a detector with grids of 8 x 8 and 4 x 4 cells, and a decoder to [N, 4 + 3, 80]: boxes and scores."""
    net, flat, cells = Network(0), [], []
    fine = net.backbone()
    for level, grid in ((fine, 8), (net.convolved(fine, WIDTH, WIDTH, 2), 4)):
        bias = np.repeat(np.float32([0, -3]), [4 * REG_MAX, len(CLASSES)])  # shapes are rare
        kernel = net.normal(len(bias), WIDTH, 1, 1, scale=WIDTH**-0.5)
        head = net.add("Conv", level, kernel, net.weight(bias))
        flat.append(net.add("Reshape", head, ints(net, 0, 0, -1)))
        centre = (np.arange(grid) + 0.5) / grid
        x, y = (axis.ravel() for axis in np.meshgrid(centre, centre))
        cells.append(np.stack([x, y, np.full(grid**2, 1 / grid)]))
    x, y, cell = np.concatenate(cells, 1).astype(np.float32)
    raw = net.add("Concat", *flat, axis=2)
    sides = net.add("Slice", raw, ints(net, 0), ints(net, 4 * REG_MAX), ints(net, 1))
    logits = net.add("Slice", raw, ints(net, 4 * REG_MAX), ints(net, 999), ints(net, 1))
    shares = net.add("Softmax", net.add("Reshape", sides, ints(net, 0, 4, REG_MAX, -1)), axis=2)
    steps = net.add("Constant", value_floats=[float(step) for step in range(REG_MAX)])
    mean = net.add("Einsum", shares, steps, equation="nsra,r->nsa")
    distance = net.add("Mul", mean, net.add("Constant", value=numpy_helper.from_array(cell)))
    near, far = (net.add("Slice", distance, ints(net, a), ints(net, a + 2), ints(net, 1)) for a in (0, 2))
    centres = net.add("Constant", value=numpy_helper.from_array(np.stack([x, y])))
    edges = net.add("Sub", centres, near), net.add("Add", centres, far)
    boxes = net.add("Concat", *edges, net.add("Sigmoid", logits), axis=1)
    return net.model({"found": (boxes, [4 + len(CLASSES), len(x)])})


def detr_like() -> onnx.ModelProto:
    """Return a detector with nine slots that attend to the features: `logits` [N, 9, 4] and `boxes` [N, 9, 4]."""
    net = Network(1)
    features = net.add("Reshape", net.backbone(), ints(net, 0, 0, -1))
    memory = net.add("Transpose", features, perm=[0, 2, 1])  # [N, 64, 48]
    memory = net.add("Add", memory, net.normal(64, WIDTH, scale=0.5))
    zero = net.add("Mul", net.add("ReduceMean", memory, ints(net, 1), keepdims=1), net.add("Constant", value_float=0.0))
    slots = net.add("Add", zero, net.normal(SLOTS, WIDTH, scale=1.0))  # [N, 9, 48]
    for _ in range(2):
        for source in (slots, memory):
            query = net.linear(slots, WIDTH, WIDTH)
            key, value = net.linear(source, WIDTH, WIDTH), net.linear(source, WIDTH, WIDTH)
            scores = net.add("MatMul", query, net.add("Transpose", key, perm=[0, 2, 1]))
            scores = net.add("Mul", scores, net.add("Constant", value_float=WIDTH**-0.5))
            read = net.linear(net.add("MatMul", net.add("Softmax", scores, axis=-1), value), WIDTH, WIDTH)
            slots = net.add("LayerNormalization", net.add("Add", slots, read), net.weight(np.ones(WIDTH, np.float32)))
        hidden = net.linear(net.add("Relu", net.linear(slots, WIDTH, 2 * WIDTH)), 2 * WIDTH, WIDTH)
        slots = net.add("LayerNormalization", net.add("Add", slots, hidden), net.weight(np.ones(WIDTH, np.float32)))
    logits = net.linear(slots, WIDTH, len(CLASSES) + 1)
    sides = net.linear(net.add("Relu", net.linear(slots, WIDTH, WIDTH)), WIDTH, 4, bias=np.array([0, 0, -1, -1]))
    grid = (np.arange(3) + 0.5) / 3  # slots begin all over the image
    places = np.stack([np.tile(grid, 3), np.repeat(grid, 3)], 1)
    start = np.concatenate([np.log(places / (1 - places)), np.zeros((SLOTS, 2))], 1).astype(np.float32)
    boxes = net.add("Sigmoid", net.add("Add", sides, net.weight(start)))
    return net.model({"logits": (logits, [SLOTS, len(CLASSES) + 1]), "boxes": (boxes, [SLOTS, 4])})


def found_by_yolo(found: np.ndarray) -> list[np.ndarray]:
    """Return boxes [K, 4] of scores above 0.3, without those that overlap a better one by half."""
    kept = []
    for image in found:
        boxes, scores = image[:4].T, image[4:].max(0)
        chosen: list[np.ndarray] = []
        for box in boxes[np.argsort(-scores)][: (scores > 0.3).sum()]:
            if all(overlap(box, other) < 0.5 for other in chosen):
                chosen.append(box)
        kept.append(np.array(chosen).reshape(-1, 4))
    return kept


def found_by_detr(logits: np.ndarray, boxes: np.ndarray) -> list[np.ndarray]:
    """Return boxes [K, 4] of slots whose best class is not "no object"."""
    half = boxes[..., 2:] / 2
    edges = np.concatenate([boxes[..., :2] - half, boxes[..., :2] + half], -1)
    return [image[best < len(CLASSES)] for image, best in zip(edges, logits.argmax(-1), strict=True)]


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Return the intersection over union of two boxes."""
    both = np.prod(np.maximum(np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]), 0))
    return float(both / (np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2]) - both + 1e-9))


def draw(path: Path, images: np.ndarray, rows: list[tuple[str, list[np.ndarray]]]) -> None:
    """Write images side by side, one row for each list of boxes."""
    from PIL import Image, ImageDraw

    scale, label = 2, 14
    side = SIZE * scale
    sheet = Image.new("RGB", (len(images) * (side + 4), len(rows) * (side + label + 4)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (title, boxes) in enumerate(rows):
        top = row * (side + label + 4)
        pen.text((2, top), title, fill="black")
        for column, (image, own) in enumerate(zip(images, boxes, strict=True)):
            left, shown = column * (side + 4), (image.clip(0, 1) * 255).astype(np.uint8).transpose(1, 2, 0)
            shown = shown // 32 * 32 + 16  # fewer colours make a smaller file
            sheet.paste(Image.fromarray(shown).resize((side, side), Image.Resampling.NEAREST), (left, top + label))
            for box in own:
                x1, y1, x2, y2 = np.clip(box, 0, 1) * (side - 1) + [left, top + label, left, top + label]
                pen.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=(255, 220, 0), width=2)
    sheet.quantize(32).save(path, optimize=True)


def main(folder: Path, epochs: int = 20) -> dict[str, float]:
    """Train both, write `detector.onnx`, `slots.onnx` and `detection.png`, and return the mean average precisions.

    The YOLO-like detector takes that many epochs, the other one three times as many.
    """
    data, test = shapes_in_noise(1200, 0), shapes_in_noise(200, 1)
    shown = test[0][:6]
    yolo = onnxtrain.Trainer(yolo_like(), loss=f"yolo(reg_max={REG_MAX})", optimizer="adamw(lr=2e-3)", seed=0)
    detr = onnxtrain.Trainer(detr_like(), loss="detr", optimizer="adamw(lr=1e-3)", clip_norm=1.0, seed=0)

    def rows(moment: str) -> list[tuple[str, list[np.ndarray]]]:
        slots = onnxtrain.predict(detr.model(), shown)
        return [
            (f"YOLO-like, {moment}", found_by_yolo(yolo.predict(shown))),
            (f"DETR-like, {moment}", found_by_detr(slots["logits"], slots["boxes"])),
        ]

    before = rows("before training")
    yolo.fit(*data, epochs=epochs, batch_size=32, schedule="cosine", progress=False)
    detr.fit(*data, epochs=3 * epochs, batch_size=32, schedule="cosine", progress=False)
    after = rows("after training")
    yolo.save(folder / "detector.onnx")
    detr.save(folder / "slots.onnx")
    draw(folder / "detection.png", shown, [before[0], after[0], before[1], after[1]])
    return {"yolo": yolo.evaluate(*test)["map_50"], "detr": detr.evaluate(*test)["map_50"]}


if __name__ == "__main__":
    print(main(Path.cwd()))
