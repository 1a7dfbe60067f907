"""Values behind Microsoft's operators have the types and shapes that ONNX Runtime computes, as adapters need them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions
from zoo.language_model import GROUPS, LAYERS, SIZE, WORDS, language_model

IDS = np.random.default_rng(0).integers(0, WORDS, (3, 7))
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
SYMBOLS = {"batch_size": 3, "sequence_length": 7, "total_sequence_length": 7}


@pytest.mark.parametrize("bits", [None, 4])
def test_types_and_shapes_are_those_of_the_runtime(bits: int | None) -> None:
    model = language_model(bits=bits)
    inferred = infer_shapes(ir.from_proto(model))
    wanted = {
        output.name: output
        for node in inferred.graph
        for output in node.outputs
        if output.name and not output.is_graph_output()
    }
    assert not [name for name, value in wanted.items() if value.type is None]
    assert {node.op_type for node in inferred.graph} >= {"GroupQueryAttention", "SkipSimplifiedLayerNormalization"}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    empty = np.zeros((3, GROUPS, 0, SIZE), np.float32)
    caches = {f"past_key_values.{n}.{part}": empty for n in range(LAYERS) for part in ("key", "value")}
    for (name, value), found in zip(wanted.items(), session.run(list(wanted), FEEDS | caches), strict=True):
        assert value.dtype is not None, name
        assert value.dtype.numpy() == found.dtype, name
        sizes = dimensions(value)
        assert sizes is not None, name
        assert tuple(SYMBOLS.get(size, size) if isinstance(size, str) else size for size in sizes) == found.shape, name


@pytest.mark.parametrize("bits", [None, 4])
def test_adapters_find_the_layers_of_a_file_that_declares_no_types_inside(bits: int | None) -> None:
    model = language_model(bits=bits)
    assert not model.graph.value_info
    trainer = onnxtrain.Trainer(
        model,
        loss="softmax_cross_entropy",
        output="logits",
        optimizer="adam(lr=1e-2)",
        lora=onnxtrain.Lora(rank=2, targets="all-linear"),
    )
    assert len(trainer.parameters) == 2 * LAYERS * 7  # queries, keys, values, their output; gate, up, down
    losses = [trainer.train_step(FEEDS, IDS) for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0]
