/**
 * Memory after trainings are loaded and closed:
 *
 *   ONNXTRAIN_CASE=FOLDER node --test test/memory.test.mjs
 *
 * FOLDER has model.onnx, step.onnx, states.safetensors and batch.safetensors.
 */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { PackageRuntime } from "../dist/common.js";
import { readSafetensors, StepGraph } from "../dist/index.js";
import { WasmRuntime, wasmRuntime } from "../dist/wasm.js";

const CYCLES = 25;
const SETTLED = 4; // cycles after which the heap has its size: its blocks are as large as one training needs
const DIST = new URL("../node_modules/onnxruntime-web/dist/", import.meta.url).href;

const read = (name) => new Uint8Array(readFileSync(`${process.env.ONNXTRAIN_CASE}/${name}`));
const [graph, states, model] = ["step.onnx", "states.safetensors", "model.onnx"].map(read);
const batch = readSafetensors(read("batch.safetensors"));
const files = { graph, states, model, runtime: DIST };
const { module } = await wasmRuntime(DIST);

/** Heap size after each cycle of some work; it must not grow once it has settled. */
async function staysSmall(work) {
  const sizes = [];
  for (let cycle = 0; cycle < CYCLES; cycle++) {
    await work();
    sizes.push(module.HEAPU8.buffer.byteLength);
  }
  assert.equal(sizes.at(-1), sizes[SETTLED], `bytes after each cycle: ${sizes.join(", ")}`);
}

test("closed trainings free their memory", async () => {
  await staysSmall(async () => {
    const training = await StepGraph.load(files);
    assert.ok(Number.isFinite(await training.step(batch, { learningRate: 0.01 })));
    await training.predict(batch);
    await training.evaluate(batch);
    await training.restore(await training.checkpoint());
    await training.close();
  });
});

test("trainings closed at once free their memory", () => staysSmall(async () => (await StepGraph.load(files)).close()));

test("failed trainings free their memory", async () => {
  await staysSmall(async () => {
    const training = await StepGraph.load(files);
    await assert.rejects(training.step({}, { learningRate: 0.01 }), /is missing/);
    await training.close();
  });
});

const ROTTEN = new Uint8Array(16);

for (const [what, spoilt, message] of [
  ["a model", { model: ROTTEN }, /The file is not an ONNX model: it has no graph/],
  ["states", { states: states.subarray(0, states.length - 8) }, /safetensors/],
]) {
  test(`a load that fails for its ${what} frees its memory`, () => staysSmall(() => assert.rejects(StepGraph.load({ ...files, ...spoilt }), message)));
}

test("a graph that the runtime rejects frees its memory", async () => {
  const runtime = new WasmRuntime(module);
  await staysSmall(() => assert.rejects(runtime.open(new Uint8Array(2 ** 20)), /ONNX Runtime: /));
});

test("a failure to allocate states closes the session", async () => {
  const runtime = new WasmRuntime(module);
  const plan = { outputs: {}, inPlace: new Set(), loss: { name: "loss", type: "float32", shape: [] } };
  await staysSmall(async () => {
    const session = await runtime.open(graph);
    const big = { type: "float32", dims: [2 ** 18], data: new Float32Array(2 ** 18) };
    assert.throws(() => session.hold({ big, odd: { type: "complex64", dims: [1], data: new Float32Array(2) } }, plan));
    await session.close();
  });
});

test("a closed training rejects calls", async () => {
  const training = await StepGraph.load(files);
  await Promise.all([training.close(), training.close()]);
  for (const use of [() => training.step(batch, { learningRate: 0.01 }), () => training.predict(batch), () => training.weights()]) {
    await assert.rejects(use(), /The training is closed; load it again/);
  }
});

test("device tensors are freed with their training", async () => {
  let alive = 0;
  class Tensor {
    constructor(type, data, dims) {
      Object.assign(this, { type, data, dims });
      alive++;
    }
    async getData() {
      return this.data;
    }
    dispose() {
      assert.ok(!this.gone, "freed twice");
      this.gone = true;
      alive--;
    }
  }
  const number = new Float32Array(1);
  const onCpu = { type: "float32", dims: [], data: number, getData: async () => number, dispose() {} };
  const made = (names) =>
    Object.fromEntries(names.map((name) => [name, name === "loss" ? onCpu : new Tensor("float32", number, [])]));
  const ort = { Tensor, InferenceSession: { create: async () => ({ run: async (feeds, names) => made(names), release: async () => {} }) } };
  const plan = { outputs: { w: "w_new", m: "m_new" }, inPlace: new Set(), loss: { name: "loss", type: "float32", shape: [] } };
  const value = { type: "float32", dims: [], data: number };
  const session = await new PackageRuntime(ort, "webgpu").open(graph, plan);
  session.hold({ w: value, m: value }, plan);
  for (let step = 0; step < 3; step++) await session.step({});
  await session.run({}, ["loss", "w_new"]);
  await session.write("w", value);
  await session.close();
  assert.equal(alive, 0);
});
