// The code that makes the same call as the playground: curl, the SDKs of OpenAI and Anthropic in Python, and OpenAI's
// in JavaScript. No code holds a key: it reads PENSTOCK_API_KEY from the environment.

import { CHAT_PATH } from "./requests.js";

const MAX_DATA_URL = 200; // a longer image is shortened, so that the code can be read
const ANTHROPIC_DEFAULT_MAX_TOKENS = 1024;
// Fields that Penstock takes and that are no arguments of Anthropic's SDK: from version 2 on it has none for sampling.
const ANTHROPIC_EXTRAS = ["temperature", "top_p", "seed"];

// [{title, language, code, note}] of a call {path, body}. `hasKey` says whether the server asks for one.
export function samplesOf({ path, body }, { baseUrl, hasKey, isStreamed = false }) {
  const sent = isStreamed ? { ...body, stream: true } : body;
  const { body: shown, isShortened } = shortened(sent);
  const note = isShortened ? "Images are shortened here: put in your own." : "";
  const place = { path, baseUrl, hasKey };
  return [
    { title: "curl", language: "bash", code: curl(shown, place), note },
    { title: "Python (openai)", language: "python", code: openaiPython(shown, place), note },
    path === CHAT_PATH
      ? { title: "Python (anthropic)", language: "python", code: anthropicPython(shown, place), note: [note, anthropicNote(shown)].filter(Boolean).join(" ") }
      : { title: "Python (anthropic)", language: "python", code: "", note: "Anthropic's API has chats only. Choose the mode Chat to see its code." },
    { title: "JavaScript (openai)", language: "javascript", code: openaiScript(shown, place), note },
  ];
}

function shortened(body) {
  let isShortened = false;
  const text = JSON.stringify(body, (name, value) => {
    if (name !== "url" || typeof value !== "string" || value.length <= MAX_DATA_URL || !value.startsWith("data:")) return value;
    isShortened = true;
    return `${value.slice(0, value.indexOf(",") + 1)}YOUR_IMAGE`;
  });
  return { body: JSON.parse(text), isShortened };
}

