/** What a training needs of a runtime. */

import type { Port, Tensor, Tensors } from "./tensor.js";

/** Which states a step writes, and where. */
export interface StatePlan {
  /** The output that is a state's new value, by the state's name. */
  outputs: Record<string, string>;
  /** The states whose new value may be written where the old one stands. */
  inPlace: Set<string>;
  /** The loss. */
  loss: Port;
}

/** A model that is loaded; the states that it holds stay in the runtime's memory. */
export interface Session {
  /** Take the states: from now on they are fed to every run. */
  hold(states: Tensors, plan: StatePlan): void;
  /** Run once; the states take their new values. Returns the loss. */
  step(feeds: Tensors): Promise<number>;
  /** Run once and keep the states as they are. */
  run(feeds: Tensors, results: readonly string[]): Promise<Tensors>;
  /** A copy of a state. */
  read(name: string): Promise<Tensor>;
  /** Give a state another value. */
  write(name: string, value: Tensor): Promise<void>;
  close(): Promise<void>;
}

/** Something that loads models. */
export interface Runtime {
  open(model: Uint8Array, plan?: StatePlan): Promise<Session>;
}
