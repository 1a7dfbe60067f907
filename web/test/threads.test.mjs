/** Threads on a page that is not cross-origin isolated. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { wasmRuntime } from "../dist/wasm.js";

test("more than one thread requires an isolated page, whether or not the runtime is loaded", async () => {
  for (let time = 0; time < 2; time++) {
    await assert.rejects(wasmRuntime("/nowhere", 2), /2 threads need an isolated page: send it with COOP same-origin/);
  }
});
