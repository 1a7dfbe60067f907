/** Tests that need no runtime: safetensors, models, shuffling, tensors. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { patchWeights, readModel } from "../dist/model.js";
import { generator, permutation } from "../dist/random.js";
import { readSafetensors, writeSafetensors } from "../dist/safetensors.js";
import { concatenate, takeRows, toTensor } from "../dist/tensor.js";

const TENSORS = {
  "layer.weight": { type: "float32", dims: [2, 3], data: Float32Array.of(1, 2, 3, 4, 5, 6) },
  T: { type: "int64", dims: [], data: BigInt64Array.of(7n) },
  'odd "é" 😀\\': { type: "bool", dims: [3], data: Uint8Array.of(1, 0, 1) },
  half: { type: "float16", dims: [1], data: Uint16Array.of(0x3c00) },
  none: { type: "float64", dims: [0, 4], data: new Float64Array() },
};

test("safetensors survive a round trip", () => {
  const file = writeSafetensors(TENSORS);
  assert.deepEqual(readSafetensors(file), TENSORS);
  assert.deepEqual(readSafetensors(Buffer.concat([Buffer.from("xyz"), file]).subarray(3)), TENSORS, "at an odd address");
});

test("rejects files that are not safetensors", () => {
  const file = writeSafetensors(TENSORS);
  const header = (text) => {
    const bytes = new TextEncoder().encode(text);
    const result = new Uint8Array(8 + bytes.length);
    new DataView(result.buffer).setBigUint64(0, BigInt(bytes.length), true);
    result.set(bytes, 8);
    return result;
  };
  assert.throws(() => readSafetensors(Uint8Array.of(1, 2)), /not a safetensors file: it is too short/);
  assert.throws(() => readSafetensors(new Uint8Array(8).fill(255)), /header is longer than the file/);
  assert.throws(() => readSafetensors(header("{nonsense")), /its header is no JSON/);
  assert.throws(() => readSafetensors(file.subarray(0, file.length - 1)), /'half' lies outside of it|outside of it/);
  const wrong = header('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}');
  assert.throws(() => readSafetensors(new Uint8Array([...wrong, 0, 0, 0, 0])), /'x' lies outside of it/);
  const odd = header('{"x":{"dtype":"C64","shape":[],"data_offsets":[0,0]}}');
  assert.throws(() => readSafetensors(odd), /element type C64 is not supported/);
});

/** Encode Protocol Buffers fields: bytes, and an integer. */
const field = (number, content) => [(number << 3) | 2, ...varint(content.length), ...content];
const number = (field, value) => [field << 3, ...varint(value)];
const varint = (value) => (value < 128 ? [value] : [(value & 127) | 128, ...varint(Math.floor(value / 128))]);
const text = (string) => [...new TextEncoder().encode(string)];
const floats = (...values) => [...new Uint8Array(Float32Array.from(values).buffer)];

function port(name, type, dims) {
  const shape = dims.flatMap((size) => field(1, typeof size === "number" ? number(1, size) : size ? field(2, text(size)) : []));
  return [...field(1, text(name)), ...field(2, field(1, [...number(1, type), ...field(2, shape)]))];
}

function model(...tensors) {
  const graph = [
    ...field(2, text("a graph")),
    ...tensors.flatMap((tensor) => field(5, tensor)),
    ...field(11, port("x", 1, ["N", null, 300])),
    ...field(11, port("w", 1, [2])), // old models list weights as inputs, too
    ...field(12, port("y", 7, [])),
  ];
  const metadata = field(14, [...field(1, text("key")), ...field(2, text("value"))]);
  return Uint8Array.from([...number(1, 8), ...field(7, graph), ...metadata]);
}

const raw = [...number(1, 2), ...number(2, 1), ...field(8, text("w")), ...field(9, floats(1, 2))];
const packed = [...number(1, 2), ...number(2, 1), ...field(4, floats(1, 2)), ...field(8, text("w"))];
const unpacked = [...number(2, 1), ...floats(1, 2).flatMap((byte, index) => (index % 4 ? [byte] : [(4 << 3) | 5, byte])), ...field(8, text("w"))];
const weight = (...values) => ({ w: { type: "float32", dims: [2], data: Float32Array.from(values) } });

