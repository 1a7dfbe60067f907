/** A test server of local folders, selected by the first component of the path. */

import { createReadStream, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";

const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".wasm": "application/wasm",
  ".json": "application/json",
};

/**
 * @param {Record<string, string>} folders - Folders by the name under which they are served; "" is the root.
 * @param {boolean} isolated - Whether pages are cross-origin isolated, as threads require.
 */
export async function serve(folders, { isolated = false, blank = "" } = {}) {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname)).slice(1);
    const [name, ...rest] = path.split("/");
    const file = name in folders && rest.length ? join(folders[name], ...rest) : join(folders[""] ?? "", path || "index.html");
    const headers = { "Cache-Control": "no-store" };
    if (isolated) {
      headers["Cross-Origin-Opener-Policy"] = "same-origin";
      headers["Cross-Origin-Embedder-Policy"] = "require-corp";
    }
    if (blank && path === blank) {
      response.writeHead(200, { ...headers, "Content-Type": TYPES[".html"] }).end('<!doctype html><link rel="icon" href="data:," />');
      return;
    }
    try {
      if (!statSync(file).isFile()) throw new Error("no file");
      response.writeHead(200, { ...headers, "Content-Type": TYPES[extname(file)] ?? "application/octet-stream" });
      createReadStream(file).pipe(response);
    } catch {
      response.writeHead(404, headers).end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}
