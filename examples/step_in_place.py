"""Step an exported graph without copying its states and without importing onnxtrain.

The metadata entry `onnxtrain.in_place` lists the states whose old and new value may share a buffer. Other states
alternate between two buffers, because a node may read the old value after the new one is written.

Write the files and run it:

    onnxtrain export model.onnx --loss softmax_cross_entropy --step-graph step.onnx --states states.safetensors
    python step_in_place.py step.onnx states.safetensors
"""

import json
import sys

import numpy as np
import onnxruntime
from safetensors.numpy import load_file


class Stepper:
    """A step graph, its states, and their buffers."""

    def __init__(self, path: str, states: dict[str, np.ndarray]) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.new_names = json.loads(metadata["onnxtrain.states"])  # state to the output with its new value
        in_place = set(json.loads(metadata["onnxtrain.in_place"]))
        self.states = {name: np.ascontiguousarray(array) for name, array in states.items()}
        self.others = {
            name: self.states[name] if name in in_place else np.empty_like(self.states[name]) for name in self.new_names
        }
        self.inputs = [value.name for value in self.session.get_inputs()]
        outputs = [value.name for value in self.session.get_outputs()]
        self.results = [name for name in outputs if name not in self.new_names.values()]

    def step(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one training step; return the loss and other outputs that are not states."""
        binding = self.session.io_binding()
        arrays = {name: np.ascontiguousarray(array) for name, array in feeds.items()} | self.states
        for name in self.inputs:
            array = arrays[name]
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name in self.results:
            binding.bind_output(name, "cpu")
        for name, output in self.new_names.items():
            array = self.others[name]
            binding.bind_output(output, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.session.run_with_iobinding(binding)
        for name in self.new_names:  # the same buffer for in-place states
            self.states[name], self.others[name] = self.others[name], self.states[name]
        results = binding.get_outputs()[: len(self.results)]  # in binding order
        return {name: np.array(value.numpy()) for name, value in zip(self.results, results, strict=True)}


def main(graph: str, states: str) -> None:
    """Learn to find the largest of three values."""
    stepper = Stepper(graph, load_file(states))
    (size,) = stepper.session.get_inputs()[0].shape[1:]
    points = np.random.default_rng(0).normal(size=(64, size)).astype(np.float32)
    labels = points[:, :3].argmax(axis=1)
    feeds = {stepper.inputs[0]: points, "target": labels, "learning_rate": np.array(0.01, np.float32)}
    losses = [float(stepper.step(feeds)["loss"]) for _ in range(100)]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
