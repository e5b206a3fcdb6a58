// The last requests, each with its timeline: where it waited, for what, and when its tokens came.

import { badge, choice, element, heading, panel, problem, repeat, replace, table } from "./dom.js";
import { number, seconds, share, time } from "./format.js";

const STATUSES = [["any", "All"], ["running", "Running"], ["completed", "Completed"], ["failed", "Failed"], ["cancelled", "Cancelled"]];
const TONES = { running: "accent", completed: "good", failed: "bad", cancelled: "warn" };
const WAITED_FOR = {
  seats: "all places in the running batch were taken (max_num_seqs)",
  tokens: "other prompts used the token budget of each step (max_num_batched_tokens)",
  blocks: "the KV cache had no free blocks for it",
  prefix: "another request was computing the same prefix, which it then shared",
};
const REASONS = {
  only: "the only replica that could serve it", turn: "it was its turn", load: "the shortest predicted wait",
  prefix: "it holds the longest known prefix", copy: "waiting for the replica that holds more of the prefix would take longer",
  affinity: "the session leads there",
};

export async function show(root, { api, signal, server }) {
  const asked = { status: "any" };
  const complaint = element("div");
  const list = element("div");
  const detail = element("div");
  let opened = null;

  async function load() {
    try {
      const { data } = await api(`/admin/requests?limit=200&status=${asked.status}`, { signal });
      complaint.replaceChildren();
      // A table that is drawn anew under the reader's focus would throw the reader out of it.
      if (!list.contains(document.activeElement)) draw(data);
      else if (opened) open(data.find((request) => request.id === opened.id) ?? opened);
    } catch (error) {
      if (!signal.aborted) replace(complaint, problem(error));
    }
  }

  function draw(data) {
    const columns = [
      { title: "Time", cell: (row) => time(row.at) },
      { title: "Request", cell: (row) => element("button", { class: "link mono", "aria-expanded": String(opened?.id === row.id), onclick: () => open(row, true) }, row.id.slice(0, 12)) },
      { title: "State", cell: (row) => badge(row.status, TONES[row.status]) },
      { title: "Model", cell: (row) => row.model },
      { title: "Tier", cell: (row) => row.tier },
      { title: "Prompt", number: true, cell: (row) => number(row.prompt_tokens) },
      { title: "Cached", number: true, cell: (row) => row.prompt_tokens && row.status !== "running" ? share(row.cached_tokens / row.prompt_tokens) : "–" },
      { title: "Output", number: true, cell: (row) => row.status === "running" ? "–" : number(row.completion_tokens) },
      { title: "First token", number: true, cell: (row) => seconds(row.first_token_s) },
      { title: "Total", number: true, cell: (row) => seconds(row.duration_s) },
      { title: "Timeline", cell: (row) => timeline(row) },
    ];
    replace(list, panel("Recent requests", table("Recent requests", columns, data, "No requests yet.")));
    if (opened) open(data.find((request) => request.id === opened.id) ?? opened);
  }

  function open(request, moves = false) {
    opened = request;
    replace(detail, panel(`Request ${request.id}`, describe(request, server)));
    if (moves) {
      detail.querySelector("section").setAttribute("tabindex", "-1");
      detail.querySelector("section").focus();
      detail.scrollIntoView({ block: "start" });
    }
  }

  replace(root,
    heading("Requests", "The last 500 requests of each gateway process that were admitted. Prompts are "
      + (server.shows_prompts ? "shown." : "not kept; --show-prompts keeps them."),
      choice("State", STATUSES, asked.status, (value) => { asked.status = value; load(); })),
    complaint, detail, list);
  await repeat(signal, 3, load);
}

// [name, tone, seconds] of each part of a request's life.
export function parts(request) {
  const { before_engine_s: before, queue_s: queue, prefill_s: prefill, first_token_s: first, duration_s: total } = request;
  if (total === null) return [];
  if (first === null) return [["no token", "tone-4", total]];
  const known = [];
  if (queue === null || prefill === null) known.push(["first token", "tone-3", first]);
  else known.push(["gateway", "tone-5", before ?? 0], ["queue", "tone-2", queue], ["prefill", "tone-3", prefill]);
  known.push(["decode", "tone-1", Math.max(0, total - first)]);
  return known;
}

function timeline(request, isLarge = false) {
  const found = parts(request);
  const total = found.reduce((sum, [, , each]) => sum + each, 0);
  if (!total) return request.status === "running" ? badge("in progress", "accent") : "–";
  let x = 0;
  const label = found.map(([name, , each]) => `${name} ${seconds(each)}`).join(", ");
  const bars = found.map(([, tone, each]) => {
    const width = each / total * 200;
    const bar = element("svg:rect", { class: `span ${tone}`, x, y: 0, width: Math.max(0, width), height: 12 });
    x += width;
    return bar;
  });
  return element("svg:svg", { class: isLarge ? "timeline large" : "timeline", viewBox: "0 0 200 12", preserveAspectRatio: "none", role: "img", "aria-label": label }, bars);
}

