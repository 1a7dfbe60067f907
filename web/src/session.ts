/** The interface between a training and a runtime. */

import type { Port, Tensor, Tensors } from "./tensor.js";

/** The outputs of a step and the states that they update. */
export interface StatePlan {
  /** Output with a state's new value, by the state's name. */
  outputs: Record<string, string>;
  /** States that may be updated in place. */
  inPlace: Set<string>;
  /** The loss. */
  loss: Port;
}

/** A loaded model; its states stay in the runtime's memory. */
export interface Session {
  /** Set the states, which are fed to every run from now on. */
  hold(states: Tensors, plan: StatePlan): void;
  /** Run once, update the states and return the loss. */
  step(feeds: Tensors): Promise<number>;
  /** Run once without updating the states. */
  run(feeds: Tensors, results: readonly string[]): Promise<Tensors>;
  /** A copy of a state. */
  read(name: string): Promise<Tensor>;
  /** Set the value of a state. */
  write(name: string, value: Tensor): Promise<void>;
  close(): Promise<void>;
}

/** Loads models. */
export interface Runtime {
  open(model: Uint8Array, plan?: StatePlan): Promise<Session>;
}