function curl(body, { path, baseUrl, hasKey }) {
  const quoted = `'${JSON.stringify(body, null, 2).replaceAll("'", String.raw`'\''`)}'`;
  return [
    `curl ${baseUrl}${path} \\`,
    ...(hasKey ? [`  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\`] : []),
    `  -H "Content-Type: application/json" \\`,
    `  -d ${quoted}`,
  ].join("\n");
}

// A value as Python writes it, broken into lines where one line would be too long.
export function pythonOf(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = `${indent}    `;
  const items = (deeper) => Array.isArray(value)
    ? value.map((item) => pythonOf(item, deeper))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${pythonOf(item, deeper)}`);
  const line = `${open}${items(inner).join(", ")}${close}`;
  if (line.length + indent.length <= 88 && !line.includes("\n")) return line;
  return `${open}\n${items(inner).map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

function pythonCall(name, fields) {
  const lines = Object.entries(fields).map(([field, value]) => `    ${field}=${pythonOf(value, "    ")},\n`);
  return `${name}(\n${lines.join("")})`;
}

function pythonClient(kind, address, hasKey) {
  const key = hasKey ? 'os.environ["PENSTOCK_API_KEY"]' : '"none"';
  const imports = hasKey ? "import os\n\n" : "";
  const module = kind.toLowerCase();
  return `${imports}from ${module} import ${kind}\n\nclient = ${kind}(base_url=${JSON.stringify(address)}, api_key=${key})\n`;
}

function openaiPython(body, { path, baseUrl, hasKey }) {
  const isChat = path === CHAT_PATH;
  const call = pythonCall(isChat ? "client.chat.completions.create" : "client.completions.create", body);
  const head = `${pythonClient("OpenAI", `${baseUrl}/v1`, hasKey)}`;
  if (body.stream) {
    const text = isChat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
    return `${head}stream = ${call}\nfor chunk in stream:\n    if chunk.choices:\n        print(${text} or "", end="", flush=True)\n`;
  }
  const shown = isChat ? (body.tools ? "answer.choices[0].message" : "answer.choices[0].message.content") : "answer.choices[0].text";
  return `${head}answer = ${call}\nprint(${shown})\n`;
}

// The body of Anthropic's Messages API that means the same.
export function anthropicBody(body) {
  const system = body.messages.filter(({ role }) => role === "system").map(({ content }) => content).join("\n\n");
  const extras = Object.fromEntries(ANTHROPIC_EXTRAS.filter((name) => name in body).map((name) => [name, body[name]]));
  const schema = body.response_format?.json_schema?.schema;
  const given = {
    model: body.model,
    max_tokens: body.max_tokens ?? ANTHROPIC_DEFAULT_MAX_TOKENS,
    system: system || undefined,
    messages: anthropicMessages(body.messages.filter(({ role }) => role !== "system")),
    stop_sequences: body.stop,
    tools: body.tools?.map(({ function: { name, description, parameters } }) => ({ name, ...(description ? { description } : {}), input_schema: parameters })),
    tool_choice: body.tool_choice && { type: { required: "any", none: "none" }[body.tool_choice] ?? "auto" },
    output_config: schema && { format: { type: "json_schema", schema } },
    extra_body: Object.keys(extras).length ? extras : undefined,
  };
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined));
}

function anthropicMessages(messages) {
  const turns = [];
  for (const message of messages) {
    const isResult = message.role === "tool";
    const content = isResult ? [{ type: "tool_result", tool_use_id: message.tool_call_id, content: message.content }] : anthropicContent(message);
    const last = turns.at(-1);
    if (isResult && Array.isArray(last?.content) && last.content[0]?.type === "tool_result") last.content.push(...content);
    else turns.push({ role: isResult ? "user" : message.role, content });
  }
  return turns;
}

function anthropicContent({ content, tool_calls: calls }) {
  const blocks = Array.isArray(content) ? content.map(anthropicBlock) : content ? [{ type: "text", text: content }] : [];
  for (const { id, function: { name, arguments: given } } of calls ?? []) {
    let input = {};
    try {
      input = JSON.parse(given || "{}");
    } catch {
      // a model may have written half a call
    }
    blocks.push({ type: "tool_use", id, name, input });
  }
  return blocks.length === 1 && blocks[0].type === "text" ? blocks[0].text : blocks.length ? blocks : "";
}

function anthropicBlock(part) {
  if (part.type === "text") return part;
  const [, type, data] = /^data:([^;,]*);base64,(.*)$/s.exec(part.image_url.url) ?? [];
  if (data === undefined) return { type: "image", source: { type: "url", url: part.image_url.url } };
  return { type: "image", source: { type: "base64", media_type: type, data } };
}

function anthropicNote(body) {
  const lost = [];
  if (body.logprobs) lost.push("token probabilities");
  if (body.response_format?.type === "json_object") lost.push("JSON without a schema");
  return lost.length ? `Anthropic's API has no ${lost.join(" and no ")}.` : "";
}

function anthropicPython(body, { baseUrl, hasKey }) {
  const fields = anthropicBody(body);
  const head = pythonClient("Anthropic", baseUrl, hasKey);
  if (body.stream) {
    return `${head}with ${pythonCall("client.messages.stream", fields)} as stream:\n    for text in stream.text_stream:\n        print(text, end="", flush=True)\n`;
  }
  const shown = body.tools ? "message.content" : 'next(block.text for block in message.content if block.type == "text")';
  return `${head}message = ${pythonCall("client.messages.create", fields)}\nprint(${shown})\n`;
}

function openaiScript(body, { path, baseUrl, hasKey }) {
  const isChat = path === CHAT_PATH;
  const key = hasKey ? "process.env.PENSTOCK_API_KEY" : '"none"';
  const name = isChat ? "client.chat.completions.create" : "client.completions.create";
  const call = `await ${name}(${scriptOf(body)})`;
  const head = `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: ${JSON.stringify(`${baseUrl}/v1`)}, apiKey: ${key} });\n`;
  if (body.stream) {
    const text = isChat ? "chunk.choices[0]?.delta.content" : "chunk.choices[0]?.text";
    return `${head}const stream = ${call};\nfor await (const chunk of stream) process.stdout.write(${text} ?? "");\n`;
  }
  const shown = isChat ? (body.tools ? "answer.choices[0].message" : "answer.choices[0].message.content") : "answer.choices[0].text";
  return `${head}const answer = ${call};\nconsole.log(${shown});\n`;
}

// JSON without quotes around plain names.
function scriptOf(value) {
  const text = JSON.stringify(value, null, 2);
  return text.replace(/^(\s*)"([A-Za-z_]\w*)":/gm, "$1$2:").replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
}
