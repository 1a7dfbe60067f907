/** Compile the package into dist, and what `onnxtrain export --web` writes into src/onnxtrain/web. */

import { execFileSync } from "node:child_process";
import { build } from "esbuild";

const pages = new URL("../src/onnxtrain/web/", import.meta.url).pathname;

execFileSync("node_modules/.bin/tsc", { stdio: "inherit" });
/** Private members of classes: their names are nobody's business, so pages get shorter ones. */
const PRIVATE = [
  ...["converted", "description", "engine", "fixedRows", "info", "modelInfo", "module", "names", "place", "port", "rates", "session"],
  ...["shapes", "stale", "stepTensors", "tensors", "turn", "weightNames", "words"],
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
