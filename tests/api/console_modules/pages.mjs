import assert from "node:assert/strict";
import test from "node:test";
import { waits } from "./recent.js";
import { changesBetween, patchOf } from "./settings_patch.js";

test("a patch holds what differs, and null for what was emptied", () => {
  const patch = patchOf([
    { path: ["limits", "key", "requests_per_minute"], before: 600, after: 900 },
    { path: ["limits", "key", "dollars_per_day"], before: 20, after: undefined },
    { path: ["limits", "workspace", "requests_per_minute"], before: undefined, after: undefined },
    { path: ["models", "fallbacks", "a", "models"], before: ["b"], after: ["b"] },
  ]);
  assert.deepEqual(patch, { limits: { key: { requests_per_minute: 900, dollars_per_day: null } } });
});

test("a name is a key, whatever it is", () => {
  const patch = patchOf([{ path: ["models", "aliases", "__proto__"], before: undefined, after: "m" }, { path: ["__proto__", "x"], before: undefined, after: 1 }]);
  assert.equal(JSON.stringify(patch), '{"models":{"aliases":{"__proto__":"m"}},"__proto__":{"x":1}}');
  assert.equal({}.x, undefined);
});

test("changes are lines", () => {
  assert.deepEqual(changesBetween({ a: { b: 1, c: "x" }, d: [1] }, { a: { b: 2 }, d: [1], e: true }), ["a.b: 1 → 2", 'a.c: "x" → none', "e: none → true"]);
  assert.deepEqual(changesBetween({}, {}), []);
});

const request = (changes) => ({ status: "completed", routes: [], queue_s: null, before_engine_s: null, prefill_s: null, chunks: [], waited_for: null, is_replayed: false, ...changes });
const route = (replica_id, after_s) => ({ replica_id, reason: "load", matched_tokens: 0, after_s });

test("every wait has its cause, in the order of time", () => {
  const told = waits(request({ routes: [route("r1", 0.5), route("r2", 2)], before_engine_s: 2.1, queue_s: 0.3, prefill_s: 0.4, chunks: [[0, 10], [0.2, 10]], waited_for: "blocks" }));
  assert.equal(told.length, 5);
  for (const [index, part] of [/^500 ms until a replica was chosen/, /^1\.50? s with r1.*r2/, /^100 ms on the way/, /^300 ms in the engine's queue: the KV cache/, /^400 ms of prefill in 2 chunks/].entries()) assert.match(told[index], part);
});

test("requests that run, failed early, were replayed or never waited say so", () => {
  assert.match(waits(request({ status: "running" }))[0], /waits for a replica/);
  assert.match(waits(request({ status: "running", routes: [route("r1", 0)] }))[0], /It is with r1/);
  assert.match(waits(request({ status: "failed" }))[0], /No replica took it/);
  assert.match(waits(request({ is_replayed: true }))[0], /given before/);
  assert.deepEqual(waits(request({ routes: [route("r1", 0.001)], before_engine_s: 0.002, queue_s: 0.001, prefill_s: 0.1, chunks: [[0, 5]] })), ["It did not wait."]);
});
