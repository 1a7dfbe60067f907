/** Run a program of the documentation in a page and print its result: node docs.mjs BROWSER FOLDER PROGRAM. */

import { readFileSync } from "node:fs";
import { dirname } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const [executable, folder, program] = process.argv.slice(2);
const root = dirname(dirname(fileURLToPath(import.meta.url)));
const server = await serve(
  { "": folder, lib: `${root}/dist`, "onnxruntime-web": `${root}/node_modules/onnxruntime-web` },
  { blank: "blank" },
);
const browser = await launch(executable);
try {
  const { page, errors } = await open(browser, `${server.url}/blank`);
  const [first, ...rest] = readFileSync(program, "utf8").split("\n");
  const imports = first.replace('"onnxtrain-web"', `"${server.url}/lib/index.js"`);
  const prelude = `
    let state = 1;
    const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
    const pixels = Float32Array.from({ length: 3 * 784 }, random);
    const allPixels = Float32Array.from({ length: 40 * 784 }, random);
    const labels = Array.from({ length: 40 }, (_, index) => index % 10);`;
  const ending = `
    globalThis.found = { loss, mean, accuracy, logits: logits.dims, bytes: onnx.length };`;
  await page.addScriptTag({ type: "module", content: imports + prelude + rest.join("\n") + ending });
  await page.waitForFunction(() => globalThis.found, null, { timeout: 60000 });
  console.log(JSON.stringify({ found: await page.evaluate(() => globalThis.found), errors }));
} finally {
  await browser.close();
  server.close();
}
