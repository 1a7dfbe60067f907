/** A training: a step graph, its states, and the model that they belong to. */

import type { OrtPackage } from "./common.js";
import { type Engine, type EngineSettings, LocalEngine, workerEngine } from "./engine.js";
import { type ModelInfo, patchWeights, readModel } from "./model.js";
import { generator, permutation } from "./random.js";
import { readSafetensors, writeSafetensors } from "./safetensors.js";
import { keep, recall } from "./store.js";
import {
  concatenate,
  fitsShape,
  fromNames,
  mapValues,
  OnnxTrainError,
  type Port,
  shapeText,
  sizeOf,
  takeRows,
  type Tensor,
  type Tensors,
  toTensor,
  type Values,
} from "./tensor.js";

/** A file: its bytes, or its URL. */
export type Source = string | URL | ArrayBuffer | Uint8Array;

export interface LoadOptions {
  /** The step graph that `onnxtrain export --step-graph` wrote. */
  graph: Source;
  /** The initial values of its states: `--states`. */
  states: Source;
  /** The model itself, for `predict`, `evaluate` with accuracy, and `save`. */
  model?: Source;
  /**
   * The URL of onnxruntime-web's files (its `dist` folder), whose WebAssembly is then called directly, without copying
   * states; or an ONNX Runtime package, such as `import * as ort from "onnxruntime-node"`. By default the package
   * onnxruntime-web.
   */
  runtime?: string | URL | OrtPackage;
  /** The runtime's provider: "wasm" (the default in a browser), "webgpu" for graphs exported with `--portable webgpu`. */
  provider?: string;
  /** Intra-op threads. */
  threads?: number;
  /** Compute in a worker, so that the page stays responsive; requires `runtime` as a URL. */
  worker?: boolean;
}

export interface StepOptions {
  learningRate?: number;
}

/** Progress of a training. */
export interface Progress {
  epoch: number;
  /** Completed steps over all epochs. */
  step: number;
  steps: number;
  /** The loss of this step before its update. */
  loss: number;
}

export interface FitOptions {
  learningRate?: number | ((step: number) => number);
  epochs?: number;
  batchSize?: number;
  /** Whether examples are shuffled in every epoch. */
  shuffle?: boolean;
  /** Seed of the shuffling. */
  seed?: number;
  onProgress?: (progress: Progress) => void;
  /** Stops the training after the current step. */
  signal?: AbortSignal;
}

export interface FitResult {
  /** The mean loss of every completed epoch. */
  losses: number[];
  steps: number;
}

type Role = "batch" | "target" | "learning_rate";

interface Description {
  version: number;
  feeds: Record<string, Role>;
  states: Record<string, "parameter" | "statistic" | "optimizer" | "count">;
  loss: string | null;
}

const VERSION = 1;
const FRAME = 16; // milliseconds between yields to the page

export class StepGraph {
  private stale = true; // `predict` has outdated weights
  private closed: Promise<void> | undefined;

  private constructor(
    private readonly opened: Engine,
    private readonly info: ModelInfo,
    private readonly description: Description,
    private readonly shapes: Record<string, Port>,
    private readonly model: Uint8Array | undefined,
    private readonly modelInfo: ModelInfo | undefined,
  ) {}

  /** Load a training. */
  static async load(options: LoadOptions): Promise<StepGraph> {
    const [graph, states, model] = await Promise.all([options.graph, options.states, options.model].map(bytes));
    const info = readModel(graph!);
    const modelInfo = model && readModel(model);
    const description = describe(info);
    const values = readSafetensors(states!);
    const inputs = portsBy(info.inputs, (port) => port);
    const shapes: Record<string, Port> = {};
    for (const name of Object.keys(description.states)) {
      const value = values[name];
      if (!value) throw new OnnxTrainError(`The states have no '${name}', which the step graph needs.`);
      shapes[name] = inputs[name] ?? { name, type: value.type, shape: value.dims };
      checkState(shapes[name], value);
    }
    const listed = (key: string) => JSON.parse(info.metadata[`onnxtrain.${key}`] ?? "[]");
    const outputs = listed("states");
    const inPlace = new Set<string>(listed("in_place"));
    const loss = info.outputs.find((port) => port.name === description.loss);
    if (!loss) throw new OnnxTrainError("The step graph has no loss output; export it again.");
    const settings: EngineSettings = {
      graph: graph!,
      states: pick(values, Object.keys(shapes).filter((name) => name in inputs || name in outputs)),
      plan: { outputs, inPlace, loss },
      runtime: options.runtime instanceof URL ? options.runtime.href : options.runtime,
      provider: options.provider,
      threads: options.threads,
    };
    if (typeof settings.runtime === "string" && globalThis.location) {
      settings.runtime = new URL(settings.runtime, location.href).href; // a worker resolves URLs relative to its own script
    }
    const engine = await (options.worker ? workerEngine(settings) : LocalEngine.open(settings));
    return new StepGraph(engine, info, description, shapes, model, modelInfo);
  }

