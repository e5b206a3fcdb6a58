// What comes back: server-sent events of chat and plain completions, put together into one answer.

// Yields the JSON of every `data:` line of a response, until [DONE] or the end.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (buffer + (value ?? "")).split(/\r?\n/);
    buffer = done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const payload = line.slice(5).trim();
      if (payload === "[DONE]") return;
      yield JSON.parse(payload);
    }
    if (done) return;
  }
}

// The answer so far. Times are milliseconds of the same clock as `startedAt`.
export class Answer {
  constructor(model, startedAt) {
    this.message = { role: "assistant", model, text: "", reasoning: "", calls: [], tokens: [] };
    this.startedAt = startedAt;
    this.firstAt = null;
    this.lastAt = null;
    this.pieces = 0;
    this.usage = null;
    this.end = null;
  }

  // Takes one event. Throws the server's sentence where the event is an error.
  take(event, now) {
    if (event.error) throw new Error(event.error.message ?? "The server ended the answer with an error.");
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    const reasoning = delta.reasoning_content || delta.reasoning || "";
    const calls = delta.tool_calls ?? [];
    this.message.text += delta.content || "";
    this.message.reasoning += reasoning;
    calls.forEach((call) => this.takeCall(call));
    this.message.tokens.push(...tokensOf(choice.logprobs));
    if (delta.content || reasoning || calls.length) {
      this.lastAt = now;
      this.firstAt ??= now;
      this.pieces += 1;
    }
    this.end = choice.finish_reason ?? this.end;
  }

  takeCall({ index = 0, id, function: called }) {
    this.message.calls[index] ??= { id: "", name: "", arguments: "" };
    const call = this.message.calls[index];
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  get figures() {
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const seconds = this.firstAt === null ? 0 : (this.lastAt - this.firstAt) / 1000;
    return {
      firstTokenMs: this.firstAt === null ? null : Math.round(this.firstAt - this.startedAt),
      tokensPerSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      tokens,
      promptTokens: this.usage?.prompt_tokens ?? null,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
      end: this.end,
    };
  }
}

// {text, logprob, top: [{text, logprob}]} for every token, from either API's shape.
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
      text: token,
      logprob,
      top: (top ?? []).map((each) => ({ text: each.token, logprob: each.logprob })),
    }));
  }
  return (logprobs.tokens ?? []).map((text, at) => ({
    text,
    logprob: logprobs.token_logprobs[at] ?? 0,
    top: Object.entries(logprobs.top_logprobs?.[at] ?? {}).map(([token, logprob]) => ({ text: token, logprob })),
  }));
}

const ENDS = { length: "cut at the length limit", stopped: "stopped", content_filter: "stopped by a filter" };

export function describe(figures) {
  const parts = [];
  if (figures.firstTokenMs !== null) parts.push(`first token ${figures.firstTokenMs} ms`);
  if (figures.tokensPerSecond !== null) parts.push(`${figures.tokensPerSecond.toFixed(1)} tok/s`);
  if (figures.tokens) parts.push(`${figures.tokens} token${figures.tokens === 1 ? "" : "s"}`);
  if (figures.promptTokens) parts.push(`prompt ${figures.promptTokens}${figures.cachedTokens ? `, ${figures.cachedTokens} from cache` : ""}`);
  if (ENDS[figures.end]) parts.push(ENDS[figures.end]);
  return parts.join(" · ");
}

const SENTENCE_END = /[.!?:。！？]["')\]]?(?=\s)|\n\n/g;

// Cuts a growing text into whole sentences, for people who listen: a screen reader that is told of every token never
// gets to the end of a word.
export class Sentences {
  constructor() {
    this.told = 0;
  }

  // What is complete and was not told before.
  next(text, isEnd = false) {
    let end = this.told;
    if (isEnd) end = text.length;
    else {
      SENTENCE_END.lastIndex = this.told;
      for (let match; (match = SENTENCE_END.exec(text)); ) end = match.index + match[0].length;
    }
    const news = text.slice(this.told, end).trim();
    this.told = end;
    return news;
  }
}
