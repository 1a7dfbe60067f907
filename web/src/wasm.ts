/**
 * Sessions on the WebAssembly of onnxruntime-web.
 *
 * The package's public API copies every input into the runtime's memory, and every result out of it, at each run. Here
 * the states stay in that memory: each is one tensor bound as input and output, or two that alternate. The functions are
 * the C API that the WebAssembly exports for the package itself.
 */

import type { Runtime, Session, StatePlan } from "./session.js";
import { bytesOf, elements, elementType, fitsShape, OnnxTrainError, sizeOf, type Tensor, type Tensors } from "./tensor.js";

type Pointer = number;

/** The members of the Emscripten module that are used here. */
interface Module {
  HEAPU8: Uint8Array;
  HEAPU32: Uint32Array;
  HEAP32: Int32Array;
  _malloc(bytes: number): Pointer;
  _free(address: Pointer): void;
  UTF8ToString(address: Pointer): string;
  _OrtInit(threads: number, severity: number): number;
  _OrtGetLastError(code: Pointer, message: Pointer): number;
  _OrtCreateSessionOptions(...settings: (number | boolean)[]): Pointer;
  _OrtReleaseSessionOptions(options: Pointer): number;
  _OrtAddSessionConfigEntry(options: Pointer, key: Pointer, value: Pointer): number;
  _OrtCreateSession(model: Pointer, bytes: number, options: Pointer): Pointer | Promise<Pointer>;
  _OrtReleaseSession(session: Pointer): number;
  _OrtCreateTensor(type: number, data: Pointer, bytes: number, dims: Pointer, rank: number, location: number): Pointer;
  _OrtGetTensorData(tensor: Pointer, type: Pointer, data: Pointer, dims: Pointer, rank: Pointer): number;
  _OrtReleaseTensor(tensor: Pointer): number;
  _OrtFree(address: Pointer): number;
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
 * Load the runtime from a folder: the `dist` of onnxruntime-web.
 *
 * @param folder - URL of the folder.
 * @param threads - Intra-op threads; more than one requires a cross-origin isolated page.
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

/** The module, with access to its memory. */
export class WasmRuntime implements Runtime {
  constructor(readonly module: Module) {}

  async open(model: Uint8Array): Promise<Session> {
    const { module } = this;
    const options = module._OrtCreateSessionOptions(ALL_OPTIMIZATIONS, true, true, 0, false, 0, 0, ERRORS, 0, 0);
    const addresses: Pointer[] = [];
    try {
      for (const text of ["optimization.disable_specified_optimizers", "EliminateDropout"]) addresses.push(this.text(text));
      this.check(module._OrtAddSessionConfigEntry(options, addresses[0]!, addresses[1]!));
      const address = this.put(model);
      addresses.push(address);
      const session = await module._OrtCreateSession(address, model.length, options);
      if (!session) this.fail();
      return new WasmSession(this, session);
    } finally {
      addresses.forEach((address) => module._free(address));
      module._OrtReleaseSessionOptions(options);
    }
  }

  /** Copy bytes into the runtime's memory. */
  put(bytes: Uint8Array): Pointer {
    const address = this.module._malloc(Math.max(bytes.length, 1));
    if (!address) throw new OnnxTrainError(`The runtime is out of memory for ${bytes.length} bytes.`);
    this.module.HEAPU8.set(bytes, address);
    return address;
  }

  text(text: string): Pointer {
    return this.put(new TextEncoder().encode(`${text}\0`));
  }

  words(words: readonly number[]): Pointer {
    return this.put(bytesOf(Uint32Array.from(words)));
  }

  word(address: Pointer): number {
    return this.module.HEAPU32[address / 4]!;
  }

  check(code: number): void {
    if (code !== 0) this.fail();
  }

  fail(): never {
    const address = this.words([0, 0]);
    this.module._OrtGetLastError(address, address + 4);
    const message = this.word(address + 4);
    this.module._free(address);
    throw new OnnxTrainError(`ONNX Runtime: ${message ? this.module.UTF8ToString(message) : "it failed"}`);
  }
}

/** A tensor in the runtime's memory. */
class Held {
  readonly bytes: number;
  readonly address: Pointer;
  readonly handle: Pointer;

  constructor(
    private readonly runtime: WasmRuntime,
    readonly type: string,
    readonly dims: number[],
  ) {
    const { onnx, array } = elementType("name", type);
    this.bytes = sizeOf(dims) * array.BYTES_PER_ELEMENT;
    this.address = runtime.put(new Uint8Array(this.bytes));
    const shape = runtime.words(dims);
    this.handle = runtime.module._OrtCreateTensor(onnx, this.address, this.bytes, shape, dims.length, ON_CPU);
    runtime.module._free(shape);
    if (!this.handle) {
      runtime.module._free(this.address);
      runtime.fail();
    }
  }

  fits({ type, dims }: Tensor): boolean {
    return type === this.type && fitsShape(this.dims, dims);
  }

  set({ data }: Tensor): this {
    this.runtime.module.HEAPU8.set(bytesOf(data), this.address);
    return this;
  }

  get(): Tensor {
    const bytes = this.runtime.module.HEAPU8.subarray(this.address, this.address + this.bytes);
    return { type: this.type, dims: this.dims, data: elements(this.type, bytes) };
  }

  release(): void {
    this.runtime.module._OrtReleaseTensor(this.handle);
    this.runtime.module._free(this.address);
  }
}

class WasmSession implements Session {
  private readonly names = new Map<string, Pointer>();
  private readonly feeds = new Map<string, Held>();
  private readonly states = new Map<string, [Held, Held]>();
  private readonly held = new Set<Held>(); // freed on close
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
    this.names.forEach((address) => this.runtime.module._free(address));
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
    let address = this.names.get(name);
    if (!address) this.names.set(name, (address = this.runtime.text(name)));
    return address;
  }

  /** A feed in the runtime's memory, reused while its shape stays the same. */
  private feed(name: string, tensor: Tensor): Pointer {
    let held = this.feeds.get(name);
    if (!held?.fits(tensor)) {
      if (held && this.held.delete(held)) held.release();
      this.feeds.set(name, (held = this.make(tensor.type, tensor.dims)));
    }
    return held.set(tensor).handle;
  }

  /** Run with these outputs: tensors to write to, or 0 to allocate them. Returns the tensors. */
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

  /** Copy a tensor allocated by the runtime and release it. */
  private taken(handle: Pointer): Tensor {
    const { runtime } = this;
    const { module } = runtime;
    const address = runtime.words([0, 0, 0, 0]);
    try {
      runtime.check(module._OrtGetTensorData(handle, address, address + 4, address + 8, address + 12));
      const [type, data, shape, rank] = [0, 4, 8, 12].map((offset) => runtime.word(address + offset)) as [number, Pointer, Pointer, number];
      const dims = Array.from({ length: rank }, (_, axis) => runtime.word(shape + 4 * axis));
      module._OrtFree(shape);
      const { name, array } = elementType("onnx", type);
      const bytes = module.HEAPU8.subarray(data, data + sizeOf(dims) * array.BYTES_PER_ELEMENT);
      return { type: name, dims, data: elements(name, bytes) };
    } finally {
      module._free(address);
      module._OrtReleaseTensor(handle);
    }
  }
}
