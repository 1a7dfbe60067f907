/**
 * Runs every model of a folder in a page on an execution provider, and prints the outputs as JSON:
 *
 *   node run_models.mjs BROWSER FOLDER PROVIDER NAME...
 *
 * NAME.onnx is a model with one output, NAME.json its inputs: {"name": {"dims": [...], "data": [...]}} of float32.
 */

import { dirname } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const [executable, folder, provider, ...names] = process.argv.slice(2);
const root = dirname(dirname(fileURLToPath(import.meta.url)));
const server = await serve({ ort: `${root}/node_modules/onnxruntime-web/dist`, cases: folder }, { blank: "blank" });
const browser = await launch(executable, "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader");
try {
  const { page, errors } = await open(browser, `${server.url}/blank`);
  const results = {};
  for (const name of names) results[name] = await page.evaluate(run, { name, provider });
  console.log(JSON.stringify({ results, errors }));
} finally {
  await browser.close();
  server.close();
}

/** Runs in the page. */
async function run({ name, provider }) {
  const ort = await import("/ort/ort.webgpu.min.mjs");
  ort.env.wasm.wasmPaths = "/ort/";
  const session = await ort.InferenceSession.create(`/cases/${name}.onnx`, { executionProviders: [provider] });
  const feeds = {};
  for (const [key, { dims, data }] of Object.entries(await (await fetch(`/cases/${name}.json`)).json())) {
    feeds[key] = new ort.Tensor("float32", Float32Array.from(data), dims);
  }
  const outputs = await session.run(feeds);
  return Array.from(outputs[session.outputNames[0]].data);
}
