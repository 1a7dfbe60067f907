"""Failures inside ONNX Runtime become one sentence: tokens, positions, memory."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import StepError
from sentences import raises_sentence
from zoo.language_model import WORDS, language_model

RNG = np.random.default_rng(0)


def tokens(length, largest=WORDS - 1):
    ids = RNG.integers(0, WORDS, (3, length))
    ids[1, -1] = largest
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}, np.minimum(ids, WORDS - 1)


def learned_positions():
    """A model with a table of 6 positions, which it counts itself."""
    table = numpy_helper.from_array(RNG.normal(size=(WORDS, 8)).astype(np.float32), "words")
    positions = numpy_helper.from_array(RNG.normal(size=(6, 8)).astype(np.float32), "positions")
    head = numpy_helper.from_array(RNG.normal(size=(8, WORDS)).astype(np.float32), "head")
    scalars = [numpy_helper.from_array(np.array(number), name) for number, name in ((0, "zero"), (1, "one"))]
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["embedded"], "embed"),
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["length"]),
        helper.make_node("Range", ["zero", "length", "one"], ["counted"]),
        helper.make_node("Gather", ["positions", "counted"], ["placed"], "place"),
        helper.make_node("Add", ["embedded", "placed"], ["sum"]),
        helper.make_node("MatMul", ["sum", "head"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", WORDS])
    graph = helper.make_graph(nodes, "main", [ids], [logits], [table, positions, head, *scalars])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def uses(model, feeds, labels, kernels):
    """All ways to run a model on data."""
    options = onnxtrain.RuntimeOptions(kernels=kernels)
    trainer = onnxtrain.Trainer(model, loss="next_token", output="logits", runtime=options)
    yield lambda: trainer.train_step(feeds, labels)
    yield lambda: trainer.fit((feeds, labels), batch_size=3, progress=False)
    yield lambda: trainer.fit(lambda: iter([(feeds, labels)]), progress=False)
    yield lambda: trainer.evaluate((feeds, labels))
    yield lambda: trainer.predict(feeds)
    yield lambda: onnxtrain.predict(model, feeds)


@pytest.mark.parametrize("kernels", [False, None])
def test_a_token_beyond_the_vocabulary(kernels):
    for use in uses(language_model(), *tokens(7, WORDS), kernels):
        with raises_sentence("value_outside_table", array="'input_ids'", value=40, rows=40, last=39):
            use()


@pytest.mark.parametrize("kernels", [False, None])
def test_a_sequence_longer_than_the_rotary_caches(kernels):
    for use in uses(language_model(), *tokens(65), kernels):
        with raises_sentence("sequences_too_long", array="'input_ids'", positions=65, shape="(3, 65)", limit=64):
            use()


@pytest.mark.parametrize("kernels", [False, None])
def test_a_sequence_longer_than_the_learned_positions(kernels):
    feeds, labels = tokens(7)
    del feeds["attention_mask"]
    for use in uses(learned_positions(), feeds, labels, kernels):
        with raises_sentence("sequences_too_long", array="'input_ids'", positions=7, limit=6):
            use()


def test_positions_given_beyond_the_table():
    model = learned_positions()
    kept = [node for node in model.graph.node if "counted" not in node.output]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    given = helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "length"])
    model.graph.input.append(given)
    next(node for node in model.graph.node if node.name == "place").input[1] = "position_ids"
    onnx.checker.check_model(model)
    feeds, labels = tokens(5)
    feeds = {"input_ids": feeds["input_ids"], "position_ids": np.tile(np.arange(3, 8), (3, 1))}
    for use in uses(model, feeds, labels, None):
        with raises_sentence("position_outside_table", array="'position_ids'", rows=6):
            use()


NO_MEMORY = (
    r"There is not enough memory for this step: {} could not be allocated.*, beside [\d.,]+ MiB of weights and "
    r"optimizer states and [\d.,]+ MiB of data\. Take smaller batches \(batch_size=\) or micro-batches "
    r"\(accumulate=\), compute large logits in chunks \(the loss's chunk=\), or "
    r"recompute activations \(recompute=\"layers\"\)\."
)


ALLOCATION = (
    "Non-zero status code returned while running MatMul node. Name:'head' Status Message: bfc_arena.cc:360 Failed to "
    "allocate memory for requested buffer of size 122880000"
)


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (RuntimeError(ALLOCATION), "117 MiB"),
        (RuntimeError("std::bad_alloc"), "a buffer"),
        (RuntimeError("CUDA failure 2: out of memory"), "a buffer"),
        (MemoryError(), "a buffer"),
    ],
)
def test_memory(error, size, monkeypatch):
    feeds, labels = tokens(7)
    trainer = onnxtrain.Trainer(language_model(), loss="next_token", output="logits")
    trainer.train_step(feeds, labels)

    def fail(*_):
        raise error

    for step in trainer.executor.session._steps:
        monkeypatch.setattr(step._session, "run_with_iobinding", fail)
    with pytest.raises(StepError, match=NO_MEMORY.format(size)):
        trainer.train_step(feeds, labels)


def test_memory_for_the_data_of_a_step():
    class Array:
        def __array__(self, dtype=None, copy=None):
            raise MemoryError

    feeds, labels = tokens(7)
    trainer = onnxtrain.Trainer(language_model(), loss="next_token", output="logits")
    trainer.train_step(feeds, labels)
    (step,) = trainer.executor.session._steps
    names = trainer.objective.names
    given = feeds | {trainer.objective.heads[0].target_name: labels, names.learning_rate: 0.1}
    step.run(given)
    with pytest.raises(StepError, match=NO_MEMORY.format("a buffer")):
        step.run(given | {"input_ids": Array()})


LIMITED = """
import resource, sys
import numpy as np
import onnxtrain
from zoo.language_model import WORDS, language_model
trainer = onnxtrain.Trainer(language_model(), loss="next_token", output="logits")
def step(rows):
    ids = np.zeros((rows, 60), np.int64)
    trainer.train_step({"input_ids": ids, "attention_mask": np.ones_like(ids)}, ids)
