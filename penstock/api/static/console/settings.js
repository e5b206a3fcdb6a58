// The settings while the server runs: limits, prices and names of models as tables, all of it as a file, and the history.
//
// A change names the version that it was made from. When somebody else was quicker the server refuses it (412); what was
// typed stays on the page, and can be saved over the newer version.

import { announce, badge, choice, confirm, element, field, heading, panel, problem, replace, select, table } from "./dom.js";
import { time } from "./format.js";
import { changesBetween, patchOf } from "./settings_patch.js";

const LOST_RACE = 412;
const TABS = [["limits", "Limits"], ["prices", "Prices"], ["models", "Models and routes"], ["file", "All settings"], ["history", "History"]];
const FIGURES = [
  ["requests_per_minute", "Requests/min"], ["input_tokens_per_minute", "Input tokens/min"], ["output_tokens_per_minute", "Output tokens/min"],
  ["concurrent_requests", "At once"], ["dollars_per_day", "$/day"], ["dollars_per_month", "$/month"],
];
const SCOPES = [["key", "Each key"], ["workspace", "Each workspace"], ["model", "Each model"], ["key_model", "Each key and model"], ["workspace_model", "Each workspace and model"]];
const PRICES = [["input", "Input, $/M"], ["output", "Output, $/M"], ["cache_read_factor", "Cache read ×"], ["cache_write_5m_factor", "Cache write 5 min ×"], ["cache_write_1h_factor", "Cache write 1 h ×"]];

const number = (text) => (text === "" ? undefined : text === "unlimited" || !Number.isFinite(Number(text)) ? text : Number(text));
const words = (text) => (text.trim() ? text.split(",").map((each) => each.trim()).filter(Boolean) : undefined);
const plain = (text) => text.trim() || undefined;

