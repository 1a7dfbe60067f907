/** Start the installed browser headless. */

import { chromium } from "playwright-core";

/** @param {string} executable - The browser's path. */
export function launch(executable, ...more) {
  return chromium.launch({ executablePath: executable, args: ["--no-sandbox", "--disable-dev-shm-usage", ...more] });
}

/** Open a page and record its errors. */
export async function open(browser, url) {
  const page = await browser.newPage({ viewport: { width: 900, height: 760 } });
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.goto(url);
  return { page, errors };
}