  /** The inputs of a step: each name with its kind. */
  get feeds(): Record<string, Role> {
    return { ...this.description.feeds };
  }

  /** One training step on a batch; returns the loss before the update. */
  async step(batch: Record<string, Values>, options: StepOptions = {}): Promise<number> {
    return this.stepTensors(this.tensors(batch), options.learningRate);
  }

  /** Train on examples: the inputs and the target, each with one row per example. */
  async fit(data: Record<string, Values>, options: FitOptions = {}): Promise<FitResult> {
    const { epochs = 1, batchSize = 32, shuffle = true, seed = 0, onProgress, signal, learningRate } = options;
    const all = this.tensors(data, true);
    const count = rowsOf(all);
    const size = this.fixedRows() ?? batchSize;
    const perEpoch = this.fixedRows() ? Math.floor(count / size) : Math.ceil(count / size);
    if (!perEpoch) throw new OnnxTrainError(`There are ${count} examples, but every step takes ${size}.`);
    const random = generator(seed);
    const losses: number[] = [];
    let step = 0;
    let yielded = performance.now();
    for (let epoch = 0; epoch < epochs; epoch++) {
      const order = shuffle ? permutation(count, random) : Uint32Array.from({ length: count }, (_, index) => index);
      let [sum, seen] = [0, 0];
      for (let batch = 0; batch < perEpoch; batch++) {
        if (signal?.aborted) return { losses, steps: step };
        const rows = order.subarray(batch * size, (batch + 1) * size);
        const feeds = mapValues(all, (tensor) => takeRows(tensor, rows));
        const rate = typeof learningRate === "function" ? learningRate(step) : learningRate;
        const loss = await this.stepTensors(feeds, rate);
        step++;
        sum += loss * rows.length;
        seen += rows.length;
        onProgress?.({ epoch, step, steps: epochs * perEpoch, loss });
        if (performance.now() - yielded > FRAME) {
          await new Promise((resolve) => setTimeout(resolve));
          yielded = performance.now();
        }
      }
      losses.push(sum / seen);
    }
    return { losses, steps: step };
  }

  /**
   * The mean loss on examples, without training; with a model and class indices as target also the accuracy.
   * Layers run in training mode.
   */
  async evaluate(data: Record<string, Values>, { batchSize = 256 } = {}): Promise<{ loss: number; accuracy?: number }> {
    const all = this.tensors(data, true);
    const loss = this.description.loss!;
    let [sum, seen] = [0, 0];
    for (const feeds of batches(all, this.fixedRows() ?? batchSize, this.fixedRows() !== undefined)) {
      const rows = rowsOf(feeds);
      const results = await this.engine.run({ ...feeds, ...this.rates(0) }, [loss]);
      sum += Number(results[loss]!.data[0]) * rows;
      seen += rows;
    }
    const target = all[this.names("target")[0] ?? ""];
    const isClassified = target?.type === "int64" && target.dims.length === 1;
    if (!this.model || !isClassified) return { loss: sum / seen };
    const scores = Object.values(await this.predict(pick(all, this.names("batch")), { batchSize }))[0]!;
    return { loss: sum / seen, accuracy: accuracy(scores, target) };
  }

