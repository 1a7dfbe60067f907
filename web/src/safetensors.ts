/** Safetensors files: a JSON header, then the bytes of the tensors. */

import { bytesOf, elementType, elements, OnnxTrainError, sizeOf, type Tensors } from "./tensor.js";

const RESERVED = "__metadata__";

/** The tensors of a file by name. */
export function readSafetensors(file: Uint8Array): Tensors {
  const fail = (reason: string): never => {
    throw new OnnxTrainError(`The states are not a safetensors file: ${reason}.`);
  };
  if (file.byteLength < 8) fail("it is too short");
  const length = Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true));
  if (length > file.byteLength - 8) fail("its header is longer than the file");
  let header: Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }> = {};
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(file.subarray(8, 8 + length)));
  } catch {
    fail("its header is no JSON");
  }
  const tensors: Tensors = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === RESERVED) continue;
    const { name: type, array } = elementType("safetensors", entry.dtype);
    const [begin, end] = entry.data_offsets;
    const isInside = begin >= 0 && end <= file.byteLength - 8 - length;
    if (!isInside || end - begin !== sizeOf(entry.shape) * array.BYTES_PER_ELEMENT) {
      fail(`'${name}' lies outside of it`);
    }
    const data = elements(type, file.subarray(8 + length + begin, 8 + length + end));
    tensors[name] = { type, dims: entry.shape, data };
  }
  return tensors;
}

/** A file of tensors. */
export function writeSafetensors(tensors: Tensors): Uint8Array {
  const header: Record<string, object> = {};
  let offset = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    const end = offset + data.byteLength;
    header[name] = { dtype: elementType("name", type).safetensors, shape: dims, data_offsets: [offset, end] };
    offset = end;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const encoded = new Uint8Array(Math.ceil(text.length / 8) * 8).fill(0x20);
  encoded.set(text);
  const file = new Uint8Array(8 + encoded.length + offset);
  new DataView(file.buffer).setBigUint64(0, BigInt(encoded.length), true);
  file.set(encoded, 8);
  let position = 8 + encoded.length;
  for (const { data } of Object.values(tensors)) {
    file.set(bytesOf(data), position);
    position += data.byteLength;
  }
  return file;
}
