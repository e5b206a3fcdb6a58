// What the playground sends: a conversation and its settings as the body of a call to the server.

export const DEFAULT_SETTINGS = Object.freeze({
  mode: "chat", // or "completion"
  system: "",
  temperature: 0.7,
  topP: "",
  maxTokens: "",
  seed: "",
  stop: "",
  format: "text", // or "json_object", "json_schema"
  schema: "",
  tools: [], // {name, description, parameters: JSON text}
  toolChoice: "auto",
  logprobs: false,
});
const NUM_ALTERNATIVES = 5;
export const CHAT_PATH = "/v1/chat/completions";
export const COMPLETION_PATH = "/v1/completions";

// A number that the user typed, or undefined where the field is empty. Throws a sentence for the user.
function numberOf(text, name, { least, most, isWhole }) {
  if (text === "" || text === null || text === undefined) return undefined;
  const value = Number(text);
  if (!Number.isFinite(value) || value < least || value > most || (isWhole && !Number.isInteger(value))) {
    const bounds = most === Infinity || most === Number.MAX_SAFE_INTEGER ? `at least ${least}` : `between ${least} and ${most}`;
    throw new Error(`${name} must be a ${isWhole ? "whole " : ""}number ${bounds}.`);
  }
  return value;
}

function jsonOf(text, name) {
  try {
    const value = JSON.parse(text);
    if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("it is not an object");
    return value;
  } catch (error) {
    throw new Error(`${name} is not a JSON object: ${error.message}.`);
  }
}

// One stop string a line. `\n` written out stands for a line break.
export function stopsOf(text) {
  return text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
}

export function toolOf({ name, description, parameters }) {
  if (!/^[A-Za-z0-9_-]{1,64}$/.test(name)) {
    throw new Error(`"${name}" cannot be the name of a tool: use letters, digits, _ and -, at most 64 of them.`);
  }
  const schema = parameters.trim() ? jsonOf(parameters, `The parameters of ${name}`) : { type: "object", properties: {} };
  return { type: "function", function: { name, ...(description ? { description } : {}), parameters: schema } };
}

function responseFormat({ format, schema }) {
  if (format === "json_object") return { type: "json_object" };
  if (format !== "json_schema") return undefined;
  return { type: "json_schema", json_schema: { name: "answer", schema: jsonOf(schema, "The schema"), strict: true } };
}

// Messages as the conversation keeps them → messages as the API wants them.
export function wireMessages(messages, system = "") {
  const wire = messages.filter((message) => !message.problem || message.text || message.calls?.length).map(wireMessage);
  return system.trim() ? [{ role: "system", content: system.trim() }, ...wire] : wire;
}

function wireMessage(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  if (message.role === "user") {
    if (!message.images?.length) return { role: "user", content: message.text };
    const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: [...images, ...(message.text ? [{ type: "text", text: message.text }] : [])] };
  }
  const calls = (message.calls ?? []).map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role: "assistant", content: message.text || (calls.length ? null : ""), ...(calls.length ? { tool_calls: calls } : {}) };
}

// {path, body} of the call that answers the last message. Throws a sentence where a setting makes no sense.
export function requestOf(model, messages, settings) {
  const isChat = settings.mode !== "completion";
  const stop = stopsOf(settings.stop);
  const tools = isChat ? settings.tools.map(toolOf) : [];
  const format = isChat ? responseFormat(settings) : undefined;
  const body = {
    model,
    ...(isChat ? { messages: wireMessages(messages, settings.system) } : { prompt: messages.at(-1)?.text ?? "" }),
    temperature: numberOf(settings.temperature, "Temperature", { least: 0, most: 2 }),
    top_p: numberOf(settings.topP, "Top p", { least: 0, most: 1 }),
    max_tokens: numberOf(settings.maxTokens, "The longest answer", { least: 1, most: Infinity, isWhole: true }) ?? (isChat ? undefined : 256),
    seed: numberOf(settings.seed, "The seed", { least: 0, most: Number.MAX_SAFE_INTEGER, isWhole: true }),
    stop: stop.length ? stop : undefined,
    response_format: format,
    tools: tools.length ? tools : undefined,
    tool_choice: tools.length && settings.toolChoice !== "auto" ? settings.toolChoice : undefined,
    ...(settings.logprobs ? (isChat ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : { logprobs: NUM_ALTERNATIVES }) : {}),
  };
  const given = Object.fromEntries(Object.entries(body).filter(([, value]) => value !== undefined));
  return { path: isChat ? CHAT_PATH : COMPLETION_PATH, body: given };
}

export function streamed({ path, body }) {
  return { path, body: { ...body, stream: true, stream_options: { include_usage: true } } };
}
