/**
 * Sessions on the WebAssembly of onnxruntime-web.
 *
 * The package's own interface copies every tensor into the runtime's memory and every result out of it, at each run. Here
 * the states lie in that memory for good: they are tensors that are inputs and outputs at once, or two that take turns.
 * What is called is the C interface that the WebAssembly exports for the package's own use.
 */

import type { Runtime, Session, StatePlan } from "./session.js";
import { bytesOf, elements, elementType, fitsShape, OnnxTrainError, sizeOf, type Tensor, type Tensors } from "./tensor.js";

type Pointer = number;

/** What is used of the Emscripten module. */
interface Module {
  HEAPU8: Uint8Array;
  HEAPU32: Uint32Array;
  HEAP32: Int32Array;
  _malloc(bytes: number): Pointer;
  _free(place: Pointer): void;
  UTF8ToString(place: Pointer): string;
  _OrtInit(threads: number, severity: number): number;
  _OrtGetLastError(code: Pointer, message: Pointer): number;
  _OrtCreateSessionOptions(...settings: (number | boolean)[]): Pointer;
  _OrtReleaseSessionOptions(options: Pointer): number;
  _OrtAddSessionConfigEntry(options: Pointer, key: Pointer, value: Pointer): number;
  _OrtCreateSession(model: Pointer, bytes: number, options: Pointer): Pointer | Promise<Pointer>;
  _OrtReleaseSession(session: Pointer): number;
  _OrtCreateTensor(type: number, data: Pointer, bytes: number, dims: Pointer, rank: number, place: number): Pointer;
  _OrtGetTensorData(tensor: Pointer, type: Pointer, data: Pointer, dims: Pointer, rank: Pointer): number;
  _OrtReleaseTensor(tensor: Pointer): number;
  _OrtFree(place: Pointer): number;
  _OrtRun(
    session: Pointer,
    inputNames: Pointer,
    inputs: Pointer,
    inputCount: number,
    outputNames: Pointer,
    outputCount: number,
    outputs: Pointer,
    options: Pointer,
  ): number | Promise<number>;
}

const MODULE = "ort-wasm-simd-threaded.mjs";
const ON_CPU = 1;
const ERRORS = 3;
const ALL_OPTIMIZATIONS = 99;

const loaded = new Map<string, Promise<WasmRuntime>>();

/**
 * The runtime whose files lie in a folder: the `dist` of onnxruntime-web.
 *
 * @param folder - URL of the folder.
 * @param threads - Threads within an operator; more than one needs a page that is isolated from other origins.
 */
export async function wasmRuntime(folder: string, threads?: number): Promise<WasmRuntime> {
  if (threads! > 1 && !globalThis.crossOriginIsolated) {
    throw new OnnxTrainError(`${threads} threads need an isolated page: send it with COOP same-origin and COEP require-corp.`);
  }
  const base = folder.endsWith("/") ? folder : `${folder}/`;
  let runtime = loaded.get(base);
  if (!runtime) {
    runtime = start(base, threads ?? usualThreads());
    loaded.set(base, runtime);
    runtime.catch(() => loaded.delete(base));
  }
  return runtime;
}

function usualThreads(): number {
  if (!globalThis.crossOriginIsolated) return 1;
  return Math.max(1, Math.min(4, Math.ceil(globalThis.navigator.hardwareConcurrency / 2)));
}

async function start(base: string, numThreads: number): Promise<WasmRuntime> {
  const { default: create } = await import(/* webpackIgnore: true */ /* @vite-ignore */ base + MODULE);
  const module: Module = await create({ numThreads, locateFile: (name: string) => base + name });
  const runtime = new WasmRuntime(module);
  runtime.check(module._OrtInit(numThreads, ERRORS));
  return runtime;
}

/** The module and what is done with its memory. */
export class WasmRuntime implements Runtime {
  constructor(readonly module: Module) {}