export async function show(root, { api, signal }) {
  const complaint = element("div");
  const state = element("p", { class: "soft" });
  const body = element("div");
  let tab = "limits";
  let now = null; // the settings in use, as the server told them last
  let cells = []; // of the tables on the page: {path, box, before, read}
  let file = "";

  async function load() {
    now = await api("/admin/settings", { signal });
    file = await api("/admin/settings", { signal, as: "text", headers: { accept: "application/toml" } });
    replace(state, now.version ? `Version ${now.version}, from the database. ` : `From ${now.source}. The first change here puts the settings into the database, which then counts. `,
      now.refusal && element("span", { class: "problem" }, `Version ${now.latest_version} is not in use: ${now.refusal}`));
    draw();
  }

  // Make one change. `again` is the same change over whatever version is there by then.
  async function change(send, sentence, version = `"${now.latest_version}"`) {
    complaint.replaceChildren();
    try {
      await send({ "if-match": version });
      announce(sentence);
      await load();
      replace(complaint, element("p", { class: "note" }, sentence));
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === LOST_RACE) await lostRace(send, sentence);
      else replace(complaint, problem(error));
    }
    complaint.scrollIntoView({ block: "nearest" });
  }

  async function lostRace(send, sentence) {
    const { data: [latest] } = await api("/admin/settings/versions?limit=1", { signal });
    const changes = changesBetween(now.settings, latest.settings ?? {});
    replace(complaint, element("div", { class: "problem", role: "alert" },
      element("p", {}, `Your change was not saved: ${latest.actor} made version ${latest.version} at ${time(latest.created_at)}, after this page had read version ${now.latest_version}. What you typed is still here.`),
      changeList(changes),
      element("div", { class: "row" },
        element("button", { onclick: () => load().then(() => complaint.replaceChildren(), (error) => replace(complaint, problem(error))) }, `Show version ${latest.version} instead`),
        element("button", { class: "danger", onclick: () => change(send, sentence, `"${latest.version}"`) }, `Save over version ${latest.version}`))));
  }

  const saveCells = () => {
    const patch = patchOf(cells.map(({ path, box, before, read }) => ({ path, before, after: read(box.value) })));
    if (!Object.keys(patch).length) { replace(complaint, element("p", { class: "note" }, "Nothing was changed.")); return; }
    change((headers) => api("/admin/settings", { method: "PATCH", body: patch, headers, signal }), "The settings were changed.");
  };

  function cell(path, label, read = number, attributes = {}) {
    const before = path.reduce((inside, step) => inside?.[step], now.settings);
    const box = element("input", { "aria-label": label, value: Array.isArray(before) ? before.join(", ") : before ?? "", autocomplete: "off", spellcheck: "false", ...attributes });
    cells.push({ path, box, before, read });
    return box;
  }

  const removal = (path, name) => element("button", { class: "small danger", "aria-label": `Remove ${name}`, onclick: async () => {
    if (!await confirm("Remove this entry?", `'${name}' will no longer be in the settings.`, "Remove")) return;
    change((headers) => api("/admin/settings", { method: "PATCH", body: patchOf([{ path, before: true, after: undefined }]), headers, signal }), `'${name}' was removed.`);
  } }, "Remove");

  // A form for a new entry. `path(given)` is where it goes, and `value(given)` what it is.
  function adder(title, label, fields, path, value) {
    const form = element("form", { class: "row", "aria-label": title }, fields, element("button", {}, label));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = Object.fromEntries(new FormData(form));
      change((headers) => api("/admin/settings", { method: "PATCH", body: patchOf([{ path: path(given), before: undefined, after: value(given) }]), headers, signal }), "The settings were changed.");
    });
    return form;
  }

  const saver = () => element("div", { class: "row end" }, element("button", { class: "primary", onclick: saveCells }, "Save the changes"));

  function drawLimits() {
    const limits = now.settings.limits ?? {};
    const rows = SCOPES.flatMap(([scope, title]) => [{ path: ["limits", scope], title },
      ...Object.keys(limits[scope]?.overrides ?? {}).map((name) => ({ path: ["limits", scope, "overrides", name], title: name, isOverride: true }))]);
    const columns = [
      { title: "Whose", cell: (row) => row.title },
      ...FIGURES.map(([name, title]) => ({ title, class: "cell", cell: (row) => cell([...row.path, name], `${title}: ${row.title}`, number, { placeholder: row.isOverride ? "as above" : "no limit" }) })),
      { title: "Actions", cell: (row) => row.isOverride && removal(row.path, row.title) },
    ];
    return [panel("Limits", element("p", { class: "soft" }, "An empty field inherits. 'unlimited' lifts a limit that would be inherited."), table("Limits", columns, rows), saver()),
      panel("A limit of its own", adder("A limit of its own", "Add", [
        select("Of", SCOPES.map(([name, title]) => [name, title.slice(5)]), "key", null, { name: "scope" }),
        field("Id, name or pattern", { name: "name", required: true, autocomplete: "off", placeholder: "for pairs: ID/MODEL" }),
        select("Figure", FIGURES, FIGURES[0][0], null, { name: "figure" }),
        field("Value", { name: "value", required: true, autocomplete: "off" })],
      (given) => ["limits", given.scope, "overrides", given.name.trim(), given.figure], (given) => number(given.value.trim())))];
  }

  function drawPrices() {
    const prices = now.settings.prices ?? {};
    const rows = [{ path: ["prices", "default"], title: "All other models", isOwn: "default" in prices },
      ...Object.keys(prices.models ?? {}).map((name) => ({ path: ["prices", "models", name], title: name, isOwn: true }))];
    const columns = [
      { title: "Model", cell: (row) => row.title },
      ...PRICES.map(([name, title]) => ({ title, class: "cell", cell: (row) => cell([...row.path, name], `${title}: ${row.title}`) })),
      { title: "Actions", cell: (row) => row.isOwn && removal(row.path, row.title) },
    ];
    return [panel("Prices", element("p", { class: "soft" }, "Dollars for a million tokens. Prices by tier, or made from a machine's price, are under 'All settings'."), table("Prices", columns, rows), saver()),
      panel("A model's price", adder("A model's price", "Add", [
        field("Model", { name: "name", required: true, autocomplete: "off" }), field("Input, $/M", { name: "input", required: true }), field("Output, $/M", { name: "output", required: true })],
      (given) => ["prices", "models", given.name.trim()], (given) => ({ input: number(given.input.trim()), output: number(given.output.trim()) })))];
  }

  function drawModels() {
    const models = now.settings.models ?? {};
    const named = (kind) => Object.keys(models[kind] ?? {}).map((name) => ({ name, path: ["models", kind, name] }));
    return [
      panel("Other names", table("Other names", [
        { title: "Name", cell: (row) => row.name },
        { title: "Stands for", class: "cell", cell: (row) => cell(row.path, `What ${row.name} stands for`, plain) },
        { title: "Actions", cell: (row) => removal(row.path, row.name) },
      ], named("aliases"), "No other names."), adder("Another name", "Add", [
        field("Name", { name: "name", required: true, autocomplete: "off" }), field("Stands for", { name: "model", required: true, autocomplete: "off" })],
      (given) => ["models", "aliases", given.name.trim()], (given) => given.model.trim()), saver()),
      panel("Who answers instead", table("Who answers instead", [
        { title: "Model", cell: (row) => row.name },
        { title: "In this order", class: "cell", cell: (row) => cell([...row.path, "models"], `Instead of ${row.name}`, words) },
        { title: "On", class: "cell", cell: (row) => cell([...row.path, "on"], `When ${row.name} is replaced`, words, { placeholder: "error, context, budget, queue" }) },
        { title: "Actions", cell: (row) => removal(row.path, row.name) },
      ], named("fallbacks"), "A model that fails is not replaced."), adder("A replacement", "Add", [
        field("Model", { name: "name", required: true, autocomplete: "off" }), field("Models instead", { name: "models", required: true, autocomplete: "off" }, "With commas between them.")],
      (given) => ["models", "fallbacks", given.name.trim()], (given) => ({ models: words(given.models) ?? [] })), saver()),
      element("p", { class: "soft" }, "Splits by weight, regions, the name 'auto', who may use which model, safety policies, tiers and caches are under 'All settings'."),
    ];
  }

  function drawFile() {
    const box = element("textarea", { class: "mono", rows: 24, spellcheck: "false", "aria-label": "All settings as TOML", value: file });
    return panel("All settings", element("p", { class: "soft" }, "As in a settings file. They are checked as a whole: a mistake is told with its line, and nothing changes."), box,
      element("div", { class: "row end" }, element("button", { class: "primary", onclick: () =>
        change((headers) => api("/admin/settings", { method: "PUT", text: box.value, headers: { ...headers, "content-type": "application/toml" }, signal }), "The settings were replaced.") }, "Check and save")));
  }

  async function drawHistory() {
    const { data, has_more: hasMore } = await api("/admin/settings/versions?limit=50", { signal });
    const detail = element("div", { "aria-live": "polite" });
    const compare = (version) => replace(detail, panel(`From version ${version.version} to the settings in use`,
      changeList(changesBetween(version.settings ?? {}, now.settings))));
    const revert = async (number) => {
      const what = number ? `version ${number}` : "the gateways' own files";
      if (await confirm("Go back?", `The settings of ${what} become current again, as a new version.`, "Go back"))
        change((headers) => api("/admin/settings/revert", { method: "POST", body: { version: number }, headers, signal }), `The settings are those of ${what}.`);
    };
    return [panel("History", table("History", [
      { title: "Version", cell: (row) => String(row.version) },
      { title: "Made", cell: (row) => time(row.created_at, true) },
      { title: "By", cell: (row) => row.actor },
      { title: "Note", cell: (row) => [row.note, row.settings === null && " the gateways' files count"] },
      { title: "State", cell: (row) => row.version === now.version ? badge("in use", "good") : "" },
      { title: "Actions", cell: (row) => row.version !== now.version && element("div", { class: "row" },
        element("button", { class: "small", "aria-label": `Compare version ${row.version}`, onclick: () => compare(row) }, "Compare"),
        element("button", { class: "small", "aria-label": `Go back to version ${row.version}`, onclick: () => revert(row.version) }, "Go back")) },
    ], data, "No change was made yet: the settings are those of the file, or the defaults."),
    hasMore && element("p", { class: "soft" }, "The 50 newest versions are shown; the admin API has the others."),
    now.version > 0 && element("div", { class: "row end" }, element("button", { onclick: () => revert(0) }, "Back to the gateways' files"))), detail];
  }

  const DRAWN = { limits: drawLimits, prices: drawPrices, models: drawModels, file: drawFile, history: drawHistory };

  async function draw() {
    cells = [];
    const drawing = tab;
    try {
      const made = await DRAWN[tab]();
      if (tab === drawing) replace(body, made);
    } catch (error) {
      if (!signal.aborted) replace(complaint, problem(error));
    }
  }

  replace(root, heading("Settings", "What may change while the server runs. Every change is checked, kept as a version, and in the audit log.",
    choice("Part", TABS, tab, (value) => { tab = value; complaint.replaceChildren(); draw(); })), state, complaint, body);
  await load();
}

function changeList(changes) {
  return changes.length ? element("ul", { class: "changes mono" }, changes.map((each) => element("li", {}, each))) : element("p", {}, "Nothing differs.");
}
