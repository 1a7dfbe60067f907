/** Dense tensors: element types, elements, rows. */

export type TypedArray =
  | Float32Array
  | Float64Array
  | Int8Array
  | Uint8Array
  | Int16Array
  | Uint16Array
  | Int32Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array;

/** A tensor with elements in row-major order; float16 and bfloat16 are stored as their bits. */
export interface Tensor {
  type: string;
  dims: number[];
  data: TypedArray;
}

export type Tensors = Record<string, Tensor>;

/** An array of a batch: values whose shape follows from the graph, or values with a shape. */
export type Values = TypedArray | readonly number[] | { data: TypedArray | readonly number[]; dims: readonly number[] };

/** An input or output of a graph; a dynamic axis is its name, or null. */
export interface Port {
  name: string;
  type: string;
  shape: (number | string | null)[];
}

/** An error with a one-sentence message. */
export class OnnxTrainError extends Error {
  override name = "OnnxTrainError";
}

type ArrayType = {
  new (length: number): TypedArray;
  new (buffer: ArrayBuffer, offset: number, length: number): TypedArray;
  BYTES_PER_ELEMENT: number;
};

interface ElementType {
  onnx: number;
  name: string;
  safetensors: string;
  array: ArrayType;
}

const TYPES: ElementType[] = [
  [1, "float32", "F32", Float32Array],
  [2, "uint8", "U8", Uint8Array],
  [3, "int8", "I8", Int8Array],
  [4, "uint16", "U16", Uint16Array],
  [5, "int16", "I16", Int16Array],
  [6, "int32", "I32", Int32Array],
  [7, "int64", "I64", BigInt64Array],
  [9, "bool", "BOOL", Uint8Array],
  [10, "float16", "F16", Uint16Array],
  [11, "float64", "F64", Float64Array],
  [12, "uint32", "U32", Uint32Array],
  [13, "uint64", "U64", BigUint64Array],
  [16, "bfloat16", "BF16", Uint16Array],
].map(([onnx, name, safetensors, array]) => ({ onnx, name, safetensors, array }) as ElementType);

/** Look up an element type by its name, its number in ONNX, or its name in safetensors. */
export function elementType(key: "name" | "onnx" | "safetensors", value: string | number): ElementType {
  const found = TYPES.find((type) => type[key] === value);
  if (!found) throw new OnnxTrainError(`The element type ${value} is not supported in a step graph.`);
  return found;
}

/** Map the values of an object. */
export function mapValues<From, To>(object: Record<string, From>, change: (value: From, name: string) => To): Record<string, To> {
  return Object.fromEntries(Object.entries(object).map(([name, value]) => [name, change(value, name)]));
}

/** An object with these names as keys. */
export function fromNames<To>(names: readonly string[], value: (name: string) => To): Record<string, To> {
  return Object.fromEntries(names.map((name) => [name, value(name)]));
}

/** Format a shape for messages. */
export function shapeText(shape: readonly (number | string | null)[]): string {
  return `[${shape.map((size) => size ?? "any").join(", ")}]`;
}

export function sizeOf(dims: readonly number[]): number {
  return dims.reduce((product, size) => product * size, 1);
}

export function zeros(type: string, dims: number[]): Tensor {
  return { type, dims, data: new (elementType("name", type).array)(sizeOf(dims)) };
}

export function bytesOf(data: ArrayBufferView): Uint8Array {
  return new Uint8Array(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
}

/** Copy elements from the beginning of some bytes. */
export function elements(type: string, bytes: Uint8Array): TypedArray {
  const { array } = elementType("name", type);
  const copy = new Uint8Array(bytes); // slice() of a Node Buffer would be a view
  return new array(copy.buffer as ArrayBuffer, 0, copy.byteLength / array.BYTES_PER_ELEMENT);
}

export function fitsShape(shape: Port["shape"], dims: readonly number[]): boolean {
  return shape.length === dims.length && shape.every((size, axis) => typeof size !== "number" || size === dims[axis]);
}

/** Convert the caller's values to a tensor of the type and shape of an input. */
export function toTensor(port: Port, values: Values): Tensor {
  const given = "dims" in values ? values.data : values;
  const dims = "dims" in values ? [...values.dims] : inferDims(port, given.length);
  if (!fitsShape(port.shape, dims) || sizeOf(dims) !== given.length) {
    throw new OnnxTrainError(
      `'${port.name}' has ${given.length} values of shape ${shapeText(dims)}, but the graph needs ${shapeText(port.shape)}.`,
    );
  }
  return { type: port.type, dims, data: converted(port, given) };
}

function inferDims(port: Port, length: number): number[] {
  const known = sizeOf(port.shape.filter((size) => typeof size === "number"));
  const free = port.shape.filter((size) => typeof size !== "number").length;
  if (free > 1) {
    throw new OnnxTrainError(`'${port.name}' has ${free} dynamic axes; pass it as {data, dims}.`);
  }
  const rest = known === 0 ? 0 : length / known;
  if (!Number.isInteger(rest)) {
    throw new OnnxTrainError(`'${port.name}' has ${length} values, which do not match the shape ${shapeText(port.shape)}.`);
  }
  return port.shape.map((size) => (typeof size === "number" ? size : rest));
}

function converted(port: Port, given: TypedArray | readonly number[]): TypedArray {
  const { array } = elementType("name", port.type);
  if (given instanceof array) return given as TypedArray;
  const result = new array(given.length);
  const big = result instanceof BigInt64Array || result instanceof BigUint64Array;
  for (let index = 0; index < given.length; index++) {
    const value = given[index]!;
    if (big && typeof value === "number" && !Number.isInteger(value)) {
      throw new OnnxTrainError(`'${port.name}' needs integers, but has ${value} at index ${index}.`);
    }
    result[index] = (big ? BigInt(value) : Number(value)) as never;
  }
  return result;
}

/** Some rows (slices along the first axis) of a tensor, in the order given. */
export function takeRows(tensor: Tensor, rows: ArrayLike<number>): Tensor {
  const width = sizeOf(tensor.dims.slice(1));
  const result = zeros(tensor.type, [rows.length, ...tensor.dims.slice(1)]);
  for (let index = 0; index < rows.length; index++) {
    const start = rows[index]! * width;
    result.data.set(tensor.data.subarray(start, start + width) as never, index * width);
  }
  return result;
}

/** Concatenate tensors along the first axis. */
export function concatenate(tensors: Tensor[]): Tensor {
  const [first] = tensors;
  if (!first || tensors.length === 1) return first!;
  const rows = tensors.reduce((sum, tensor) => sum + tensor.dims[0]!, 0);
  const result = zeros(first.type, [rows, ...first.dims.slice(1)]);
  let offset = 0;
  for (const tensor of tensors) {
    result.data.set(tensor.data as never, offset);
    offset += tensor.data.length;
  }
  return result;
}
