// Vercel's AI SDK with three providers: OpenAI, Anthropic and any OpenAI-compatible server.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";
import { API_KEY, BASE_URL, MODEL, capability } from "./report.mjs";

const baseURL = `${BASE_URL}/v1`;
const providersWith = (apiKey) => {
  const openai = createOpenAI({ baseURL, apiKey });
  const compatible = createOpenAICompatible({ name: "penstock", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true });
  return {
    responses: (name) => openai(name),
    chat: (name) => openai.chat(name),
    anthropic: createAnthropic({ baseURL, apiKey }),
    compatible,
  };
};
const providers = providersWith(API_KEY);
const prompt = "What is the capital of France?";
const weather = tool({
  description: "Tells the weather in a city.",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

async function withEach(name, action) {
  for (const [provider, of] of Object.entries(providers))
    await capability(name, async () => {
      try {
        await action(of(MODEL), of);
      } catch (error) {
        error.message = `${provider}: ${error.message}`;
        throw error;
      }
    });
}

await withEach("chat", async (model) => assert((await generateText({ model, prompt, maxOutputTokens: 20 })).text));

await withEach("stream", async (model) => {
  const result = streamText({ model, prompt, maxOutputTokens: 20 });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  assert(text);
  assert((await result.usage).outputTokens > 0);
});

await withEach("tools", async (model) => {
  const { toolResults } = await generateText({
    model, prompt, tools: { weather }, toolChoice: "required", temperature: 0, maxOutputTokens: 100,
  });
  assert(toolResults[0].output.startsWith("sunny"));
});

await withEach("structured", async (model) => {
  const schema = z.object({ name: z.string().max(20), is_capital: z.boolean() });
  const { object } = await generateObject({ model, prompt, schema, temperature: 0, maxOutputTokens: 100 });
  assert.equal(typeof object.is_capital, "boolean");
});

await withEach("errors", async (_, of) => {
  const wrong = generateText({ model: of("no-such-model"), prompt, maxOutputTokens: 5 });
  await assert.rejects(wrong, (error) => APICallError.isInstance(error) && error.statusCode === 404);
});

await withEach("cancel", async (model) => {
  const control = new AbortController();
  const result = streamText({ model, prompt, maxOutputTokens: 2000, abortSignal: control.signal, onError() {} });
  for await (const _ of result.textStream) {
    control.abort();
    break;
  }
  assert((await generateText({ model, prompt, maxOutputTokens: 3 })).text);
});
