// What was used and what it cost: by key, workspace, model or day, with a CSV of the same.

import { lineChart } from "./charts.js";
import { download, element, field, heading, panel, problem, replace, select, table } from "./dom.js";
import { compact, money, number } from "./format.js";

const GROUPS = [["day", "Day"], ["model", "Model"], ["workspace", "Workspace"], ["key", "Key"], ["day,model", "Day and model"],
  ["workspace,model", "Workspace and model"], ["key,model", "Key and model"], ["tier", "Tier"], ["endpoint", "Endpoint"], ["user", "User"]];
const TOKENS = [["prompt_tokens", "Prompt tokens"], ["cached_tokens", "Cached"], ["completion_tokens", "Output tokens"]];
const MAX_ROWS = 5000;

export async function show(root, { api, signal }) {
  const today = new Date();
  const day = (moment) => moment.toISOString().slice(0, 10);
  const asked = { group_by: "day", start: day(new Date(today - 29 * 86400e3)), end: day(today) };
  const complaint = element("div");
  const tiles = element("dl", { class: "tiles five" });
  const result = element("div");
  const chart = lineChart("Cost by day", money, { width: 1300, mark: (at) => new Date(at * 1000).toISOString().slice(5, 10) });
  let rows = [];

  async function read(groups) {
    const found = [];
    const query = new URLSearchParams({ group_by: groups, start: asked.start, limit: "1000" });
    // The day that is named last is included.
    query.set("end", day(new Date(Date.parse(asked.end) + 86400e3)));
    for (let more = true; more && found.length < MAX_ROWS;) {
      const page = await api(`/v1/usage?${query}`, { signal });
      found.push(...page.data);
      more = page.has_more;
      if (more) query.set("page", page.next_page);
    }
    return found;
  }

  async function load() {
    try {
      const [byDay, wanted] = await Promise.all([read("day"), asked.group_by === "day" ? null : read(asked.group_by)]);
      complaint.replaceChildren();
      rows = wanted ?? byDay;
      draw(byDay);
    } catch (error) {
      if (signal.aborted) return;
      replace(complaint, problem(error));
      tiles.replaceChildren();
      result.replaceChildren();
    }
  }

  const cost = (row) => Number(row.cost_usd ?? 0);
  const sum = (of, key) => of.reduce((total, row) => total + (typeof key === "function" ? key(row) : row[key] ?? 0), 0);
  const groups = () => asked.group_by.split(",");

  function draw(byDay) {
    replace(tiles, [["Cost", money(sum(byDay, cost))], ["Requests", compact(sum(byDay, (row) => row.requests.total))],
      ...TOKENS.map(([key, title]) => [title, compact(sum(byDay, key))])].map(([title, value]) =>
      element("div", { class: "tile" }, element("dt", {}, title), element("dd", {}, value))));
    const costs = new Map(byDay.map((row) => [row.day, cost(row)]));
    const days = [];
    for (let at = Date.parse(asked.start); at <= Date.parse(asked.end) && days.length < 1000; at += 86400e3) days.push(at / 1000);
    chart.draw(days, [{ name: "cost", values: days.map((at) => costs.get(day(new Date(at * 1000))) ?? 0) }]);
    const columns = [
      ...groups().map((name) => ({ title: GROUPS.find(([value]) => value === name)?.[1] ?? name, cell: (row) => String(row[name] ?? "") })),
      { title: "Requests", number: true, cell: (row) => number(row.requests.total) },
      ...TOKENS.map(([key, title]) => ({ title, number: true, cell: (row) => number(row[key]) })),
      { title: "Cost", number: true, cell: (row) => money(cost(row)) },
    ];
    replace(result, panel("Usage", table("Usage", columns, rows, "No usage in this time.")));
  }

  function saveCsv() {
    const names = [...groups(), "requests", ...TOKENS.map(([key]) => key), "cost_usd"];
    // A cell that a spreadsheet would take for a formula begins with an apostrophe.
    const cell = (value) => {
      const text = String(value ?? "");
      const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
      return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
    };
    const lines = rows.map((row) => names.map((name) => cell(name === "requests" ? row.requests.total : row[name])).join(","));
    download(`penstock-usage-${asked.start}-${asked.end}.csv`, `${names.join(",")}\n${lines.join("\n")}\n`, "text/csv");
  }

  const from = field("From", { type: "date", value: asked.start, onchange: (event) => { asked.start = event.target.value || asked.start; load(); } });
  const to = field("To", { type: "date", value: asked.end, onchange: (event) => { asked.end = event.target.value || asked.end; load(); } });
  replace(root,
    heading("Usage and cost", "From the usage ledger, in UTC days, at the prices that held when each request ran.", from, to,
      select("By", GROUPS, asked.group_by, (value) => { asked.group_by = value; load(); }),
      element("button", { onclick: saveCsv }, "CSV")),
    complaint, tiles, chart.figure, result);
  await load();
}
