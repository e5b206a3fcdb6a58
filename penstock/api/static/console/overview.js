// How the server does: traffic, latency, queue and cache, live and over the last hour and day.

import { lineChart, sparkline } from "./charts.js";
import { choice, element, heading, panel, problem, repeat, replace, select, table } from "./dom.js";
import { compact, number, seconds, share } from "./format.js";

const SPANS = [["live", "Live"], ["hour", "Last hour"], ["day", "Last day"]];
const PAUSE_S = { live: 2, hour: 10, day: 60 };
const ALL = [["", "All"]];
const REASONS = {
  invalid_api_key: "no key, or a wrong, revoked or expired one", permission_denied: "the key may not do this",
  rate_limit_exceeded: "a rate limit was reached", request_exceeds_limit: "the request alone is more than a limit allows",
  insufficient_quota: "a budget is used up", overloaded: "queues are full", engine_unavailable: "no engine is ready",
  shutting_down: "the server is leaving", model_not_found: "no such model", not_found: "no such thing, or no such path",
  invalid_request_error: "the request is not valid", context_length_exceeded: "the prompt does not fit the model's context",
  content_policy_violation: "a safety policy said no", request_too_large: "the request is too large",
  method_not_allowed: "the path does not take this method", store_unavailable: "the database does not answer",
};

export async function show(root, { api, signal }) {
  const asked = { span: "live", model: "", tier: "" };
  const tiles = element("dl", { class: "tiles" });
  const complaint = element("div");
  const filters = element("div", { class: "row" });
  const breakdown = element("div");
  const charts = {
    requests: lineChart("Requests per second", number),
    tokens: lineChart("Tokens per second", compact),
    ttft: lineChart("Time to first token", seconds),
    itl: lineChart("Inter-token latency", seconds),
    queue: lineChart("Requests in the engines", number),
    memory: lineChart("KV cache in use, and prompt tokens found in the cache", share, { ceiling: 1 }),
  };
  let stale = () => {};

  async function load() {
    try {
      const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value));
      const history = await api(`/admin/history?${query}`, { signal });
      complaint.replaceChildren();
      draw(history);
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) throw error;
      replace(complaint, problem(error));
    }
  }

  function change(name, value) {
    asked[name] = value;
    stale();
  }

  function drawFilters({ models, tiers }) {
    const known = JSON.stringify([models, tiers]);
    if (filters.dataset.known === known) return;
    filters.dataset.known = known;
    replace(filters,
      select("Model", [...ALL, ...models.map((name) => [name, name])], asked.model, (value) => change("model", value)),
      select("Tier", [...ALL, ...tiers.map((name) => [name, name])], asked.tier, (value) => change("tier", value)));
  }

  function draw(history) {
    drawFilters(history);
    const { points, total } = history;
    const times = points.map((point) => point.at);
    const line = (name, key, tone) => ({ name, tone, values: points.map((point) => point[key] ?? null) });
    const isPart = Boolean(asked.model || asked.tier);
    const refused = { name: "refused", tone: "tone-2", values: points.map((point) => (point.requests === undefined ? null : point.refused_per_s ?? 0)) };
    charts.requests.draw(times, [line("finished", "requests_per_s"), line("failed", "failures_per_s", "tone-4"), ...(isPart ? [] : [refused])]);
    charts.tokens.draw(times, [line("output", "output_tokens_per_s"), line("prompt", "prompt_tokens_per_s")]);
    charts.ttft.draw(times, [line("p50", "ttft_p50_s"), line("p95", "ttft_p95_s"), line("p99", "ttft_p99_s")]);
    charts.itl.draw(times, [line("p50", "itl_p50_s"), line("p95", "itl_p95_s"), line("p99", "itl_p99_s")]);
    charts.queue.draw(times, [line("running", "num_running"), line("waiting", "num_waiting")]);
    charts.memory.draw(times, [line("KV in use", "kv_usage"), line("cached", "cached_share")]);
    replace(tiles, [
      ["Requests/s", number(total.requests_per_s), "requests_per_s"],
      ["Output tokens/s", compact(total.output_tokens_per_s), "output_tokens_per_s"],
      ["TTFT p95", seconds(total.ttft_p95_s), "ttft_p95_s"],
      ["ITL p95", seconds(total.itl_p95_s), "itl_p95_s"],
      ["Waiting", number(points.at(-1)?.num_waiting), "num_waiting"],
      ["KV in use", share(points.at(-1)?.kv_usage), "kv_usage"],
      ["Cache hits", share(total.cached_share), "cached_share"],
      isPart ? ["Failed", number(total.failures), "failures_per_s", total.failures > 0]
        : ["Failed / refused", `${number(total.failures)} / ${number(total.refused ?? 0)}`, "failures_per_s", total.failures > 0],
    ].map(([title, value, key, isBad]) => element("div", { class: isBad ? "tile bad" : "tile" },
      element("dt", {}, title), element("dd", {}, value), sparkline(points.map((point) => point[key] ?? null)))));
    const columns = [
      { title: "Model", cell: (row) => row.model },
      { title: "Tier", cell: (row) => row.tier || "all" },
      { title: "Requests", number: true, cell: (row) => number(row.requests) },
      { title: "Failed", number: true, cell: (row) => number(row.failures) },
      { title: "Prompt tokens/s", number: true, cell: (row) => compact(row.prompt_tokens_per_s) },
      { title: "Output tokens/s", number: true, cell: (row) => compact(row.output_tokens_per_s) },
      { title: "TTFT p50 / p95 / p99", number: true, cell: (row) => [row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s].map(seconds).join(" / ") },
      { title: "ITL p50 / p95 / p99", number: true, cell: (row) => [row.itl_p50_s, row.itl_p95_s, row.itl_p99_s].map(seconds).join(" / ") },
    ];
    replace(breakdown, panel("By model and tier", table("By model and tier", columns, history.series, "No requests in this time.")),
      isPart ? null : panel("Refused requests", table("Refused requests", [
        { title: "Reason", cell: (row) => REASONS[row.reason] ?? row.reason.replaceAll("_", " ") },
        { title: "Code", cell: (row) => element("code", {}, row.reason) },
        { title: "Status", number: true, cell: (row) => String(row.status) },
        { title: "Requests", number: true, cell: (row) => number(row.count) },
        { title: "Of all refused", number: true, cell: (row) => share(row.count / total.refused) },
      ], history.refusals, "No request was refused in this time.")));
  }

  replace(root,
    heading("Overview", "Traffic, latency and memory of this server, all its processes together.", filters,
      choice("Time", SPANS, asked.span, (value) => change("span", value))),
    complaint, tiles, element("div", { class: "grid-2" }, Object.values(charts).map((chart) => chart.figure)), breakdown);

  let round = new AbortController();
  stale = () => {
    round.abort();
    round = new AbortController();
    signal.addEventListener("abort", () => round.abort());
    return repeat(round.signal, PAUSE_S[asked.span], load);
  };
  await stale();
}
