/**
 * Opens a training in fresh pages and takes its first step, to see how long the start takes and how many threads run:
 *
 *   node start.mjs BROWSER FOLDER PAGES isolated|plain [THREADS]
 *
 * Prints as JSON, for each page, milliseconds of `StepGraph.load` and of the first step (all files come from this machine),
 * the CPU time of the page's own thread in both, its workers, whether it is cross-origin isolated, and the losses of some
 * steps.
 */

import { dirname } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const [executable, folder, pages, kind, threads] = process.argv.slice(2);
const root = dirname(dirname(fileURLToPath(import.meta.url)));
const server = await serve(
  { lib: `${root}/dist`, ort: `${root}/node_modules/onnxruntime-web/dist`, case: folder },
  { blank: "blank", isolated: kind === "isolated" },
);
const browser = await launch(executable);

/** CPU milliseconds of the page's own thread. */
async function computed(session) {
  const { metrics } = await session.send("Performance.getMetrics");
  return 1000 * metrics.find(({ name }) => name === "TaskDuration").value;
}

try {
  const found = [];
  for (let index = 0; index < Number(pages); index++) {
    const { page } = await open(browser, `${server.url}/blank`);
    const session = await page.context().newCDPSession(page);
    await session.send("Performance.enable", { timeDomain: "threadTicks" });
    const before = await computed(session);
    const result = await page.evaluate(start, threads ? Number(threads) : undefined);
    const cpu = (await computed(session)) - before;
    const losses = await page.evaluate(goOn, 10);
    found.push({ ...result, cpu, losses, workers: page.workers().length });
    await page.close();
  }
  console.log(JSON.stringify(found));
} finally {
  await browser.close();
  server.close();
}

/** Runs in the page: loads, and takes the first step. */
async function start(threads) {
  const { StepGraph, readSafetensors } = await import("/lib/index.js");
  const file = (what) => `/case/${what}`;
  const batch = readSafetensors(new Uint8Array(await (await fetch(file("batch.safetensors"))).arrayBuffer()));
  const isolated = globalThis.crossOriginIsolated;
  const opened = performance.now();
  try {
    const training = await StepGraph.load({
      ...{ graph: file("step.onnx"), states: file("states.safetensors"), model: file("model.onnx") },
      ...{ runtime: "/ort/", threads },
    });
    const loaded = performance.now();
    globalThis.step = () => training.step(batch, { learningRate: 0.001 });
    globalThis.losses = [await globalThis.step()];
    return { isolated, load: loaded - opened, first: performance.now() - loaded };
  } catch (error) {
    return { isolated, error: error.message };
  }
}

/** Runs in the page: takes more steps. */
async function goOn(steps) {
  const { step, losses = [] } = globalThis;
  for (let count = 1; step && count < steps; count++) losses.push(await step());
  return losses;
}
