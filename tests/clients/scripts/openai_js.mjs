// OpenAI's JavaScript SDK: chat, Responses, streams, tools, structured output, files and batches, errors, cancelling.
import assert from "node:assert";
import OpenAI, { toFile } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API_KEY, BASE_URL, MODEL, capability } from "./report.mjs";

const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, timeout: 120_000 });
const model = MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
};
const weather = { type: "function", function: { name: "weather", parameters } };

await capability("chat", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 20 });
  assert(answer.choices[0].message.content);
  const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 20 });
  assert(response.output_text);
});

await capability("stream", async () => {
  const stream = client.chat.completions.stream({ model, messages, max_tokens: 20 });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  assert(text);
  assert.equal(await stream.finalContent(), text);
});

await capability("tools", async () => {
  const answer = await client.chat.completions.create({
    model, messages, tools: [weather], tool_choice: "required", temperature: 0, max_tokens: 100,
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
  const turns = [...messages, { ...answer.choices[0].message, tool_calls: [call] }, result];
  const final = await client.chat.completions.create({ model, messages: turns, tools: [weather], max_tokens: 20 });
  assert(final.choices[0].finish_reason);
});

await capability("structured", async () => {
  const city = z.object({ name: z.string().max(20), is_capital: z.boolean() });
  const answer = await client.chat.completions.parse({
    model, messages, max_tokens: 100, response_format: zodResponseFormat(city, "city"),
  });
  assert.equal(typeof answer.choices[0].message.parsed.is_capital, "boolean");
});

await capability("files", async () => {
  const body = { model, messages, max_tokens: 10 };
  const line = JSON.stringify({ custom_id: "one", method: "POST", url: "/v1/chat/completions", body });
  const file = await client.files.create({ file: await toFile(Buffer.from(line), "in.jsonl"), purpose: "batch" });
  let batch = await client.batches.create({
    input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
  });
  while (["validating", "in_progress", "finalizing"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 300));
    batch = await client.batches.retrieve(batch.id);
  }
  const output = await (await client.files.content(batch.output_file_id)).text();
  assert.equal(JSON.parse(output).custom_id, "one");
});

await capability("errors", async () => {
  const wrong = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "wrong" });
  await assert.rejects(wrong.models.list(), OpenAI.AuthenticationError);
  await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), OpenAI.BadRequestError);
});

await capability("cancel", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 2000, stream: true });
  for await (const _ of stream) break;
  assert((await client.chat.completions.create({ model, messages, max_tokens: 3 })).choices.length);
});
