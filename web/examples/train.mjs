/**
 * Trains an exported step graph in Node and writes the tuned model.
 *
 *   npm install onnxtrain-web onnxruntime-node
 *   onnxtrain export model.onnx --loss softmax_cross_entropy --step-graph step.onnx --states states.safetensors
 *   node train.mjs model.onnx step.onnx states.safetensors batch.safetensors 0.01 20 tuned.onnx
 *
 * The batch has a tensor for every input of the model and for the target.
 */

import { readFile, writeFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import { readSafetensors, StepGraph } from "onnxtrain-web";

const [model, graph, states, batch, learningRate, steps, tuned] = process.argv.slice(2);

const training = await StepGraph.load({
  graph: await readFile(graph),
  states: await readFile(states),
  model: await readFile(model),
  runtime: ort,
  threads: 1,
});
const examples = readSafetensors(await readFile(batch));
for (let step = 0; step < Number(steps); step++) {
  console.log(await training.step(examples, { learningRate: Number(learningRate) }));
}
await writeFile(tuned, await training.save());
await training.close();
