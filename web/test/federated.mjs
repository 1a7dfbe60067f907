/**
 * Opens the page of a federation once for every file of examples, and lets all of them take part:
 *
 *   node federated.mjs BROWSER URL EXAMPLES...
 *
 * Prints each page's final status, its table and the errors as JSON.
 */

import { launch, open } from "./browser.mjs";

const [executable, url, ...files] = process.argv.slice(2);
const status = (text) => document.getElementById("status").textContent.includes(text);
const browser = await launch(executable);
try {
  const opened = await Promise.all(files.map(() => open(browser, url)));
  await Promise.all(
    opened.map(async ({ page }, index) => {
      await page.waitForFunction(status, "Ready", { timeout: 60000 });
      await page.locator("#data").setInputFiles(files[index]);
    }),
  );
  const ended = () => /^Done|rror/.test(document.getElementById("status").textContent + document.getElementById("status").className);
  const pages = await Promise.all(
    opened.map(async ({ page, errors }) => {
      await page.waitForFunction(ended, null, { timeout: 120000 });
      const rows = await page.locator("#rounds tr").evaluateAll((all) => all.map((row) => [...row.cells].map((cell) => Number(cell.textContent))));
      return { said: await page.locator("#status").textContent(), rows, errors };
    }),
  );
  console.log(JSON.stringify({ pages }));
} finally {
  await browser.close();
}
