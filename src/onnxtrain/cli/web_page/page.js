/** The page of `onnxtrain export --web`: draw or open examples, train on them, classify new drawings. */

import { readSafetensors, StepGraph } from "./onnxtrain-web.js";

const element = (id) => document.getElementById(id);
const settings = await (await fetch("training.json")).json();
const KEPT = settings.name;

let training;
let stopping;
let opened; // tensors of a data file
const examples = { pixels: [], labels: [] };
const losses = [];

function say(text, isError = false) {
  element("status").textContent = text;
  element("status").classList.toggle("error", isError);
}

/** Run a button's action and show its error. */
function guarded(work) {
  return async (...values) => {
    try {
      await work(...values);
    } catch (error) {
      say(error.message, true);
    }
  };
}

// --- Drawing

const pad = element("drawing");
const pen = pad.getContext("2d", { willReadFrequently: true });
let last;

function clear() {
  pen.fillStyle = "black";
  pen.fillRect(0, 0, pad.width, pad.height);
}

function place(event) {
  const box = pad.getBoundingClientRect();
  return [((event.clientX - box.left) * pad.width) / box.width, ((event.clientY - box.top) * pad.height) / box.height];
}

pad.addEventListener("pointerdown", (event) => {
  pad.setPointerCapture(event.pointerId);
  last = place(event);
});
pad.addEventListener("pointermove", (event) => {
  if (!last) return;
  const next = place(event);
  Object.assign(pen, { strokeStyle: "white", lineWidth: 22, lineCap: "round", lineJoin: "round" });
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(...next);
  pen.stroke();
  last = next;
});
pad.addEventListener(
  "pointerup",
  guarded(async () => {
    last = undefined;
    if (losses.length && !stopping) await recognize();
  }),
);

/** The drawing, centred, at the model's input size, from 0 (black) to 1 (white), normalized as in the model's training. */
function pixels() {
  const { height, width, mean = 0, std = 1 } = settings.image;
  const { data } = pen.getImageData(0, 0, pad.width, pad.height);
  let [left, top, right, bottom] = [pad.width, pad.height, -1, -1];
  for (let index = 0; index < data.length; index += 4) {
    if (data[index] < 64) continue;
    const [x, y] = [(index / 4) % pad.width, Math.floor(index / 4 / pad.width)];
    [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
  }
  if (right < 0) return undefined; // nothing was drawn
  const small = new OffscreenCanvas(width, height);
  const brush = small.getContext("2d");
  brush.imageSmoothingQuality = "high";
  const side = Math.max(right - left, bottom - top, 40) * 1.3;
  const [x, y] = [(left + right - side) / 2, (top + bottom - side) / 2];
  brush.fillRect(0, 0, width, height);
  brush.drawImage(pad, x, y, side, side, 0, 0, width, height);
  const shrunk = brush.getImageData(0, 0, width, height);
  const normalized = (_, index) => (shrunk.data[4 * index] / 255 - mean) / std;
  return { values: Float32Array.from({ length: width * height }, normalized), image: small };
}

async function collect(label) {
  const drawn = pixels();
  if (!drawn) return say("Draw something first.", true);
  examples.pixels.push(drawn.values);
  examples.labels.push(label);
  const picture = new Image();
  picture.src = URL.createObjectURL(await drawn.image.convertToBlob());
  picture.title = picture.alt = String(label);
  element("examples").append(picture);
  element("train").disabled = examples.labels.length < 2;
  say(`${examples.labels.length} examples.`);
  clear();
}

async function recognize() {
  const drawn = pixels();
  if (!drawn) return;
  const outputs = await training.predict({ [settings.input]: drawn.values });
  const scores = Array.from(Object.values(outputs)[0].data, Number);
  element("guess").textContent = String(scores.indexOf(Math.max(...scores)));
}

// --- Training

function data() {
  if (opened) return opened;
  const size = settings.image.height * settings.image.width;
  const all = new Float32Array(size * examples.pixels.length);
  examples.pixels.forEach((values, index) => all.set(values, index * size));
  return { [settings.input]: all, [settings.target]: examples.labels };
}

function drawCurve() {
  const canvas = element("curve");
  canvas.hidden = false;
  const pencil = canvas.getContext("2d");
  pencil.clearRect(0, 0, canvas.width, canvas.height);
  const highest = Math.max(...losses) || 1;
  pencil.strokeStyle = "#06c";
  pencil.lineWidth = 2;
  pencil.beginPath();
  losses.forEach((loss, index) => {
    const x = 8 + (index / Math.max(1, losses.length - 1)) * (canvas.width - 16);
    pencil.lineTo(x, canvas.height - 8 - (loss / highest) * (canvas.height - 30));
  });
  pencil.stroke();
  pencil.fillStyle = "#222";
  pencil.font = "13px system-ui, sans-serif";
  pencil.fillText(`loss ${losses.at(-1).toPrecision(3)} after ${losses.length} steps`, 10, 16);
}

async function train() {
  stopping = new AbortController();
  element("stop").hidden = false;
  element("train").disabled = true;
  try {
    await training.fit(data(), {
      epochs: settings.epochs,
      batchSize: settings.batchSize,
      learningRate: settings.learningRate,
      signal: stopping.signal,
      onProgress({ step, steps, loss }) {
        losses.push(loss);
        say(`Step ${step} of ${steps}, loss ${loss.toPrecision(3)}`);
        if (step % 10 === 0 || step === steps) drawCurve();
      },
    });
    const { loss, accuracy } = await training.evaluate(data());
    const share = accuracy === undefined ? "" : `, ${Math.round(100 * accuracy)} % of the examples right`;
    say(`Trained: loss ${loss.toPrecision(3)}${share}. ${settings.image ? "Draw something new." : ""}`);
    for (const id of ["save", "keep"]) element(id).disabled = false;
  } finally {
    stopping = undefined;
    element("stop").hidden = true;
    element("train").disabled = false;
  }
}

async function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await training.save()]));
  link.download = `${settings.name}-trained.onnx`;
  link.click();
}

async function open() {
  const [file] = element("data").files;
  opened = readSafetensors(new Uint8Array(await file.arrayBuffer()));
  element("train").disabled = false;
  say(`${file.name} is open.`);
}

// --- Start

clear();
element("clear").onclick = () => {
  clear();
  element("guess").textContent = "";
};
element("train").onclick = guarded(train);
element("stop").onclick = () => stopping?.abort();
element("save").onclick = guarded(download);
element("keep").onclick = guarded(async () => {
  await training.checkpoint(KEPT);
  element("recall").disabled = false;
  say("Kept in this browser.");
});
element("recall").onclick = guarded(async () => {
  await training.restore(KEPT);
  say("Resumed from the browser.");
});
element("data").onchange = guarded(open);

await guarded(async () => {
  const files = { graph: "step.onnx", states: "states.safetensors", model: "model.onnx" };
  training = await StepGraph.load({ ...files, runtime: settings.runtime, worker: true });
  element("recall").disabled = false;
  if (settings.image) {
    for (let label = 0; label < settings.classes; label++) {
      const button = document.createElement("button");
      button.textContent = String(label);
      button.onclick = guarded(() => collect(label));
      element("labels").append(button);
    }
    element("drawn").hidden = false;
  } else {
    element("names").textContent = Object.keys(training.feeds).filter((name) => training.feeds[name] !== "learning_rate").join(", ");
    element("file").hidden = false;
  }
  say("Ready.");
})();
