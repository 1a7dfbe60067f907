"""A compiled sparse model in onnxruntime-web, in Node: without our library, with the results of the dense model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from javascript import WEB, last_json, needs_packages, node

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "sparse"))
from pruned_models import mlp, residual_network, run

pytestmark = needs_packages

PROGRAM = """
import fs from "node:fs";
import { createRequire } from "node:module";
const ort = createRequire(process.argv[3])("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const { model, x, dims } = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const session = await ort.InferenceSession.create(fs.readFileSync(model), { executionProviders: ["wasm"] });
const { y } = await session.run({ x: new ort.Tensor("float32", Float32Array.from(x), dims) });
console.log(JSON.stringify(Array.from(y.data)));
"""


@pytest.mark.parametrize(("model", "shape"), [(mlp, (2, 512)), (residual_network, (1, 64, 28, 28))])
def test_it_runs_in_onnxruntime_web(model, shape, monkeypatch, tmp_path):
    for name in ("_SECONDS", "_WORTH_IT", "_WHOLE"):
        monkeypatch.setattr(compiling, name, 0.0)
    made, path = model(), tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(made, path)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    (tmp_path / "given.json").write_text(
        json.dumps({"model": str(path), "x": x.ravel().astype(float).tolist(), "dims": list(shape)})
    )
    (tmp_path / "program.mjs").write_text(PROGRAM)
    printed = node(tmp_path / "program.mjs", tmp_path / "given.json", WEB / "package.json")
    found = np.array(last_json(printed), np.float32)
    np.testing.assert_allclose(found, run(made, {"x": x}).ravel(), rtol=1e-3, atol=1e-3)