  /** The model's outputs for some inputs, with the current weights. */
  async predict(inputs: Record<string, Values>, { batchSize = 256 } = {}): Promise<Tensors> {
    const info = this.modelInfo;
    if (!info) throw new OnnxTrainError("predict needs the model; give it to StepGraph.load.");
    if (this.stale) {
      await this.engine.use(await this.save());
      this.stale = false;
    }
    const tensors = portsBy(info.inputs, (port) => toTensor(port, required(inputs, port.name)));
    const names = info.outputs.map((port) => port.name);
    const parts: Tensors[] = [];
    for (const feeds of batches(tensors, fixedRows(info.inputs) ?? batchSize, false)) {
      parts.push(await this.engine.predict(feeds, names));
    }
    return fromNames(names, (name) => concatenate(parts.map((part) => part[name]!)));
  }

  /** The trained values of the model by name. */
  async weights(): Promise<Tensors> {
    return this.engine.read(this.weightNames());
  }

  /** Set the values of some weights. */
  async setWeights(weights: Tensors): Promise<void> {
    const known = new Set(this.weightNames());
    for (const [name, value] of Object.entries(weights)) {
      if (!known.has(name)) throw new OnnxTrainError(`There is no weight '${name}'; there are ${[...known].join(", ")}.`);
      checkState(this.shapes[name]!, value);
    }
    await this.engine.write(weights);
    this.stale = true;
  }

  /** Return all states as safetensors, for `restore`; with a name, also store them in the browser. */
  async checkpoint(name?: string): Promise<Uint8Array> {
    const file = writeSafetensors(await this.engine.read(Object.keys(this.shapes)));
    if (name !== undefined) await keep(name, file);
    return file;
  }

  /** Restore a checkpoint: its bytes, or its name in the browser. */
  async restore(checkpoint: Uint8Array | string): Promise<void> {
    const file = typeof checkpoint === "string" ? await recall(checkpoint) : checkpoint;
    if (!file) throw new OnnxTrainError(`The browser has no checkpoint '${checkpoint}'.`);
    const states = readSafetensors(file);
    for (const [name, shape] of Object.entries(this.shapes)) checkState(shape, required(states, name));
    await this.engine.write(pick(states, Object.keys(this.shapes)));
    this.stale = true;
  }

  /** The model with its trained weights; all other bytes are unchanged. */
  async save(): Promise<Uint8Array> {
    if (!this.model) throw new OnnxTrainError("save needs the model; give it to StepGraph.load.");
    return patchWeights(this.model, await this.weights());
  }

  /** Free the runtime's memory. */
  close(): Promise<void> {
    return (this.closed ??= this.opened.close());
  }

  private get engine(): Engine {
    if (this.closed) throw new OnnxTrainError("The training is closed; load it again.");
    return this.opened;
  }

  private async stepTensors(feeds: Tensors, learningRate: number | undefined): Promise<number> {
    this.stale = true;
    return this.engine.step({ ...feeds, ...this.rates(learningRate) });
  }

  private names(role: Role): string[] {
    return Object.keys(this.description.feeds).filter((name) => this.description.feeds[name] === role);
  }

  private weightNames(): string[] {
    const { states } = this.description;
    return Object.keys(states).filter((name) => ["parameter", "statistic"].includes(states[name]!));
  }

  private port(name: string): Port {
    return this.info.inputs.find((port) => port.name === name)!;
  }

  private rates(learningRate: number | undefined): Tensors {
    return fromNames(this.names("learning_rate"), (name) => {
      if (learningRate === undefined) throw new OnnxTrainError("A step needs a learningRate.");
      return toTensor(this.port(name), [learningRate]);
    });
  }

  /** The feeds of a batch, or of all examples, whose number may differ from the graph's batch size. */
  private tensors(batch: Record<string, Values>, anyRows = false): Tensors {
    const names = [...this.names("batch"), ...this.names("target")];
    return fromNames(names, (name) => {
      const port = this.port(name);
      const free = anyRows ? { ...port, shape: [null, ...port.shape.slice(1)] } : port;
      const tensor = toTensor(free, required(batch, name));
      this.checkLabels(name, tensor);
      return tensor;
    });
  }

  /** Reject class indices beyond the classes of the model's only output, if the model is loaded. */
  private checkLabels(name: string, { type, data }: Tensor): void {
    const outputs = this.modelInfo?.outputs ?? [];
    const classes = outputs[0]?.shape[1];
    if (this.description.feeds[name] !== "target" || type !== "int64" || outputs.length !== 1) return;
    if (typeof classes !== "number") return;
    for (const label of data) {
      if (label < classes) continue;
      throw new OnnxTrainError(`The target '${name}' has the label ${label}; the model has ${classes} classes, from 0.`);
    }
  }