  async open(model: Uint8Array): Promise<Session> {
    const { module } = this;
    const options = module._OrtCreateSessionOptions(ALL_OPTIMIZATIONS, true, true, 0, false, 0, 0, ERRORS, 0, 0);
    const places: Pointer[] = [];
    try {
      for (const text of ["optimization.disable_specified_optimizers", "EliminateDropout"]) places.push(this.text(text));
      this.check(module._OrtAddSessionConfigEntry(options, places[0]!, places[1]!));
      const place = this.put(model);
      places.push(place);
      const session = await module._OrtCreateSession(place, model.length, options);
      if (!session) this.fail();
      return new WasmSession(this, session);
    } finally {
      places.forEach((place) => module._free(place));
      module._OrtReleaseSessionOptions(options);
    }
  }

  /** Bytes in the runtime's memory. */
  put(bytes: Uint8Array): Pointer {
    const place = this.module._malloc(Math.max(bytes.length, 1));
    if (!place) throw new OnnxTrainError(`The runtime has no memory left for ${bytes.length} bytes.`);
    this.module.HEAPU8.set(bytes, place);
    return place;
  }

  text(text: string): Pointer {
    return this.put(new TextEncoder().encode(`${text}\0`));
  }

  words(words: readonly number[]): Pointer {
    return this.put(bytesOf(Uint32Array.from(words)));
  }

  word(place: Pointer): number {
    return this.module.HEAPU32[place / 4]!;
  }

  check(code: number): void {
    if (code !== 0) this.fail();
  }

  fail(): never {
    const place = this.words([0, 0]);
    this.module._OrtGetLastError(place, place + 4);
    const message = this.word(place + 4);
    this.module._free(place);
    throw new OnnxTrainError(`ONNX Runtime: ${message ? this.module.UTF8ToString(message) : "it failed"}`);
  }
}

/** A tensor in the runtime's memory. */
class Held {
  readonly bytes: number;
  readonly place: Pointer;
  readonly handle: Pointer;

  constructor(
    private readonly runtime: WasmRuntime,
    readonly type: string,
    readonly dims: number[],
  ) {
    const { onnx, array } = elementType("name", type);
    this.bytes = sizeOf(dims) * array.BYTES_PER_ELEMENT;
    this.place = runtime.put(new Uint8Array(this.bytes));
    const shape = runtime.words(dims);
    this.handle = runtime.module._OrtCreateTensor(onnx, this.place, this.bytes, shape, dims.length, ON_CPU);
    runtime.module._free(shape);
    if (!this.handle) {
      runtime.module._free(this.place);
      runtime.fail();
    }
  }

  fits({ type, dims }: Tensor): boolean {
    return type === this.type && fitsShape(this.dims, dims);
  }

  set({ data }: Tensor): this {
    this.runtime.module.HEAPU8.set(bytesOf(data), this.place);
    return this;
  }

  get(): Tensor {
    const bytes = this.runtime.module.HEAPU8.subarray(this.place, this.place + this.bytes);
    return { type: this.type, dims: this.dims, data: elements(this.type, bytes) };
  }

  release(): void {
    this.runtime.module._OrtReleaseTensor(this.handle);
    this.runtime.module._free(this.place);
  }
}

class WasmSession implements Session {
  private readonly names = new Map<string, Pointer>();
  private readonly feeds = new Map<string, Held>();
  private readonly states = new Map<string, [Held, Held]>();
  private readonly held = new Set<Held>(); // all that closing frees
  private outputs: [name: string, output: string][] = [];
  private inputs: string[] = [];
  private loss: { name: string; held: Held } | undefined;
  private turn: 0 | 1 = 0;

  constructor(
    private readonly runtime: WasmRuntime,
    private readonly session: Pointer,
  ) {}

  hold(states: Tensors, { outputs, inPlace, loss }: StatePlan): void {
    for (const [name, tensor] of Object.entries(states)) {
      const make = () => this.make(tensor.type, tensor.dims).set(tensor);
      const held = make();
      this.states.set(name, [held, name in outputs && !inPlace.has(name) ? make() : held]);
    }
    this.inputs = Object.keys(states);
    this.outputs = Object.entries(outputs);
    this.loss = { name: loss.name, held: this.make(loss.type, []) };
  }

