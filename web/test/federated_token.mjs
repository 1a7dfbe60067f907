/**
 * Opens the page of a federation without a join token, and enters one after the other:
 *
 *   node federated_token.mjs BROWSER URL TOKENS...
 *
 * Prints the page's status before the first token and after each as JSON.
 */

import { launch, open } from "./browser.mjs";

const [executable, url, ...tokens] = process.argv.slice(2);
const browser = await launch(executable);
try {
  const { page } = await open(browser, url);
  const said = [];
  const listen = async () => {
    await page.waitForFunction(() => !/^Loading/.test(document.getElementById("status").textContent), null, { timeout: 60000 });
    said.push(await page.locator("#status").textContent());
  };
  await listen();
  for (const token of tokens) {
    await page.locator("#token").fill(token);
    await page.locator("#join button").click();
    await listen();
  }
  console.log(JSON.stringify(said));
} finally {
  await browser.close();
}