  /** The batch size, if the graph fixes it. */
  private fixedRows(): number | undefined {
    return fixedRows(this.names("batch").map((name) => this.port(name)));
  }
}

async function bytes(source: Source | undefined): Promise<Uint8Array | undefined> {
  if (source === undefined || source instanceof Uint8Array) return source;
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  const name = String(source);
  if (!globalThis.location && !/^(https?|data|blob):/.test(name)) return readLocal(source);
  let response: Response;
  try {
    response = await fetch(source);
  } catch (error) {
    throw new OnnxTrainError(`${name} cannot be fetched: ${(error as Error).message}`);
  }
  if (!response.ok) throw new OnnxTrainError(`${source} cannot be fetched: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

/** Read a file by its path, where there is no page: in Node. */
async function readLocal(source: string | URL): Promise<Uint8Array> {
  const module = "node:fs/promises"; // a name that bundlers for browsers do not resolve
  try {
    const { readFile } = await import(/* webpackIgnore: true */ /* @vite-ignore */ module);
    return await readFile(source instanceof URL || !source.startsWith("file:") ? source : new URL(source));
  } catch (error) {
    throw new OnnxTrainError(`${source} cannot be read: ${(error as Error).message}`);
  }
}

function describe(info: ModelInfo): Description {
  const text = info.metadata["onnxtrain.step"];
  if (!text) throw new OnnxTrainError("The model is not a step graph: its metadata has no 'onnxtrain.step'.");
  const description: Description = JSON.parse(text);
  if (description.version > VERSION) {
    throw new OnnxTrainError(`The step graph has version ${description.version}, this package reads ${VERSION}; update it.`);
  }
  return description;
}

function checkState({ name, type, shape }: Port, value: Tensor): void {
  if (type !== value.type || !fitsShape(shape, value.dims) || sizeOf(value.dims) !== value.data.length) {
    const found = `${value.type}${shapeText(value.dims)}`;
    throw new OnnxTrainError(`The state '${name}' is ${type}${shapeText(shape)}, but its value is ${found}.`);
  }
}

function required<Value>(values: Record<string, Value>, name: string): Value {
  const value = values[name];
  if (value === undefined) throw new OnnxTrainError(`'${name}' is missing; there are ${Object.keys(values).join(", ") || "none"}.`);
  return value;
}

function pick(tensors: Tensors, names: string[]): Tensors {
  return fromNames(names, (name) => tensors[name]!);
}

function portsBy<Value>(ports: Port[], value: (port: Port) => Value): Record<string, Value> {
  return Object.fromEntries(ports.map((port) => [port.name, value(port)]));
}

function fixedRows(ports: Port[]): number | undefined {
  const rows = ports[0]?.shape[0];
  return typeof rows === "number" ? rows : undefined;
}

function rowsOf(tensors: Tensors): number {
  const counts = Object.entries(tensors).map(([name, tensor]) => [name, tensor.dims[0] ?? 1] as const);
  const [first] = counts;
  const other = counts.find(([, rows]) => rows !== first![1]);
  if (other) throw new OnnxTrainError(`'${first![0]}' has ${first![1]} examples and '${other[0]}' ${other[1]}.`);
  return first![1];
}

function* batches(tensors: Tensors, size: number, onlyWhole: boolean): Generator<Tensors> {
  const count = rowsOf(tensors);
  for (let start = 0; start < count && !(onlyWhole && start + size > count); start += size) {
    const rows = Uint32Array.from({ length: Math.min(size, count - start) }, (_, index) => start + index);
    yield mapValues(tensors, (tensor) => takeRows(tensor, rows));
  }
}

/** The fraction of rows whose largest score is at the target's index. */
function accuracy(scores: Tensor, target: Tensor): number {
  const classes = scores.dims[1]!;
  let right = 0;
  for (let row = 0; row < target.data.length; row++) {
    const own = Array.from(scores.data.subarray(row * classes, (row + 1) * classes), Number);
    if (own.indexOf(Math.max(...own)) === Number(target.data[row])) right++;
  }
  return right / target.data.length;
}