function describe(request, server) {
  const found = parts(request);
  const facts = [
    ["State", request.error_code ? `${request.status}: ${request.error_code}` : request.finish_reasons.length ? `${request.status} (${request.finish_reasons.join(", ")})` : request.status],
    ["Model and tier", `${request.model}, ${request.tier}`],
    ["Workspace and key", `${request.workspace_id}, ${request.key_id}`],
    ["Endpoint", request.endpoint],
    ["Prompt", `${number(request.prompt_tokens)} tokens, ${number(request.cached_tokens)} from the cache`],
    ["Output", `${number(request.completion_tokens)} of at most ${number(request.max_output_tokens)} tokens`],
    request.draft_tokens ? ["Drafts", `${number(request.accepted_draft_tokens)} of ${number(request.draft_tokens)} drafted tokens accepted`] : null,
    request.is_replayed ? ["Source", "an answer given before"] : null,
    ["Why it waited", element("ul", { class: "waits" }, waits(request).map((each) => element("li", {}, each)))],
  ].filter(Boolean);
  return [
    element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
    found.length ? element("figure", {}, timeline(request, true),
      element("ul", { class: "legend" }, found.map(([name, tone, each]) => element("li", { class: tone }, element("span", { class: "key", "aria-hidden": "true" }), `${name} `, element("strong", {}, seconds(each)))))) : null,
    request.routes.length ? [element("h3", {}, "Replicas"), table("Replicas", [
      { title: "Replica", cell: (row) => row.replica_id },
      { title: "After", number: true, cell: (row) => seconds(row.after_s) },
      { title: "Why this one", cell: (row) => REASONS[row.reason] ?? row.reason },
      { title: "Prefix thought to be there", number: true, cell: (row) => number(row.matched_tokens) },
    ], request.routes)] : null,
    request.chunks.length ? [element("h3", {}, "Prefill chunks"), table("Prefill chunks", [
      { title: "Chunk", cell: (row) => String(row.index + 1) },
      { title: "After the prefill began", number: true, cell: (row) => seconds(row.at) },
      { title: "Tokens", number: true, cell: (row) => number(row.tokens) },
    ], request.chunks.map(([at, tokens], index) => ({ index, at, tokens })))] : null,
    server.shows_prompts && request.prompt !== null ? [element("h3", {}, "Prompt"), element("pre", { class: "text", tabindex: 0 }, request.prompt)] : null,
  ];
}

const NOTABLE_S = 0.02; // shorter waits are the normal course of a step

// Every wait of a request's life with its cause, in the order in which they happened.
export function waits(request) {
  const { routes, status, queue_s: queue, before_engine_s: before, prefill_s: prefill } = request;
  if (request.is_replayed) return ["It did not wait: an answer given before was given again."];
  const found = [];
  const chosen = routes[0]?.after_s ?? null;
  if (chosen === null && status === "running") found.push("It waits for a replica: none is ready, or all are full; or an external server has it.");
  if (chosen === null && status === "failed") found.push("No replica took it: none was ready in time, all were full, or it failed before that.");
  if (chosen > NOTABLE_S) found.push(`${seconds(chosen)} until a replica was chosen: none was ready, or all were full.`);
  for (const [index, route] of routes.slice(1).entries())
    found.push(`${seconds(route.after_s - routes[index].after_s)} with ${routes[index].replica_id}, which failed or gave it back; then it went to ${route.replica_id}.`);
  const onTheWay = (before ?? 0) - (routes.at(-1)?.after_s ?? 0);
  if (before !== null && onTheWay > NOTABLE_S) found.push(`${seconds(onTheWay)} on the way to the engine and back: the engine was in a step, or the gateway was busy.`);
  if (request.waited_for) found.push(`${seconds(queue)} in the engine's queue: ${WAITED_FOR[request.waited_for] ?? request.waited_for}.`);
  else if (queue > NOTABLE_S) found.push(`${seconds(queue)} in the engine's queue, until the running step ended.`);
  if (request.chunks.length > 1) found.push(`${seconds(prefill)} of prefill in ${request.chunks.length} chunks: its prompt shared the steps with other requests.`);
  if (status === "running" && chosen !== null) found.push(`It is with ${routes.at(-1).replica_id}, which tells what it waited for with its first token.`);
  return found.length ? found : ["It did not wait."];
}
