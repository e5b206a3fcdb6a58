// Talks to a server through Vercel's AI SDK and prints what came of it as one JSON object.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const baseURL = `${process.argv[2]}/v1`;
const anthropic = createAnthropic({ baseURL, apiKey: "k" })("bytes");
const openai = createOpenAI({ baseURL, apiKey: "k" });

async function whole(model) {
  const { text, finishReason, usage } = await generateText({ model, prompt: "Hello", maxOutputTokens: 50 });
  return { text, finishReason, outputTokens: usage.outputTokens };
}

async function streamed(model) {
  const result = streamText({ model, prompt: "Hello", maxOutputTokens: 50 });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  return { text, finishReason: await result.finishReason, outputTokens: (await result.usage).outputTokens };
}

async function twoTurns(model) {
  const question = { role: "user", content: "Hello" };
  const first = await generateText({ model, messages: [question], maxOutputTokens: 50 });
  const messages = [question, ...first.response.messages, { role: "user", content: "Again" }];
  const { text, finishReason, usage } = await generateText({ model, messages, maxOutputTokens: 50 });
  return { text, finishReason, outputTokens: usage.outputTokens };
}

const found = {};
for (const [name, model] of [["anthropic", anthropic], ["responses", openai("bytes")], ["chat", openai.chat("bytes")]]) {
  for (const way of [whole, streamed, twoTurns]) {
    try {
      found[`${name} ${way.name}`] = await way(model);
    } catch (error) {
      found[`${name} ${way.name}`] = { error: `${error.message}: ${error.cause?.message ?? error.responseBody ?? ""}` };
    }
  }
}
console.log(JSON.stringify(found));
