/** Sessions through the public API of ONNX Runtime's packages: onnxruntime-node, and onnxruntime-web with WebGPU. */

import type { Runtime, Session, StatePlan } from "./session.js";
import { fromNames, mapValues, type Tensor, type Tensors } from "./tensor.js";

/** The members of onnxruntime-common's Tensor that are used here. */
interface OrtTensor {
  readonly type: string;
  readonly dims: readonly number[];
  readonly data: unknown;
  readonly location?: string;
  getData(): Promise<unknown>;
  dispose(): void;
}

interface OrtSession {
  run(feeds: Record<string, OrtTensor>, results: readonly string[]): Promise<Record<string, OrtTensor>>;
  release(): Promise<void>;
}

/** The package: `import * as ort from "onnxruntime-node"`, or "onnxruntime-web/webgpu". */
export interface OrtPackage {
  Tensor: new (type: never, data: never, dims: readonly number[]) => unknown;
  InferenceSession: { create(model: Uint8Array, options?: object): Promise<unknown> };
}

/** A runtime from a package; `provider`, e.g. "webgpu", overrides the package's default. */
export class PackageRuntime implements Runtime {
  constructor(
    private readonly ort: OrtPackage,
    private readonly provider?: string,
    private readonly threads?: number,
  ) {}

  async open(model: Uint8Array, plan?: StatePlan): Promise<Session> {
    const onDevice = this.provider === "webgpu";
    const outputs = Object.values(plan?.outputs ?? {});
    const session = await this.ort.InferenceSession.create(model, {
      ...(this.provider && { executionProviders: [this.provider] }),
      ...(this.threads && { intraOpNumThreads: this.threads }),
      // States stay on the device.
      ...(onDevice && { preferredOutputLocation: fromNames(outputs, () => "gpu-buffer") }),
      logSeverityLevel: 3,
      extra: { optimization: { disable_specified_optimizers: "EliminateDropout" } },
    });
    return new PackageSession(this.ort, session as OrtSession);
  }
}

class PackageSession implements Session {
  private states: Record<string, OrtTensor> = {};
  private outputs: Record<string, string> = {};
  private loss = "";

  constructor(
    private readonly ort: OrtPackage,
    private readonly session: OrtSession,
  ) {}

  hold(states: Tensors, plan: StatePlan): void {
    this.states = this.converted(states);
    this.outputs = plan.outputs;
    this.loss = plan.loss.name;
  }

  async step(feeds: Tensors): Promise<number> {
    const { loss } = this;
    const results = await this.session.run(this.inputs(feeds), [loss, ...Object.values(this.outputs)]);
    for (const [name, output] of Object.entries(this.outputs)) {
      const old = this.states[name]!;
      this.states[name] = results[output]!;
      old.dispose();
    }
    return Number((results[loss]!.data as Float32Array)[0]);
  }

  async run(feeds: Tensors, names: readonly string[]): Promise<Tensors> {
    const results = await this.session.run(this.inputs(feeds), names);
    const found: Tensors = {};
    for (const name of names) found[name] = await taken(results[name]!);
    Object.values(results).forEach((tensor) => tensor.dispose());
    return found;
  }

  read(name: string): Promise<Tensor> {
    return taken(this.states[name]!);
  }

  async write(name: string, value: Tensor): Promise<void> {
    const old = this.states[name];
    Object.assign(this.states, this.converted({ [name]: value }));
    old?.dispose();
  }

  close(): Promise<void> {
    Object.values(this.states).forEach((tensor) => tensor.dispose()); // device tensors outlive their session
    return this.session.release();
  }

  private inputs(feeds: Tensors): Record<string, OrtTensor> {
    return { ...this.states, ...this.converted(feeds) };
  }

  private converted(tensors: Tensors): Record<string, OrtTensor> {
    return mapValues(
      tensors,
      ({ type, data, dims }) => new this.ort.Tensor(type as never, data.slice() as never, dims) as OrtTensor,
    );
  }
}

async function taken(tensor: OrtTensor): Promise<Tensor> {
  const data = (await tensor.getData()) as Tensor["data"];
  return { type: tensor.type, dims: [...tensor.dims], data: data.slice() as Tensor["data"] };
}
