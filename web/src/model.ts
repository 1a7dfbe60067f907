/** Minimal access to ONNX files: read inputs, outputs and metadata, overwrite weights in place. */

import { bytesOf, elementType, OnnxTrainError, type Port, type Tensors } from "./tensor.js";

/** A Protocol Buffers field: `start` and `end` are offsets of its content, or `value` is its integer. */
interface Field {
  number: number;
  wire: number;
  value: number;
  start: number;
  end: number;
}

// Field numbers of onnx.proto.
const MODEL = { graph: 7, metadata: 14 };
const GRAPH = { initializer: 5, input: 11, output: 12 };
const TENSOR = { dims: 1, type: 2, float: 4, name: 8, raw: 9, double: 10, location: 14 };
const [VARINT, FIXED64, LENGTH, FIXED32] = [0, 1, 2, 5];

function* fields(file: Uint8Array, start = 0, end = file.length): Generator<Field> {
  let offset = start;
  const varint = (): number => {
    let result = 0;
    for (let factor = 1; ; factor *= 128) {
      if (offset >= end || factor > 2 ** 63) throw new OnnxTrainError("The model is truncated within a field.");
      const byte = file[offset++]!;
      result += (byte & 127) * factor;
      if (byte < 128) return result;
    }
  };
  while (offset < end) {
    const tag = varint();
    const [number, wire] = [Math.floor(tag / 8), tag & 7];
    const value = wire === VARINT ? varint() : 0;
    const lengths: Record<number, () => number> = { [VARINT]: () => 0, [FIXED64]: () => 8, [FIXED32]: () => 4, [LENGTH]: varint };
    const length = lengths[wire]?.() ?? Infinity;
    if (offset + length > end) throw new OnnxTrainError("The model is truncated: a field extends beyond its end.");
    yield { number, wire, value, start: offset, end: offset + length };
    offset += length;
  }
}

function text(file: Uint8Array, field: Field): string {
  return new TextDecoder().decode(file.subarray(field.start, field.end));
}

function inside(file: Uint8Array, field: Field | undefined, number: number): Field[] {
  return field ? [...fields(file, field.start, field.end)].filter((item) => item.number === number) : [];
}

function first(file: Uint8Array, path: number[], outer: Field): Field | undefined {
  return path.reduce<Field | undefined>((field, number) => inside(file, field, number)[0], outer);
}

/** Inputs, outputs and metadata of a model. */
export interface ModelInfo {
  inputs: Port[];
  outputs: Port[];
  metadata: Record<string, string>;
}

/** Inputs, outputs and metadata of a model. */
export function readModel(file: Uint8Array): ModelInfo {
  const top = [...fields(file)];
  const graph = top.find((field) => field.number === MODEL.graph);
  if (!graph) throw new OnnxTrainError("The file is not an ONNX model: it has no graph.");
  const metadata: Record<string, string> = {};
  for (const entry of top.filter((field) => field.number === MODEL.metadata)) {
    const [key, value] = [inside(file, entry, 1)[0], inside(file, entry, 2)[0]];
    if (key) metadata[text(file, key)] = value ? text(file, value) : "";
  }
  const weights = new Set(inside(file, graph, GRAPH.initializer).map((tensor) => nameOf(file, tensor)));
  const ports = (number: number) => inside(file, graph, number).map((field) => port(file, field));
  const inputs = ports(GRAPH.input).filter((value) => !weights.has(value.name));
  return { inputs, outputs: ports(GRAPH.output), metadata };
}

function port(file: Uint8Array, field: Field): Port {
  const name = text(file, first(file, [1], field)!);
  const tensor = first(file, [2, 1], field); // ValueInfo.type.tensor_type
  const type = inside(file, tensor, 1)[0]?.value ?? 0;
  const shape = inside(file, inside(file, tensor, 2)[0], 1).map((dim) => {
    const [size, symbol] = [inside(file, dim, 1)[0], inside(file, dim, 2)[0]];
    return size ? size.value : symbol ? text(file, symbol) : null;
  });
  return { name, type: elementType("onnx", type).name, shape };
}

function nameOf(file: Uint8Array, tensor: Field): string {
  const name = inside(file, tensor, TENSOR.name)[0];
  return name ? text(file, name) : "";
}

const AT_HOME = "save a checkpoint and convert it with onnxtrain import-states";

/** Copy a model with new weights; all other bytes are unchanged. */
export function patchWeights(model: Uint8Array, weights: Tensors): Uint8Array {
  const file = new Uint8Array(model);
  const graph = [...fields(file)].find((field) => field.number === MODEL.graph);
  const missing = new Set(Object.keys(weights));
  for (const tensor of inside(file, graph, GRAPH.initializer)) {
    const name = nameOf(file, tensor);
    if (missing.delete(name)) patch(file, tensor, name, weights[name]!);
  }
  for (const name of missing) {
    throw new OnnxTrainError(`The weight '${name}' is not an initializer of the model; ${AT_HOME}.`);
  }
  return file;
}

function patch(file: Uint8Array, tensor: Field, name: string, { type, data }: Tensors[string]): void {
  const own = [...fields(file, tensor.start, tensor.end)];
  const of = (number: number) => own.filter((field) => field.number === number);
  const stored = elementType("onnx", of(TENSOR.type)[0]?.value ?? 0).name;
  if (stored !== type) throw new OnnxTrainError(`The weight '${name}' is ${stored} in the model and ${type} in training.`);
  if (of(TENSOR.location).some((field) => field.value === 1)) {
    throw new OnnxTrainError(
      `The weight '${name}' is in an external data file; ${AT_HOME}.`,
    );
  }
  const typed = { float32: TENSOR.float, float64: TENSOR.double }[type] ?? 0;
  const contents = of(TENSOR.raw).length ? of(TENSOR.raw).slice(-1) : of(typed);
  const bytes = bytesOf(data);
  const size = contents.reduce((sum, content) => sum + content.end - content.start, 0);
  if (size !== bytes.length) {
    throw new OnnxTrainError(
      `The weight '${name}' has ${size} bytes in the model and ${bytes.length} in training; is it another model?`,
    );
  }
  let offset = 0;
  for (const { start, end } of contents) {
    file.set(bytes.subarray(offset, offset + end - start), start);
    offset += end - start;
  }
}
