// The replicas, how requests are routed to them, and what the autoscaler sees and does.

import { announce, badge, confirm, element, heading, panel, problem, repeat, replace, table } from "./dom.js";
import { compact, number, seconds, share, time } from "./format.js";

const TONES = { ready: "good", starting: "accent", warming: "accent", draining: "warn", unhealthy: "bad", gone: "bad" };
const REASONS = {
  only: "only replica", turn: "its turn", load: "shortest wait", prefix: "longest prefix", copy: "a shorter wait than where the prefix is", affinity: "session",
};

export async function show(root, { api, signal }) {
  const complaint = element("div");
  const body = element("div");

  async function load() {
    try {
      const cluster = await api("/admin/cluster", { signal });
      if (!body.contains(document.activeElement)) draw(cluster);
    } catch (error) {
      if (!signal.aborted) replace(complaint, problem(error));
    }
  }

  async function order(content, sentence) {
    complaint.replaceChildren();
    try {
      const cluster = await api("/admin/replicas", { method: "POST", body: content });
      announce(sentence);
      document.activeElement?.blur();
      draw(cluster);
    } catch (error) {
      if (!signal.aborted) replace(complaint, problem(error));
    }
  }

  async function drain(replica) {
    if (await confirm("Drain this replica?", `${replica.id} gets no new requests, finishes those it has, and ends. An autoscaler that finds too few replicas starts another.`, "Drain")) {
      order({ action: "drain", replica_id: replica.id }, `${replica.id} drains.`);
    }
  }

  function meter(value, limit = 1) {
    const part = element("span");
    part.style.width = `${Math.min(100, value / limit * 100)}%`;
    return element("span", { class: "meter" }, element("span", { class: value > limit ? "bar over" : "bar", "aria-hidden": "true" }, part), share(value));
  }

  function draw(cluster) {
    const replicas = panel("Replicas", table("Replicas", [
      { title: "Replica", cell: (row) => element("span", { class: "meter" }, row.id) },
      { title: "State", cell: (row) => badge(row.state, TONES[row.state]) },
      { title: "Model", cell: (row) => row.model },
      { title: "Role", cell: (row) => row.role === "both" ? "any" : row.role },
      { title: "Revision", cell: (row) => element("code", {}, row.revision) },
      { title: "Running", number: true, cell: (row) => number(row.num_running) },
      { title: "Waiting", number: true, cell: (row) => number(row.num_waiting) },
      { title: "KV in use", cell: (row) => meter(row.kv_usage) },
      { title: "Cache hits", number: true, cell: (row) => share(row.cached_share) },
      { title: "TTFT p50 / p95", number: true, cell: (row) => `${seconds(row.ttft_p50_s)} / ${seconds(row.ttft_p95_s)}` },
      { title: "ITL p50 / p95", number: true, cell: (row) => `${seconds(row.itl_p50_s)} / ${seconds(row.itl_p95_s)}` },
      { title: "Actions", cell: (row) => row.state === "ready"
        ? element("button", { class: "small", "aria-label": `Drain ${row.id}`, onclick: () => drain(row) }, "Drain")
        : row.state === "draining" ? element("button", { class: "small", "aria-label": `Resume ${row.id}`, onclick: () => order({ action: "resume", replica_id: row.id }, `${row.id} serves again.`) }, "Resume") : "" },
    ], cluster.replicas, "No replica runs."));
    const pools = cluster.pools.map((pool) => element("section", { class: "panel", "aria-label": `Pool ${pool.model}` },
      element("div", { class: "row spread" }, element("h2", {}, pool.role === "both" ? pool.model : `${pool.model}, ${pool.role}`),
        element("button", { class: "small", onclick: () => order({ action: "start", model: pool.model, role: pool.role }, "A replica starts.") }, "Start a replica")),
      element("p", { class: "soft" }, `${pool.num_ready} ready, ${pool.num_starting} starting, ${pool.num_draining} draining; `
        + (pool.min_replicas === pool.max_replicas ? "the number is fixed" : `the autoscaler keeps ${pool.min_replicas} to ${pool.max_replicas}`)),
      table("What the autoscaler sees", [
        { title: "Signal", cell: (row) => row[0] }, { title: "Now", number: true, cell: (row) => row[1] },
        { title: "Target", number: true, cell: (row) => row[2] }, { title: "Of the target", cell: (row) => row[3] === null ? "–" : meter(row[3]) },
      ], signals(pool))));
    const decisions = panel("What was decided", table("What was decided", [
      { title: "Time", cell: (row) => time(row.at, true) },
      { title: "Pool", cell: (row) => row.role === "both" ? row.model : `${row.model}, ${row.role}` },
      { title: "Decision", cell: (row) => row.decision },
      { title: "Replicas", number: true, cell: (row) => number(row.num_replicas) },
      { title: "Queued tokens", number: true, cell: (row) => compact(row.queued_prefill_tokens) },
      { title: "TTFT p95", number: true, cell: (row) => seconds(row.ttft_p95_s) },
      { title: "KV in use", number: true, cell: (row) => share(row.kv_usage) },
      { title: "Held requests", number: true, cell: (row) => number(row.held_requests) },
    ], cluster.decisions, "Nothing was decided since the server started."));
    const routed = Object.values(cluster.routing.reasons).reduce((sum, count) => sum + count, 0);
    const routing = panel("How requests are routed", element("p", { class: "soft" },
      `${number(routed)} requests by ${number(cluster.routing.num_gateways)} gateway process${cluster.routing.num_gateways === 1 ? "" : "es"}; the chosen replica was thought to hold ${share(cluster.routing.num_prompt_tokens ? cluster.routing.num_matched_tokens / cluster.routing.num_prompt_tokens : null)} of the prompt tokens.`),
    table("Routing decisions", [
      { title: "Chosen for", cell: (row) => REASONS[row[0]] ?? row[0] },
      { title: "Requests", number: true, cell: (row) => number(row[1]) },
      { title: "Share", cell: (row) => meter(row[1] / routed) },
    ], Object.entries(cluster.routing.reasons).sort((a, b) => b[1] - a[1]), "No request was routed yet."));
    replace(body, replicas, element("div", { class: "grid-2" }, pools, routing), decisions);
  }

  replace(root, heading("Fleet", "Replicas, routing, and the autoscaler's view."), complaint, body);
  await repeat(signal, 2, load);
}

function signals(pool) {
  const pace = (pool.drain_tokens_per_s ?? 0) * pool.num_ready;
  const drain = pace ? pool.queued_prefill_tokens / pace : null;
  return [
    ["Time for the queued prompts", pool.queued_prefill_tokens && drain === null ? "not known" : seconds(drain ?? 0), seconds(pool.drain_target_s), (drain ?? 0) / pool.drain_target_s],
    ["TTFT p95", seconds(pool.ttft_p95_s), seconds(pool.ttft_target_s), pool.ttft_p95_s === null ? null : pool.ttft_p95_s / pool.ttft_target_s],
    ["KV in use", share(pool.kv_usage), share(pool.kv_target), pool.kv_usage / pool.kv_target],
    ["Prompt tokens arriving per second", compact(pool.arriving_prefill_tokens_per_s), "–", null],
    ["Requests without a replica", number(pool.held_requests), "0", pool.held_requests ? 1.01 : 0],
  ];
}