step(2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27,) * 2)
try:
    step(4000)
except onnxtrain.errors.StepError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit follows from /proc")
def test_a_process_that_has_too_little_memory():
    root = Path(__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", LIMITED], cwd=root, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    pattern = NO_MEMORY.format(r"[\d.,]+ MiB")
    assert re.search(pattern, found.stderr), found.stderr


def test_an_index_that_is_computed_from_an_input_is_named_by_the_node():
    table = numpy_helper.from_array(RNG.normal(size=(6, 8)).astype(np.float32), "table")
    nodes = [
        helper.make_node("Add", ["one", "ids"], ["twice"]),
        helper.make_node("Gather", ["table", "twice"], ["y"]),
    ]
    one = numpy_helper.from_array(np.array(3), "one")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2, 8])
    graph = helper.make_graph(nodes, "main", [ids], [y], [table, one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error", train=["table"])
    with raises_sentence("runtime_failed", operator="Gather", reason="idx=6 must be within the inclusive"):
        trainer.train_step({"ids": np.full((3, 2), 3)}, np.ones((3, 2, 8), np.float32))


@pytest.mark.parametrize("wrong", ["source", "target"])
def test_an_edge_to_a_node_that_is_not_there(wrong):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (float[n, 4] x, int64[n, 2] source, int64[n, 2] target) => '
        "(float[n, 4] y) <int64[1] last = {1}, int64[1] flat = {-1}> { h = MatMul(x, w) from = Reshape(source, flat) "
        "to = Reshape(target, flat) message = Gather(h, from) like = Shape(h) zeros = ConstantOfShape(like) "
        "column = Unsqueeze(to, last) wanted = Shape(message) places = Expand(column, wanted) "
        'y = ScatterElements <axis = 0, reduction = "add"> (zeros, places, message) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(4, 4)).astype(np.float32), "w"))
    for node in model.graph.node:
        node.name = f"/{node.output[0]}"
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error", train=["w"])
    feeds = {"x": np.ones((5, 4), np.float32), "source": np.ones((5, 2), int), "target": np.ones((5, 2), int)}
    feeds[wrong][3, 1] = 5
    with raises_sentence("value_outside_table", array=repr(wrong), value=5, where="example 3 of the batch", rows=5):
        trainer.train_step(feeds, np.ones((5, 4), np.float32))
