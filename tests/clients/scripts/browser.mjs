// What a page in a browser does: a preflight, fetch with an Origin, headers that scripts may read, a WebSocket.
// Node's fetch does not ask before it sends, so the preflight is sent by hand, with the headers of a browser.
import assert from "node:assert/strict";
import http from "node:http";
import { API_KEY, BASE_URL, MODEL, capability, report } from "./report.mjs";

const origin = "https://app.example";
const url = `${BASE_URL}/v1/chat/completions`;
const asked = { model: MODEL, max_tokens: 8, messages: [{ role: "user", content: "Say hello." }] };

// fetch refuses to set Origin, as a browser does.
function send(method, address, headers, body) {
  return new Promise((resolve, reject) => {
    const request = http.request(address, { method, headers }, (answer) => {
      let text = "";
      answer.setEncoding("utf8").on("data", (piece) => (text += piece));
      answer.on("end", () => resolve({ status: answer.statusCode, headers: answer.headers, text }));
    });
    request.on("error", reject).end(body);
  });
}

const post = (fields, key = API_KEY) =>
  send(
    "POST",
    url,
    { origin, "content-type": "application/json", authorization: `Bearer ${key}` },
    JSON.stringify({ ...asked, ...fields }),
  );

console.log(JSON.stringify({ version: process.versions.node }));

await capability("other", async () => {
  const wanted = "authorization,content-type,x-stainless-lang";
  const headers = { "access-control-request-method": "POST", "access-control-request-headers": wanted };
  const allowed = await send("OPTIONS", url, { origin, ...headers });
  assert.equal(allowed.status, 204);
  assert.equal(allowed.headers["access-control-allow-origin"], origin);
  assert.equal(allowed.headers["access-control-allow-headers"], wanted);
  const other = await send("OPTIONS", url, { origin: "https://evil.example", ...headers });
  assert.equal(other.headers["access-control-allow-origin"], undefined);
}, "preflights");

await capability("chat", async () => {
  const answer = await post({});
  assert.equal(answer.status, 200, answer.text);
  assert.equal(answer.headers["access-control-allow-origin"], origin);
  assert.match(answer.headers["access-control-expose-headers"], /x-request-id/);
  const plain = await fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${API_KEY}` },
    body: JSON.stringify(asked),
  });
  assert.equal((await plain.json()).object, "chat.completion");
});

await capability("stream", async () => {
  const answer = await post({ stream: true });
  assert.equal(answer.headers["access-control-allow-origin"], origin);
  assert.match(answer.text, /data: \[DONE\]/);
});

await capability("errors", async () => {
  const refused = await post({}, "wrong");
  assert.equal(refused.status, 401);
  assert.equal(refused.headers["access-control-allow-origin"], origin);
  assert.equal((await post({ model: "no-such-model" })).status, 404);
});

if (globalThis.WebSocket === undefined) {
  report("other", null, "");
} else {
  await capability("other", () => new Promise((resolve, reject) => {
    const key = `openai-insecure-api-key.${API_KEY}`;
    const socket = new WebSocket(`${BASE_URL.replace("http", "ws")}/v1/stream`, ["realtime", key]);
    socket.onerror = (event) => reject(new Error(event.message ?? "the socket failed"));
    socket.onopen = () => socket.send(JSON.stringify({ prompt: "Hello", max_tokens: 4 }));
    socket.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      if (message.error) reject(new Error(data));
      if (message.done) resolve(socket.close());
    };
  }), "WebSocket keys");
}
