/** Runs a step graph and the model, on this thread or in a worker that keeps the page responsive. */

import { type OrtPackage, PackageRuntime } from "./common.js";
import type { Runtime, Session, StatePlan } from "./session.js";
import { OnnxTrainError, type Tensors } from "./tensor.js";
import { wasmRuntime } from "./wasm.js";

/** Everything that an engine is created from. */
export interface EngineSettings {
  graph: Uint8Array;
  states: Tensors;
  plan: StatePlan;
  runtime?: string | OrtPackage | undefined;
  provider?: string | undefined;
  threads?: number | undefined;
}

/** The computing part of a training; its arguments and results can be posted between threads. */
export interface Engine {
  step(feeds: Tensors): Promise<number>;
  run(feeds: Tensors, results: readonly string[]): Promise<Tensors>;
  read(names: readonly string[]): Promise<Tensors>;
  write(states: Tensors): Promise<void>;
  /** Set the model that `predict` runs. */
  use(model: Uint8Array): Promise<void>;
  predict(inputs: Tensors, results: readonly string[]): Promise<Tensors>;
  close(): Promise<void>;
}

/** An engine on this thread. */
export class LocalEngine implements Engine {
  private model: Session | undefined;

  private constructor(
    private readonly runtime: Runtime,
    private readonly session: Session,
  ) {}

  static async open(settings: EngineSettings): Promise<LocalEngine> {
    const runtime = await findRuntime(settings);
    const session = await runtime.open(settings.graph, settings.plan);
    try {
      session.hold(settings.states, settings.plan);
    } catch (error) {
      await session.close();
      throw error;
    }
    return new LocalEngine(runtime, session);
  }

  step(feeds: Tensors): Promise<number> {
    return this.session.step(feeds);
  }

  run(feeds: Tensors, results: readonly string[]): Promise<Tensors> {
    return this.session.run(feeds, results);
  }

  async read(names: readonly string[]): Promise<Tensors> {
    const found: Tensors = {};
    for (const name of names) found[name] = await this.session.read(name);
    return found;
  }

  async write(states: Tensors): Promise<void> {
    for (const [name, value] of Object.entries(states)) await this.session.write(name, value);
  }

  async use(model: Uint8Array): Promise<void> {
    const opened = await this.runtime.open(model);
    await this.model?.close();
    this.model = opened;
  }

  predict(inputs: Tensors, results: readonly string[]): Promise<Tensors> {
    return this.model!.run(inputs, results);
  }

  async close(): Promise<void> {
    await this.model?.close();
    await this.session.close();
  }
}

async function findRuntime({ runtime, provider, threads }: EngineSettings): Promise<Runtime> {
  if (typeof runtime === "string") {
    if (!provider || provider === "wasm") return wasmRuntime(runtime, threads);
    const folder = runtime.endsWith("/") ? runtime : `${runtime}/`;
    const ort = await import(/* webpackIgnore: true */ /* @vite-ignore */ `${folder}ort.webgpu.min.mjs`);
    ort.env.wasm.wasmPaths = folder;
    return new PackageRuntime(ort, provider, threads);
  }
  return new PackageRuntime(runtime ?? (await import("onnxruntime-web")), provider, threads);
}

/** Messages to and from the worker. */
export interface Call {
  id: number;
  method: "open" | keyof Engine;
  arguments: unknown[];
}

export interface Answer {
  id: number;
  result?: unknown;
  error?: string;
}

const METHODS: (keyof Engine)[] = ["step", "run", "read", "write", "use", "predict", "close"];

/** An engine in a worker of its own. */
export async function workerEngine(settings: EngineSettings): Promise<Engine> {
  if (settings.runtime !== undefined && typeof settings.runtime !== "string") {
    throw new OnnxTrainError("A worker loads the runtime itself; pass the URL of onnxruntime-web's files as runtime.");
  }
  const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  const waiting = new Map<number, (answer: Answer) => void>();
  let calls = 0;
  worker.onmessage = ({ data }: MessageEvent<Answer>) => waiting.get(data.id)?.(data);
  worker.onerror = ({ message }) => {
    const error = `The worker stopped: ${message || "its program could not be loaded"}`;
    waiting.forEach((answer, id) => answer({ id, error }));
  };
  const call = (method: Call["method"], values: unknown[]) =>
    new Promise<unknown>((resolve, reject) => {
      const id = calls++;
      waiting.set(id, ({ result, error }) => {
        waiting.delete(id);
        if (error === undefined) resolve(result);
        else reject(new OnnxTrainError(error));
        if (method === "close" || (method === "open" && error !== undefined)) worker.terminate();
      });
      worker.postMessage({ id, method, arguments: values } satisfies Call);
    });
  await call("open", [settings]);
  return Object.fromEntries(
    METHODS.map((method) => [method, (...values: unknown[]) => call(method, values)]),
  ) as unknown as Engine;
}
