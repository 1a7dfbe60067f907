/** The worker's program: an engine called by messages. */

import { type Answer, type Call, type Engine, type EngineSettings, LocalEngine } from "./engine.js";

let engine: Promise<Engine> | undefined;

async function answer({ method, arguments: values }: Call): Promise<unknown> {
  if (method === "open") {
    engine = LocalEngine.open(values[0] as EngineSettings);
    await engine;
    return undefined;
  }
  const own = (await engine!) as unknown as Record<string, (...values: unknown[]) => Promise<unknown>>;
  return own[method]!(...values);
}

globalThis.onmessage = async ({ data }: MessageEvent<Call>) => {
  let reply: Answer;
  try {
    reply = { id: data.id, result: await answer(data) };
  } catch (error) {
    reply = { id: data.id, error: error instanceof Error ? error.message : String(error) };
  }
  globalThis.postMessage(reply);
};
