import assert from "node:assert/strict";
import test from "node:test";
import { anthropicBody, pythonOf, samplesOf } from "./code_samples.js";
import { DEFAULT_SETTINGS, requestOf, streamed, toolOf, wireMessages } from "./requests.js";

const asked = [{ role: "user", text: "Hi" }];
const settings = (changes) => ({ ...DEFAULT_SETTINGS, ...changes });
const IMAGE = "data:image/png;base64,aGk=";

test("only what was set is sent", () => {
  assert.deepEqual(requestOf("m", asked, settings({})), { path: "/v1/chat/completions", body: { model: "m", messages: [{ role: "user", content: "Hi" }], temperature: 0.7 } });
  const { body } = requestOf("m", asked, settings({ system: " Be brief. ", topP: "0.5", maxTokens: "8", seed: "0", stop: "END\n\\n\\n", logprobs: true, format: "json_object" }));
  assert.deepEqual(body.messages[0], { role: "system", content: "Be brief." });
  assert.deepEqual([body.top_p, body.max_tokens, body.seed, body.stop], [0.5, 8, 0, ["END", "\n\n"]]);
  assert.deepEqual([body.logprobs, body.top_logprobs, body.response_format], [true, 5, { type: "json_object" }]);
  assert.deepEqual(streamed({ path: "/x", body: { a: 1 } }).body, { a: 1, stream: true, stream_options: { include_usage: true } });
});

test("a completion sends its last prompt, and nothing of chats", () => {
  const { path, body } = requestOf("m", [...asked, { role: "assistant", text: "x" }, { role: "user", text: "Once" }], settings({ mode: "completion", system: "s", logprobs: true, tools: [{ name: "f", description: "", parameters: "" }] }));
  assert.equal(path, "/v1/completions");
  assert.deepEqual(body, { model: "m", prompt: "Once", temperature: 0.7, max_tokens: 256, logprobs: 5 });
});

test("settings that make no sense are a sentence", () => {
  const bad = [
    [{ temperature: "3" }, /Temperature must be a number between 0 and 2/], [{ topP: "x" }, /Top p must be/], [{ maxTokens: "0" }, /longest answer must be a whole number at least 1/],
    [{ maxTokens: "1.5" }, /whole number/], [{ seed: "-1" }, /seed/], [{ format: "json_schema", schema: "{" }, /The schema is not a JSON object/], [{ format: "json_schema", schema: "[]" }, /not an object/],
    [{ tools: [{ name: "a b", description: "", parameters: "" }] }, /cannot be the name of a tool/], [{ tools: [{ name: "f", description: "", parameters: "nope" }] }, /The parameters of f is not a JSON object/],
  ];
  for (const [changes, sentence] of bad) assert.throws(() => requestOf("m", asked, settings(changes)), sentence);
});

test("images, calls and results on the wire; an answer that failed is not sent", () => {
  const messages = [
    { role: "user", text: "What?", images: [IMAGE] },
    { role: "assistant", text: "", calls: [{ id: "c", name: "f", arguments: "{}" }] },
    { role: "tool", callId: "c", name: "f", text: "21" },
    { role: "assistant", text: "", problem: "It failed." },
  ];
  assert.deepEqual(wireMessages(messages), [
    { role: "user", content: [{ type: "image_url", image_url: { url: IMAGE } }, { type: "text", text: "What?" }] },
    { role: "assistant", content: null, tool_calls: [{ id: "c", type: "function", function: { name: "f", arguments: "{}" } }] },
    { role: "tool", tool_call_id: "c", content: "21" },
  ]);
  assert.deepEqual(toolOf({ name: "f", description: "", parameters: "" }), { type: "function", function: { name: "f", parameters: { type: "object", properties: {} } } });
});

test("values as Python writes them", () => {
  assert.equal(pythonOf({ a: [true, false, null, 1.5], b: "it's \"x\"\n" }), '{"a": [True, False, None, 1.5], "b": "it\'s \\"x\\"\\n"}');
  assert.match(pythonOf(["x".repeat(60), "y".repeat(60)]), /^\[\n {4}"x+",\n {4}"y+",\n\]$/);
});

test("no sample holds a key, and none is asked for where none is needed", () => {
  const request = requestOf("m", asked, settings({}));
  for (const { code } of samplesOf(request, { baseUrl: "http://h:1", hasKey: true })) assert.match(code, /PENSTOCK_API_KEY/);
  for (const { code } of samplesOf(request, { baseUrl: "http://h:1", hasKey: false })) assert.doesNotMatch(code, /PENSTOCK_API_KEY/);
  const [, , anthropic] = samplesOf(requestOf("m", asked, settings({ mode: "completion" })), { baseUrl: "http://h:1", hasKey: false });
  assert.equal(anthropic.code, "");
  assert.match(anthropic.note, /chats only/);
});

test("long images are shortened, and quotes do not end the shell's", () => {
  const messages = [{ role: "user", text: "It's $HOME `x`", images: [`data:image/png;base64,${"A".repeat(500)}`] }];
  const [curl] = samplesOf(requestOf("m", messages, settings({})), { baseUrl: "http://h:1", hasKey: false });
  assert.match(curl.code, /base64,YOUR_IMAGE/);
  assert.match(curl.code, /It'\\''s \$HOME/);
  assert.match(curl.note, /shortened/);
});

test("the same call in Anthropic's shape", () => {
  const messages = [
    { role: "user", text: "What?", images: [IMAGE] },
    { role: "assistant", text: "", calls: [{ id: "c", name: "f", arguments: '{"x": 1}' }, { id: "d", name: "f", arguments: "{" }] },
    { role: "tool", callId: "c", text: "1" }, { role: "tool", callId: "d", text: "2" },
  ];
  const { body } = requestOf("m", messages, settings({ system: "S", seed: "3", stop: "END", tools: [{ name: "f", description: "d", parameters: "" }], toolChoice: "required", format: "json_schema", schema: '{"type": "object"}' }));
  assert.deepEqual(anthropicBody(body), {
    model: "m", max_tokens: 1024, system: "S", stop_sequences: ["END"], extra_body: { temperature: 0.7, seed: 3 },
    messages: [
      { role: "user", content: [{ type: "image", source: { type: "base64", media_type: "image/png", data: "aGk=" } }, { type: "text", text: "What?" }] },
      { role: "assistant", content: [{ type: "tool_use", id: "c", name: "f", input: { x: 1 } }, { type: "tool_use", id: "d", name: "f", input: {} }] },
      { role: "user", content: [{ type: "tool_result", tool_use_id: "c", content: "1" }, { type: "tool_result", tool_use_id: "d", content: "2" }] },
    ],
    tools: [{ name: "f", description: "d", input_schema: { type: "object", properties: {} } }], tool_choice: { type: "any" },
    output_config: { format: { type: "json_schema", schema: { type: "object" } } },
  });
});
