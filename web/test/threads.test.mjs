/** Threads on a page that is not isolated. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { wasmRuntime } from "../dist/wasm.js";

test("more threads than one need an isolated page, whether or not the runtime is loaded", async () => {
  for (let time = 0; time < 2; time++) {
    await assert.rejects(wasmRuntime("/nowhere", 2), /2 threads need an isolated page: send it with COOP same-origin/);
  }
});
