/** Train ONNX models in the browser and in Node: see {@link StepGraph}. */

export type { OrtPackage } from "./common.js";
export { patchWeights, readModel } from "./model.js";
export { readSafetensors, writeSafetensors } from "./safetensors.js";
export { StepGraph } from "./step_graph.js";
export type { FitOptions, FitResult, LoadOptions, Progress, Source, StepOptions } from "./step_graph.js";
export { OnnxTrainError } from "./tensor.js";
export type { Tensor, Tensors, TypedArray, Values } from "./tensor.js";
