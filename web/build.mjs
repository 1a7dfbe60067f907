/** Compile the package into dist, and the bundle for `onnxtrain export --web` into src/onnxtrain/cli/web_page. */

import { execFileSync } from "node:child_process";
import { build } from "esbuild";

const pages = new URL("../src/onnxtrain/cli/web_page/", import.meta.url).pathname;

execFileSync("node_modules/.bin/tsc", { stdio: "inherit" });
/** Private members of classes, renamed by the minifier. */
const PRIVATE = [
  ...["checkLabels", "closed", "converted", "description", "engine", "fixedRows", "held", "info", "make", "modelInfo", "module"],
  ...["names", "opened", "address", "port", "rates", "session", "shapes", "stale", "stepTensors", "taken", "tensors", "turn"],
  ...["weightNames", "word", "words"],
].join("|");

await build({
  entryPoints: { "onnxtrain-web": "src/index.ts", worker: "src/worker.ts" },
  outdir: process.argv[2] ?? pages,
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  mangleProps: new RegExp(`^(${PRIVATE})$`),
  legalComments: "none",
  external: ["onnxruntime-web"],
});
