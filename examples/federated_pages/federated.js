/** A page of a federation: trains on the examples of a file, sends weights, goes on from the average of all pages. */

import { readSafetensors, StepGraph, writeSafetensors } from "./onnxtrain-web.js";

const element = (id) => document.getElementById(id);
const bytes = async (reply) => new Uint8Array(await reply.arrayBuffer());
/** Reloading the page keeps its name: the server counts the pages that join. */
const page = (sessionStorage.page ??= Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join(""));
let token = new URLSearchParams(location.hash.slice(1)).get("token");

function say(text, isError = false) {
  element("status").textContent = text;
  element("status").classList.toggle("error", isError);
}

/** Ask the server for what needs the join token. */
async function ask(path, options = {}) {
  const reply = await fetch(path, { ...options, headers: { Authorization: `Bearer ${token}` } });
  if (!reply.ok) throw Object.assign(new Error(await reply.text()), { status: reply.status });
  return reply;
}

/** Ask for weights, or send some: the number of rounds that are over, and the weights after them. */
async function exchange(query = "", weights = undefined) {
  try {
    const reply = await ask(`weights?page=${page}${query}`, weights && { method: "POST", body: writeSafetensors(weights) });
    return { round: Number(reply.headers.get("Round")), weights: readSafetensors(await bytes(reply)) };
  } catch (error) {
    if (error.status === 409 && weights) return exchange(); // this round ended without us
    throw error;
  }
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
    ({ round, weights } = await exchange(`&round=${round}&examples=${examples}`, await training.weights()));
  }
  await training.setWeights(weights);
  const { loss } = await training.evaluate(data);
  say(`Done: loss ${loss.toPrecision(3)} on the examples of this page.`);
}

async function start() {
  const settings = await (await ask("training.json")).json();
  const [graph, states, model] = await Promise.all(
    ["step.onnx", "states.safetensors", "model.onnx"].map(async (name) => bytes(await ask(name))),
  );
  const training = await StepGraph.load({ graph, states, model, runtime: settings.runtime, worker: true });
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
}

/** Start with the token of the address, or ask for it. */
async function join() {
  element("join").hidden = true;
  try {
    if (token) await start();
  } catch (error) {
    say(error.message, true);
    if (error.status !== 401) return;
    token = null;
  }
  if (token) return;
  element("join").hidden = false;
  if (!element("status").classList.contains("error")) say("Enter the join token that the server printed.");
}

element("join").onsubmit = (event) => {
  event.preventDefault();
  token = element("token").value.trim();
  say("Loading …");
  join();
};
join();
