/**
 * Steps the peers in turns in one page and prints the milliseconds of every round as JSON:
 *
 *   node measure.mjs BROWSER FOLDER ROUNDS CASE
 *
 * FOLDER/CASE has step.onnx, states.safetensors, batch.safetensors, and training/ with the artifacts of
 * onnxruntime-training where there are such.
 */

import { existsSync } from "node:fs";
import { dirname } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, open } from "../../web/test/browser.mjs";
import { serve } from "../../web/test/server.mjs";

const [executable, folder, rounds, name] = process.argv.slice(2);
const here = dirname(fileURLToPath(import.meta.url));
const web = `${here}/../../web`;
const peers = `${here}/node_modules`;

const server = await serve(
  {
    lib: `${web}/dist`,
    ort: `${web}/node_modules/onnxruntime-web/dist`,
    training: `${peers}/onnxruntime-web/dist`,
    tfjs: `${peers}/@tensorflow`,
    benchmark: here,
    cases: folder,
  },
  { blank: "blank" },
);
const browser = await launch(executable);
try {
  const { page, errors } = await open(browser, `${server.url}/blank`);
  for (const script of ["/tfjs/tfjs/dist/tf.min.js", "/tfjs/tfjs-backend-wasm/dist/tf-backend-wasm.min.js"]) {
    await page.addScriptTag({ url: script });
  }
  await page.addScriptTag({ url: "/training/ort.training.wasm.min.js" });
  const hasArtifacts = existsSync(`${folder}/${name}/training/training_model.onnx`);
  console.log(JSON.stringify({ ...(await page.evaluate(measure, { name, rounds: Number(rounds), hasArtifacts })), errors }));
} finally {
  await browser.close();
  server.close();
}

/** Runs in the page. */
async function measure({ name, rounds, hasArtifacts }) {
  const { StepGraph, readSafetensors } = await import("/lib/index.js");
  const base = `/cases/${name}`;
  const batch = readSafetensors(new Uint8Array(await (await fetch(`${base}/batch.safetensors`)).arrayBuffer()));
  const rows = batch.target.dims[0];
  const classes = { mlp: 10, lenet5: 10, transformer: 4 }[name];
  const missing = {};

  async function onnxtrain() {
    const files = { graph: `${base}/step.onnx`, states: `${base}/states.safetensors` };
    const training = await StepGraph.load({ ...files, runtime: "/ort/", threads: 1 });
    return () => training.step(batch, { learningRate: 0.001 });
  }

  async function ortTraining() {
    if (!hasArtifacts) throw new Error("there are no artifacts");
    const { ort } = globalThis;
    ort.env.wasm.wasmPaths = "/training/";
    ort.env.wasm.numThreads = 1;
    const file = (what) => `${base}/training/${what}`;
    const session = await ort.TrainingSession.create(
      { checkpointState: file("checkpoint"), trainModel: file("training_model.onnx"), optimizerModel: file("optimizer_model.onnx") },
      { executionProviders: ["wasm"] },
    );
    const feeds = {};
    for (const input of session.trainingInputNames) {
      const { type, data, dims } = batch[input] ?? batch.target;
      feeds[input] = new ort.Tensor(type, data, dims);
    }
    const loss = session.trainingOutputNames[0];
    return async () => {
      const results = await session.runTrainStep(feeds);
      await session.runOptimizerStep();
      await session.lazyResetGrad();
      return results[loss].data[0];
    };
  }

  function sequential(layers) {
    const { tf } = globalThis;
    const model = tf.sequential({ layers });
    const shape = name === "lenet5" ? [rows, 28, 28, 1] : [rows, 784];
    const input = tf.tensor(Object.values(batch).find(({ type }) => type === "float32").data, shape);
    return () => model.predict(input);
  }

  async function attentive() {
    const { transformer } = await import("/benchmark/transformer.mjs");
    const states = new Uint8Array(await (await fetch(`${base}/states.safetensors`)).arrayBuffer());
    return transformer(globalThis.tf, readSafetensors(states), batch);
  }

  function tensorflow(backend) {
    return async () => {
      const { tf } = globalThis;
      tf.wasm.setWasmPaths("/tfjs/tfjs-backend-wasm/dist/");
      tf.wasm.setThreadsCount?.(1);
      await tf.setBackend(backend);
      await tf.ready();
      const { dense, flatten, conv2d, maxPooling2d } = tf.layers;
      const conv = (filters, padding, more) => conv2d({ filters, kernelSize: 5, padding, activation: "relu", ...more });
      const layers = {
        mlp: () => [dense({ units: 256, activation: "relu", inputShape: [784] }), dense({ units: 10 })],
        lenet5: () => [
          conv(6, "same", { inputShape: [28, 28, 1] }),
          maxPooling2d({ poolSize: 2 }),
          conv(16, "valid"),
          maxPooling2d({ poolSize: 2 }),
          flatten(),
          dense({ units: 120, activation: "relu" }),
          dense({ units: 84, activation: "relu" }),
          dense({ units: 10 }),
        ],
      }[name];
      const predict = layers ? sequential(layers()) : await attentive();
      const target = tf.oneHot(tf.tensor1d(Array.from(batch.target.data, Number), "int32"), classes).toFloat();
      const optimizer = tf.train.adam(0.001);
      return async () => {
        await tf.setBackend(backend);
        const loss = optimizer.minimize(() => tf.losses.softmaxCrossEntropy(target, predict()), true);
        const [value] = await loss.data();
        loss.dispose();
        return value;
      };
    };
  }

  const makers = {
    onnxtrain,
    "onnxruntime-web/training 1.18": ortTraining,
    "TensorFlow.js, WASM": tensorflow("wasm"),
    "TensorFlow.js, CPU": tensorflow("cpu"),
  };
  const steps = {};
  const losses = {};
  for (const [peer, make] of Object.entries(makers)) {
    try {
      steps[peer] = await make();
      losses[peer] = [];
      for (let step = 0; step < 5; step++) losses[peer].push(await steps[peer]());
    } catch (error) {
      delete steps[peer];
      missing[peer] = String(error.message ?? error).split("\n")[0];
    }
  }
  // As many steps in a round as take some tenths of a second.
  const counts = {};
  for (const [peer, step] of Object.entries(steps)) {
    const start = performance.now();
    await step();
    counts[peer] = Math.max(1, Math.min(100, Math.round(200 / (performance.now() - start))));
  }
  const times = Object.fromEntries(Object.keys(steps).map((peer) => [peer, []]));
  for (let round = 0; round < rounds; round++) {
    for (const [peer, step] of Object.entries(steps)) {
      const start = performance.now();
      for (let count = 0; count < counts[peer]; count++) await step();
      times[peer].push((performance.now() - start) / counts[peer]);
    }
  }
  return { times, missing, losses };
}