test("reads inputs, outputs and metadata", () => {
  const info = readModel(model(raw));
  assert.deepEqual(info.inputs, [{ name: "x", type: "float32", shape: ["N", null, 300] }]);
  assert.deepEqual(info.outputs, [{ name: "y", type: "int64", shape: [] }]);
  assert.deepEqual(info.metadata, { key: "value" });
});

for (const [name, tensor] of Object.entries({ raw, packed, unpacked })) {
  test(`overwrites weights in place: ${name}`, () => {
    const before = model(tensor);
    const copy = before.slice();
    const after = patchWeights(before, weight(3, 4));
    assert.deepEqual(before, copy);
    assert.equal(after.length, before.length);
    assert.deepEqual(patchWeights(after, weight(1, 2)), before, "and back");
    assert.notDeepEqual(after, before);
    const places = [...after].flatMap((byte, index) => (byte === before[index] ? [] : [byte]));
    assert.ok(places.every((byte) => floats(3, 4).includes(byte)));
  });
}

test("rejects weights that do not match", () => {
  const wide = { w: { type: "float64", dims: [2], data: new Float64Array(2) } };
  assert.throws(() => patchWeights(model(raw), wide), /'w' is float32 in the model and float64 in training/);
  const long = { w: { type: "float32", dims: [3], data: new Float32Array(3) } };
  assert.throws(() => patchWeights(model(raw), long), /'w' has 8 bytes in the model and 12 in training/);
  const external = [...number(2, 1), ...field(8, text("w")), ...number(14, 1)];
  assert.throws(() => patchWeights(model(external), weight(1, 2)), /is in an external data file.*with onnxtrain import-states/);
  assert.throws(() => patchWeights(model(raw), { v: weight(1, 2).w }), /'v' is not an initializer of the model; save a checkpoint/);
  assert.throws(() => readModel(Uint8Array.of(1 << 3, 200)), /truncated within a field/);
  assert.throws(() => readModel(Uint8Array.of((7 << 3) | 2, 9)), /extends beyond its end/);
  assert.throws(() => readModel(new Uint8Array()), /not an ONNX model/);
});

test("shuffling is a seeded permutation", () => {
  const order = permutation(1000, generator(3));
  assert.deepEqual([...order].sort((a, b) => a - b), Array.from({ length: 1000 }, (_, index) => index));
  assert.deepEqual(permutation(1000, generator(3)), order);
  assert.notDeepEqual(permutation(1000, generator(4)), order);
  const random = generator(0);
  const counts = new Map();
  for (let trial = 0; trial < 6000; trial++) {
    const key = permutation(3, random).join();
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  assert.equal(counts.size, 6);
  for (const count of counts.values()) assert.ok(Math.abs(count - 1000) < 150, `${count} of 1000`);
});

test("converts batches to the type and shape of their input", () => {
  const image = { name: "image", type: "float32", shape: ["N", 2, 2] };
  assert.deepEqual(toTensor(image, [1, 2, 3, 4]).dims, [1, 2, 2]);
  assert.deepEqual(toTensor({ name: "t", type: "int64", shape: ["N"] }, [1, 2]).data, BigInt64Array.of(1n, 2n));
  assert.throws(() => toTensor(image, [1, 2, 3]), /'image' has 3 values, which do not match the shape \[N, 2, 2\]/);
  assert.throws(() => toTensor({ name: "t", type: "int64", shape: ["N"] }, [0.5]), /needs integers, but has 0.5 at index 0/);
  assert.throws(() => toTensor({ ...image, shape: ["N", "T"] }, [1]), /2 dynamic axes; pass it as \{data, dims\}/);
  assert.throws(() => toTensor(image, { data: [1], dims: [1, 1, 1] }), /shape \[1, 1, 1\], but the graph needs \[N, 2, 2\]/);
});

test("selects and concatenates rows", () => {
  const tensor = TENSORS["layer.weight"];
  const rows = takeRows(tensor, [1, 0, 1]);
  assert.deepEqual(rows, { type: "float32", dims: [3, 3], data: Float32Array.of(4, 5, 6, 1, 2, 3, 4, 5, 6) });
  assert.deepEqual(concatenate([tensor, tensor]).dims, [4, 3]);
});
