// Anthropic's JavaScript SDK: messages, streams, tools, message batches, errors, cancelling.
import Anthropic from "@anthropic-ai/sdk";
import assert from "node:assert";
import { API_KEY, BASE_URL, MODEL, capability } from "./report.mjs";

const client = new Anthropic({ baseURL: BASE_URL, apiKey: API_KEY, timeout: 120_000 });
const model = MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const input_schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
};
const weather = { name: "weather", input_schema };

await capability("chat", async () => {
  const answer = await client.messages.create({ model, messages, max_tokens: 20 });
  assert(answer.content[0].text);
  assert((await client.messages.countTokens({ model, messages })).input_tokens > 0);
});

await capability("stream", async () => {
  const stream = client.messages.stream({ model, messages, max_tokens: 20 });
  let text = "";
  stream.on("text", (piece) => (text += piece));
  assert.equal(await stream.finalText(), text);
  assert(text);
});

await capability("tools", async () => {
  const answer = await client.messages.create({
    model, messages, tools: [weather], tool_choice: { type: "any" }, temperature: 0, max_tokens: 100,
  });
  const calls = answer.content.filter((block) => block.type === "tool_use");
  assert.deepEqual(Object.keys(calls[0].input), ["city"]);
  const results = calls.map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "sunny" }));
  const turns = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: results }];
  assert((await client.messages.create({ model, messages: turns, tools: [weather], max_tokens: 20 })).stop_reason);
});

await capability("files", async () => {
  const params = { model, messages, max_tokens: 10 };
  let batch = await client.messages.batches.create({ requests: [{ custom_id: "one", params }] });
  while (batch.processing_status !== "ended") {
    await new Promise((resolve) => setTimeout(resolve, 300));
    batch = await client.messages.batches.retrieve(batch.id);
  }
  const types = [];
  for await (const entry of await client.messages.batches.results(batch.id)) types.push(entry.result.type);
  assert.deepEqual(types, ["succeeded"]);
});

await capability("errors", async () => {
  const wrong = new Anthropic({ baseURL: BASE_URL, apiKey: "wrong" });
  await assert.rejects(wrong.models.list(), Anthropic.AuthenticationError);
  await assert.rejects(client.messages.create({ model: "none", messages, max_tokens: 5 }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ model, messages: [], max_tokens: 5 }), Anthropic.BadRequestError);
});

await capability("cancel", async () => {
  const stream = await client.messages.create({ model, messages, max_tokens: 2000, stream: true });
  for await (const _ of stream) break;
  assert((await client.messages.create({ model, messages, max_tokens: 3 })).content.length);
});
