import assert from "node:assert/strict";
import test from "node:test";
import { Answer, describe, eventsOf, Sentences, tokensOf } from "./answers.js";
import { known, staysHere, takeImages } from "./models.js";

const chunk = (delta, more = {}) => ({ choices: [{ delta, finish_reason: null, ...more }] });

test("events survive cuts anywhere, comments and carriage returns", async () => {
  const bytes = new TextEncoder().encode(': ping\r\ndata: {"a": "é"}\r\n\r\ndata:{"b":1}\n\ndata: [DONE]\n\ndata: {"c":1}\n\n');
  for (const size of [1, 2, 7, bytes.length]) {
    const body = new ReadableStream({
      start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
        controller.close();
      },
    });
    const seen = [];
    for await (const event of eventsOf({ body })) seen.push(event);
    assert.deepEqual(seen, [{ a: "é" }, { b: 1 }]);
  }
});

test("an answer is put together from deltas, with reasoning under either name", () => {
  const answer = new Answer("m", 100);
  answer.take(chunk({ role: "assistant", content: "" }), 110);
  answer.take(chunk({ reasoning_content: "Let me " }), 150);
  answer.take(chunk({ reasoning: "think." }), 160);
  answer.take(chunk({ content: "Hi" }), 170);
  answer.take(chunk({ content: "!" }, { finish_reason: "length" }), 250);
  answer.take({ choices: [], usage: { prompt_tokens: 9, completion_tokens: 3, prompt_tokens_details: { cached_tokens: 8 } } }, 260);
  assert.deepEqual([answer.message.text, answer.message.reasoning], ["Hi!", "Let me think."]);
  assert.deepEqual(answer.figures, { firstTokenMs: 50, tokensPerSecond: 20, tokens: 3, promptTokens: 9, cachedTokens: 8, end: "length" });
  assert.equal(describe(answer.figures), "first token 50 ms · 20.0 tok/s · 3 tokens · prompt 9, 8 from cache · cut at the length limit");
});

test("calls of tools come in pieces and side by side", () => {
  const answer = new Answer("m", 0);
  answer.take(chunk({ tool_calls: [{ index: 0, id: "a", function: { name: "f", arguments: '{"x"' } }] }), 1);
  answer.take(chunk({ tool_calls: [{ index: 1, id: "b", function: { name: "g", arguments: "{}" } }, { index: 0, function: { arguments: ":1}" } }] }), 2);
  assert.deepEqual(answer.message.calls, [{ id: "a", name: "f", arguments: '{"x":1}' }, { id: "b", name: "g", arguments: "{}" }]);
});

test("a text completion, and the probabilities of both APIs", () => {
  const answer = new Answer("m", 0);
  answer.take({ choices: [{ text: "Once", logprobs: { tokens: ["Once"], token_logprobs: [-0.5], top_logprobs: [{ Once: -0.5, A: -1 }] } }] }, 1);
  assert.equal(answer.message.text, "Once");
  assert.deepEqual(answer.message.tokens, [{ text: "Once", logprob: -0.5, top: [{ text: "Once", logprob: -0.5 }, { text: "A", logprob: -1 }] }]);
  assert.deepEqual(tokensOf({ content: [{ token: "x", logprob: -1, bytes: [120], top_logprobs: [{ token: "y", logprob: -2 }] }] }), [{ text: "x", logprob: -1, top: [{ text: "y", logprob: -2 }] }]);
  assert.deepEqual(tokensOf(null), []);
});

test("an error in the stream is the server's sentence", () => {
  assert.throws(() => new Answer("m", 0).take({ error: { message: "The engine has gone." } }, 1), /The engine has gone\./);
});

test("a listener hears whole sentences, each once", () => {
  const sentences = new Sentences();
  assert.equal(sentences.next("Hello the"), "");
  assert.equal(sentences.next("Hello there. How ar"), "Hello there.");
  assert.equal(sentences.next("Hello there. How are you? 3.5 is"), "How are you?");
  assert.equal(sentences.next("Hello there. How are you? 3.5 is", true), "3.5 is");
  assert.equal(sentences.next("Hello there. How are you? 3.5 is", true), "");
});

test("privacy is promised only where every model is this server's own", () => {
  const own = { id: "a", owned_by: "penstock" }, other = { id: "b", owned_by: "external" };
  assert.deepEqual([staysHere([own]), staysHere([own, other]), staysHere([])], [true, false, false]);
});

test("images need every chosen model to take them, and an unknown model is replaced", () => {
  const models = [{ id: "sees", input_modalities: ["text", "image"] }, { id: "reads" }];
  assert.deepEqual([takeImages(models, ["sees"]), takeImages(models, ["sees", "reads"]), takeImages(models, ["gone"])], [true, false, false]);
  assert.deepEqual([known(models, "reads"), known(models, "gone"), known([], "gone")], ["reads", "sees", "gone"]);
});
