/**
 * Draws digits on the page that `onnxtrain export --web` wrote, trains, and lets it recognize them:
 *
 *   node draw.mjs BROWSER PAGE PICTURES
 *
 * Prints the recognized digits, the page's status and the errors as JSON; screenshots and the model go to PICTURES.
 */

import { writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const [executable, folder, pictures] = process.argv.slice(2);
const root = dirname(dirname(fileURLToPath(import.meta.url)));

/** Digits as strokes, in a square from 0 to 100. */
const DIGITS = [
  [[50, 10, 25, 25, 20, 50, 25, 75, 50, 90, 75, 75, 80, 50, 75, 25, 50, 10]],
  [[35, 25, 52, 10, 52, 90]],
  [[22, 30, 35, 12, 60, 10, 75, 28, 65, 50, 22, 88, 80, 88]],
  [[25, 15, 60, 10, 72, 28, 48, 46, 75, 65, 62, 88, 22, 86]],
  [[62, 90, 62, 10, 18, 65, 84, 65]],
  [[75, 12, 30, 12, 27, 48, 62, 44, 76, 66, 60, 89, 24, 85]],
  [[65, 10, 35, 38, 25, 68, 45, 90, 70, 82, 72, 60, 50, 52, 28, 64]],
  [[20, 12, 78, 12, 45, 90]],
  [[50, 48, 28, 32, 38, 11, 62, 11, 72, 32, 50, 48, 26, 68, 36, 90, 64, 90, 74, 68, 50, 48]],
  [[72, 40, 50, 50, 30, 38, 32, 16, 55, 10, 72, 22, 72, 40, 64, 90]],
];

/** Shift and rotate a little: nobody draws the same digit twice. */
function strokes(digit, variant) {
  const [angle, dx, dy, scale] = [
    [0, 0, 0, 1],
    [0.1, 6, -4, 0.9],
    [-0.08, -5, 5, 0.85],
    [0.05, 3, 3, 1.05],
  ][variant];
  const turn = (x, y) => {
    const [u, v] = [(x - 50) * scale, (y - 50) * scale];
    return [50 + dx + u * Math.cos(angle) - v * Math.sin(angle), 50 + dy + u * Math.sin(angle) + v * Math.cos(angle)];
  };
  return DIGITS[digit].map((numbers) => Array.from({ length: numbers.length / 2 }, (_, i) => turn(numbers[2 * i], numbers[2 * i + 1])));
}

async function draw(page, digit, variant) {
  const box = await page.locator("#drawing").boundingBox();
  const at = ([x, y]) => [box.x + (x / 100) * box.width * 0.9 + 14, box.y + (y / 100) * box.height * 0.9 + 14];
  for (const stroke of strokes(digit, variant)) {
    await page.mouse.move(...at(stroke[0]));
    await page.mouse.down();
    for (const point of stroke.slice(1)) await page.mouse.move(...at(point), { steps: 4 });
    await page.mouse.up();
  }
}

const said = (page) => page.locator("#status").textContent();
const until = (page, text) =>
  page.waitForFunction((wanted) => document.getElementById("status").textContent.includes(wanted), text, { timeout: 60000 });

const server = await serve({ "": folder, ort: `${root}/node_modules/onnxruntime-web/dist` });
const browser = await launch(executable);
try {
  const { page, errors } = await open(browser, `${server.url}/index.html`);
  await until(page, "Ready");
  for (const variant of [0, 1, 2]) {
    for (let digit = 0; digit < 10; digit++) {
      await draw(page, digit, variant);
      await page.getByRole("button", { name: String(digit), exact: true }).click();
      await until(page, `${variant * 10 + digit + 1} examples`);
    }
  }
  await draw(page, 3, 3);
  await page.screenshot({ path: join(pictures, "before.png") });
  await page.getByRole("button", { name: "Train" }).click();
  // The page stays responsive while its worker trains.
  const frames = await page.evaluate(
    () =>
      new Promise((resolve) => {
        let count = 0;
        const tick = () => (document.getElementById("status").textContent.startsWith("Trained") ? resolve(count) : (count++, requestAnimationFrame(tick)));
        tick();
      }),
  );
  const trained = await said(page);
  const recognized = [];
  for (let digit = 0; digit < 10; digit++) {
    await page.getByRole("button", { name: "Clear" }).click();
    await draw(page, digit, 3);
    await page.waitForFunction(() => document.getElementById("guess").textContent !== "");
    recognized.push(Number(await page.locator("#guess").textContent()));
    if (digit === 3) await page.screenshot({ path: join(pictures, "after.png") });
  }
  const downloading = page.waitForEvent("download");
  await page.getByRole("button", { name: "Download the model" }).click();
  const stream = await (await downloading).createReadStream();
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  writeFileSync(join(pictures, "trained.onnx"), Buffer.concat(chunks));
  await page.getByRole("button", { name: "Keep" }).click();
  await until(page, "Kept");
  await page.reload();
  await until(page, "Ready");
  await page.getByRole("button", { name: "Resume" }).click();
  await until(page, "Resumed");
  console.log(JSON.stringify({ recognized, trained, frames, errors }));
} finally {
  await browser.close();
  server.close();
}
