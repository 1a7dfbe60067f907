/**
 * Runs the conformance suite on onnxruntime-web (WebAssembly) in Node, by the protocol of run.py:
 *
 *   python run.py FOLDER --command "node run_web.mjs"
 *
 * The package onnxruntime-web is looked for in web/ of the repository, or where the variable ONNXRUNTIME_WEB says.
 */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath, pathToFileURL } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.env.ONNXRUNTIME_WEB ?? join(here, "..", "web", "node_modules", "onnxruntime-web");
const require = createRequire(import.meta.url);
let about;
try {
  about = require(join(folder, "package.json"));
} catch {
  console.log(`ERROR onnxruntime-web is not installed in ${folder}.`);
  process.exit(1);
}
const ort = await import(pathToFileURL(join(folder, "dist", "ort.wasm.bundle.min.mjs")).href);
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";

/** Element types by their number in ONNX: name, array, bytes of an element. */
const TYPES = {
  1: ["float32", Float32Array],
  2: ["uint8", Uint8Array],
  3: ["int8", Int8Array],
  6: ["int32", Int32Array],
  7: ["int64", BigInt64Array],
  9: ["bool", Uint8Array],
  11: ["float64", Float64Array],
};

/** Reads a variable-length integer of protobuf; returns it and the next position. */
function varint(bytes, at) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = bytes[at++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return [value, at];
  }
}

/** Reads a TensorProto that holds raw data, as write.py writes it: dims 1, data_type 2, name 8, raw_data 9. */
function tensor(path) {
  const bytes = readFileSync(path);
  const found = { name: "", dims: [], type: 0, raw: new Uint8Array(0) };
  for (let at = 0; at < bytes.length; ) {
    let key, value;
    [key, at] = varint(bytes, at);
    [value, at] = varint(bytes, at);
    const field = Number(key >> 3n);
    if ((key & 7n) === 0n) {
      if (field === 1) found.dims.push(Number(value));
      if (field === 2) found.type = Number(value);
      continue;
    }
    if ((key & 7n) !== 2n) throw new Error(`the tensor has a field of wire type ${key & 7n}`);
    const part = bytes.subarray(at, (at += Number(value)));
    if (field === 1) for (let place = 0; place < part.length; ) {
      let size;
      [size, place] = varint(part, place);
      found.dims.push(Number(size));
    }
    if (field === 8) found.name = part.toString();
    if (field === 9) found.raw = part;
  }
  const [kind, Items] = TYPES[found.type] ?? [];
  if (kind === undefined) throw new Error(`the tensor ${found.name} has the element type ${found.type}`);
  return { name: found.name, dims: found.dims, kind, data: new Items(Uint8Array.from(found.raw).buffer) };
}

/** The tensors of a data set, in order. */
function tensors(data, prefix) {
  const found = [];
  for (let index = 0; ; index++) {
    try {
      found.push(tensor(join(data, `${prefix}_${index}.pb`)));
    } catch (error) {
      if (error.code === "ENOENT") return found;
      throw error;
    }
  }
}

/** Says how an output differs from the expected one; nothing where it agrees. */
function compare(found, expected, rtol, atol) {
  if (JSON.stringify(found.dims) !== JSON.stringify(expected.dims)) {
    return `has the shape ${JSON.stringify(found.dims)}, not ${JSON.stringify(expected.dims)}`;
  }
  if (found.type !== expected.kind) return `is of ${found.type}, not of ${expected.kind}`;
  for (let index = 0; index < expected.data.length; index++) {
    const value = Number(found.data[index]);
    const wanted = Number(expected.data[index]);
    const close = Math.abs(value - wanted) <= atol + rtol * Math.abs(wanted);
    if (!close && !Object.is(value, wanted)) return `is ${value} at ${index}, not ${wanted}`;
  }
  return "";
}

/** Runs all data sets of a case; from the second on, outputs of the runtime itself replace inputs. */
async function runCase(folder) {
  if (basename(dirname(folder)) === "training_info") return "refused the runtime does not read training_info";
  const about = JSON.parse(readFileSync(join(folder, "data.json"), "utf8"));
  let session;
  try {
    session = await ort.InferenceSession.create(readFileSync(join(folder, "model.onnx")), { executionProviders: ["wasm"] });
  } catch (error) {
    return `refused ${sentence(error)}`;
  }
  const fed = {};
  try {
    for (let number = 0; number < about.data_sets; number++) {
      const data = join(folder, `test_data_set_${number}`);
      const feeds = {};
      for (const { name, kind, data: items, dims } of tensors(data, "input")) {
        feeds[name] = fed[name] ?? new ort.Tensor(kind, items, dims);
      }
      let outputs;
      try {
        outputs = await session.run(feeds);
      } catch (error) {
        return `refused ${sentence(error)}`;
      }
      for (const expected of tensors(data, "output")) {
        const difference = compare(outputs[expected.name], expected, about.rtol, about.atol);
        if (difference !== "") return `wrong ${expected.name} of data set ${number} ${difference}`;
      }
      for (const [output, input] of Object.entries(about.feedback)) fed[input] = outputs[output];
    }
  } finally {
    await session.release();
  }
  return "passed";
}

function sentence(error) {
  return String(error?.message ?? error).replace(/\s+/g, " ").slice(0, 300);
}

console.log(`RUNTIME onnxruntime-web ${about.version}`);
for await (const line of createInterface({ input: process.stdin })) {
  console.log(`RESULT ${await runCase(line)}`);
}
