/**
 * Trains every folder of step graph, states and batch in a page, and prints the losses as JSON:
 *
 *   node train_cases.mjs BROWSER FOLDER RUNTIME STEPS NAME=LEARNING_RATE...
 *
 * RUNTIME is "wasm", "worker" (the same in a worker), "package" (the public API) or "webgpu".
 */

import { dirname } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const [executable, folder, runtime, steps, ...cases] = process.argv.slice(2);
const root = dirname(dirname(fileURLToPath(import.meta.url)));
const flags = runtime === "webgpu" ? ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"] : [];

const server = await serve(
  { lib: `${root}/dist`, ort: `${root}/node_modules/onnxruntime-web/dist`, cases: folder },
  { blank: "blank" },
);
const browser = await launch(executable, ...flags);
try {
  const { page, errors } = await open(browser, `${server.url}/blank`);
  const results = {};
  for (const item of cases) {
    const [name, rate] = item.split("=");
    results[name] = await page.evaluate(train, { name, learningRate: Number(rate), steps: Number(steps), runtime });
  }
  console.log(JSON.stringify({ results, errors }));
} finally {
  await browser.close();
  server.close();
}

/** Runs in the page. */
async function train({ name, learningRate, steps, runtime }) {
  const { StepGraph, readSafetensors } = await import("/lib/index.js");
  const file = (what) => `/cases/${name}/${what}`;
  const options = { graph: file("step.onnx"), states: file("states.safetensors"), model: file("model.onnx") };
  if (runtime === "package") options.runtime = await import("/ort/ort.wasm.min.mjs");
  else options.runtime = "/ort/";
  if (runtime === "worker") options.worker = true;
  if (runtime === "webgpu") options.provider = "webgpu";
  const before = performance.now();
  const training = await StepGraph.load(options);
  const loading = performance.now() - before;
  const batch = readSafetensors(new Uint8Array(await (await fetch(file("batch.safetensors"))).arrayBuffer()));
  const losses = [];
  const start = performance.now();
  for (let step = 0; step < steps; step++) losses.push(await training.step(batch, { learningRate }));
  const milliseconds = (performance.now() - start) / steps;
  if (runtime === "webgpu") return { losses, milliseconds, loading }; // in software every step takes seconds
  const evaluated = await training.evaluate(batch);
  const checkpoint = await training.checkpoint("test");
  const next = await training.step(batch, { learningRate });
  await training.restore("test");
  const again = await training.step(batch, { learningRate });
  await training.restore(checkpoint);
  const saved = await training.save();
  await training.close();
  return { losses, milliseconds, loading, evaluated, next, again, saved: Array.from(saved) };
}
