/** A page of a federation: trains on the examples of a file, sends weights, goes on from the average of all pages. */

import { readSafetensors, StepGraph, writeSafetensors } from "./onnxtrain-web.js";

const element = (id) => document.getElementById(id);
const bytes = async (reply) => new Uint8Array(await reply.arrayBuffer());
const page = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function say(text, isError = false) {
  element("status").textContent = text;
  element("status").classList.toggle("error", isError);
}

/** Ask the server for weights, or send some: the number of rounds that are over, and the weights after them. */
async function exchange(query = "", weights = undefined) {
  const reply = await fetch(`weights${query}`, weights && { method: "POST", body: writeSafetensors(weights) });
  if (reply.status === 409 && weights) return exchange(); // this round ended without us
  if (!reply.ok) throw new Error(await reply.text());
  return { round: Number(reply.headers.get("Round")), weights: readSafetensors(await bytes(reply)) };
}

function show(round, ...losses) {
  const row = element("rounds").insertRow();
  for (const value of [round, ...losses.map((loss) => loss.toPrecision(3))]) row.insertCell().textContent = value;
}

async function takePart(training, settings, states, file) {
  const data = readSafetensors(await bytes(file));
  const examples = Object.values(data)[0].dims[0];
  let { round, weights } = await exchange();
  while (round < settings.rounds) {
    await training.restore(states); // the optimizer starts anew
    await training.setWeights(weights);
    const before = await training.evaluate(data);
    say(`Round ${round + 1} of ${settings.rounds}: training on ${examples} examples.`);
    const { epochs, batchSize, learningRate } = settings;
    await training.fit(data, { epochs, batchSize, learningRate, seed: round });
    const after = await training.evaluate(data);
    show(round + 1, before.loss, after.loss);
    say(`Round ${round + 1} of ${settings.rounds}: waiting for the other pages.`);
    ({ round, weights } = await exchange(`?page=${page}&round=${round}&examples=${examples}`, await training.weights()));
  }
  await training.setWeights(weights);
  const { loss } = await training.evaluate(data);
  say(`Done: loss ${loss.toPrecision(3)} on the examples of this page.`);
}

try {
  const settings = await (await fetch("training.json")).json();
  const states = await bytes(await fetch("states.safetensors"));
  const { runtime } = settings;
  const training = await StepGraph.load({ graph: "step.onnx", states, model: "model.onnx", runtime, worker: true });
  element("names").textContent = Object.keys(training.feeds).filter((name) => training.feeds[name] !== "learning_rate").join(", ");
  element("data").onchange = async ({ target }) => {
    target.disabled = true;
    try {
      await takePart(training, settings, states, target.files[0]);
    } catch (error) {
      say(error.message, true);
      target.disabled = false;
    }
  };
  element("data").disabled = false;
  say("Ready.");
} catch (error) {
  say(error.message, true);
}