  async step(feeds: Tensors): Promise<number> {
    const next = this.turn === 0 ? 1 : 0;
    const { name: loss, held } = this.loss!;
    const outputs: [string, Pointer][] = this.outputs.map(([name, output]) => [output, this.states.get(name)![next].handle]);
    await this.call(feeds, [[loss, held.handle], ...outputs]);
    this.turn = next;
    return Number(held.get().data[0]);
  }

  async run(feeds: Tensors, results: readonly string[]): Promise<Tensors> {
    const handles = await this.call(feeds, results.map((name) => [name, 0]));
    return Object.fromEntries(results.map((name, index) => [name, this.taken(handles[index]!)]));
  }

  async read(name: string): Promise<Tensor> {
    return this.state(name).get();
  }

  async write(name: string, value: Tensor): Promise<void> {
    this.state(name).set(value);
  }

  async close(): Promise<void> {
    this.held.forEach((tensor) => tensor.release());
    this.names.forEach((place) => this.runtime.module._free(place));
    this.runtime.module._OrtReleaseSession(this.session);
  }

  private make(type: string, dims: number[]): Held {
    const held = new Held(this.runtime, type, dims);
    this.held.add(held);
    return held;
  }

  private state(name: string): Held {
    return this.states.get(name)![this.turn];
  }

  private name(name: string): Pointer {
    let place = this.names.get(name);
    if (!place) this.names.set(name, (place = this.runtime.text(name)));
    return place;
  }

  /** A feed in the runtime's memory; its place stays while its shape does. */
  private feed(name: string, tensor: Tensor): Pointer {
    let held = this.feeds.get(name);
    if (!held?.fits(tensor)) {
      if (held && this.held.delete(held)) held.release();
      this.feeds.set(name, (held = this.make(tensor.type, tensor.dims)));
    }
    return held.set(tensor).handle;
  }

  /** Run with these outputs: tensors to write into, or 0 for new ones. Returns the tensors. */
  private async call(feeds: Tensors, outputs: readonly [string, Pointer][]): Promise<Pointer[]> {
    const { runtime } = this;
    const { module } = runtime;
    const inputs: [string, Pointer][] = Object.entries(feeds).map(([name, tensor]) => [name, this.feed(name, tensor)]);
    inputs.push(...this.inputs.map((name): [string, Pointer] => [name, this.state(name).handle]));
    const all = [...inputs, ...outputs];
    const names = runtime.words(all.map(([name]) => this.name(name)));
    const values = runtime.words(all.map(([, handle]) => handle));
    const [count, own] = [inputs.length, 4 * inputs.length];
    try {
      runtime.check(
        await module._OrtRun(this.session, names, values, count, names + own, outputs.length, values + own, 0),
      );
      return outputs.map((_, index) => runtime.word(values + own + 4 * index));
    } finally {
      module._free(names);
      module._free(values);
    }
  }

  /** A copy of a tensor that the runtime made, which is released. */
  private taken(handle: Pointer): Tensor {
    const { runtime } = this;
    const { module } = runtime;
    const place = runtime.words([0, 0, 0, 0]);
    try {
      runtime.check(module._OrtGetTensorData(handle, place, place + 4, place + 8, place + 12));
      const [type, data, shape, rank] = [0, 4, 8, 12].map((offset) => runtime.word(place + offset)) as [number, Pointer, Pointer, number];
      const dims = Array.from({ length: rank }, (_, axis) => runtime.word(shape + 4 * axis));
      module._OrtFree(shape);
      const { name, array } = elementType("onnx", type);
      const bytes = module.HEAPU8.subarray(data, data + sizeOf(dims) * array.BYTES_PER_ELEMENT);
      return { type: name, dims, data: elements(name, bytes) };
    } finally {
      module._free(place);
      module._OrtReleaseTensor(handle);
    }
  }
}
