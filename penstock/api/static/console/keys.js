// Keys and workspaces: make, show once, change, revoke; and what was done by whom.

import { announce, append, badge, confirm, element, field, heading, panel, problem, replace, select, table } from "./dom.js";
import { time } from "./format.js";

const SCOPES = [
  ["inference", "ask models for answers"], ["usage", "read its workspace's usage"],
  ["metrics", "read /metrics"], ["admin", "administer this server"],
];
const TIERS = [["default", "default"], ["priority", "priority"], ["batch", "batch"]];
const LIFETIMES = [["", "Never"], ["1", "In a day"], ["30", "In 30 days"], ["90", "In 90 days"], ["365", "In a year"]];
const TONES = { active: "good", revoked: "bad", expired: "warn" };

export async function show(root, { api, signal }) {
  const secret = element("div", { "aria-live": "assertive" });
  const complaint = element("div");
  const keys = element("div");
  const workspaces = element("div");
  const audit = element("div");
  const forms = element("div", { class: "grid-2" });
  let known = [];

  async function all(path) {
    const found = [];
    for (let after = "", more = true; more && found.length < 2000;) {
      const page = await api(`${path}?limit=100${after && `&after=${encodeURIComponent(after)}`}`, { signal });
      found.push(...page.data);
      [after, more] = [page.last_id, page.has_more];
    }
    return found;
  }

  async function attempt(work) {
    complaint.replaceChildren();
    try {
      await work();
      await load();
    } catch (error) {
      if (!signal.aborted) replace(complaint, problem(error));
    }
  }

  async function load() {
    const [foundKeys, foundWorkspaces, entries] = await Promise.all([
      all("/admin/keys"), all("/admin/workspaces"), api("/admin/audit?limit=20", { signal })]);
    known = foundWorkspaces;
    const name = (id) => known.find((each) => each.id === id)?.name ?? id;
    replace(keys, panel("Keys", table("Keys", [
      { title: "Name", cell: (row) => row.name },
      { title: "Begins with", cell: (row) => element("code", {}, `${row.prefix}…`) },
      { title: "State", cell: (row) => badge(row.status, TONES[row.status]) },
      { title: "Workspace", cell: (row) => name(row.workspace_id) },
      { title: "Scopes", cell: (row) => row.scopes.join(", ") },
      { title: "Models", cell: (row) => row.allowed_models?.join(", ") ?? "all" },
      { title: "Best tier", cell: (row) => row.best_tier },
      { title: "Expires", cell: (row) => row.expires_at === null ? "never" : time(row.expires_at, true) },
      { title: "Last used", cell: (row) => row.last_used_at === null ? "–" : time(row.last_used_at, true) },
      { title: "Actions", cell: (row) => row.status === "active" && element("div", { class: "row" },
        element("button", { class: "small", "aria-label": `Change ${row.name}`, onclick: () => change(row) }, "Change"),
        element("button", { class: "small danger", "aria-label": `Revoke ${row.name}`, onclick: () => revoke(row) }, "Revoke")) },
    ], foundKeys, "No keys yet.")));
    replace(workspaces, panel("Workspaces", table("Workspaces", [
      { title: "Name", cell: (row) => row.name },
      { title: "Id", cell: (row) => element("code", {}, row.id) },
      { title: "Keys", number: true, cell: (row) => String(foundKeys.filter((key) => key.workspace_id === row.id && key.status === "active").length) },
      { title: "Made", cell: (row) => time(row.created_at, true) },
      { title: "State", cell: (row) => row.archived_at === null ? badge("active", "good") : badge("archived", "warn") },
      { title: "Actions", cell: (row) => row.archived_at === null && row.id !== "default"
        && element("button", { class: "small danger", "aria-label": `Archive ${row.name}`, onclick: () => archive(row) }, "Archive") },
    ], known)));
    replace(audit, panel("Last changes", table("Last changes", [
      { title: "Time", cell: (row) => time(row.at, true) },
      { title: "Action", cell: (row) => row.action },
      { title: "Of", cell: (row) => element("code", {}, row.target) },
      { title: "By", cell: (row) => row.actor },
    ], entries.data, "Nothing was changed yet.")));
    drawForms();
  }

  function drawForms() {
    if (forms.contains(document.activeElement)) return;
    replace(forms, keyForm(), workspaceForm());
  }

  function scopeBoxes(chosen) {
    return element("fieldset", {}, element("legend", { class: "soft" }, "Scopes"), SCOPES.map(([name, meaning]) =>
      element("label", { class: "check" }, element("input", { type: "checkbox", name: "scope", value: name, checked: chosen.includes(name) }),
        element("span", {}, name, element("small", { class: "soft" }, ` – ${meaning}`)))));
  }

  const modelsOf = (text) => text.trim() ? text.split(",").map((each) => each.trim()).filter(Boolean) : null;
  const scopesOf = (form) => [...form.querySelectorAll("input[name=scope]:checked")].map((box) => box.value);

  function keyForm() {
    const form = element("form", { class: "panel", "aria-label": "New key" });
    append(form, [element("h2", {}, "New key"), element("div", { class: "fields" },
      field("Name", { name: "name", required: true, maxlength: 256, autocomplete: "off" }),
      select("Workspace", known.filter((each) => each.archived_at === null).map((each) => [each.id, each.name]), "default", null, { name: "workspace" }),
      select("Best tier", TIERS, "default", null, { name: "tier" }),
      select("Expires", LIFETIMES, "", null, { name: "lifetime" }),
      field("Models", { name: "models", placeholder: "all", autocomplete: "off" }, "Names with commas between them; empty allows all.")),
    scopeBoxes(["inference"]), element("div", { class: "row end" }, element("button", { class: "primary" }, "Make the key"))]);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = Object.fromEntries(new FormData(form));
      document.activeElement.blur();
      attempt(async () => {
        const made = await api("/admin/keys", { method: "POST", body: {
          name: given.name, workspace_id: given.workspace, best_tier: given.tier, scopes: scopesOf(form),
          allowed_models: modelsOf(given.models), expires_at: given.lifetime ? Date.now() / 1000 + Number(given.lifetime) * 86400 : null } });
        showSecret(made);
      });
    });
    return form;
  }

  function workspaceForm() {
    const form = element("form", { class: "panel", "aria-label": "New workspace" }, element("h2", {}, "New workspace"),
      element("p", { class: "soft" }, "Tenants of different workspaces share nothing: no cache, no files, no usage."),
      field("Name", { name: "name", required: true, maxlength: 256, autocomplete: "off" }),
      element("div", { class: "row end" }, element("button", { class: "primary" }, "Make the workspace")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const name = form.elements.name.value;
      document.activeElement.blur();
      attempt(async () => {
        await api("/admin/workspaces", { method: "POST", body: { name } });
        announce(`The workspace ${name} was made.`);
      });
    });
    return form;
  }

  function showSecret(made) {
    const text = element("code", { class: "secret" }, made.secret);
    const copy = element("button", { class: "small", onclick: async () => {
      try {
        await navigator.clipboard.writeText(made.secret);
        copy.textContent = "Copied";
      } catch { getSelection().selectAllChildren(text); }
    } }, "Copy");
    replace(secret, element("div", { class: "note" }, element("p", {}, element("strong", {}, `The key '${made.name}' is shown this once. `), "Keep it somewhere safe."),
      element("div", { class: "row" }, text, copy, element("button", { class: "small", onclick: () => secret.replaceChildren() }, "Done"))));
    secret.scrollIntoView({ block: "nearest" });
  }

  async function revoke(key) {
    if (await confirm("Revoke this key?", `Requests with the key '${key.name}' will be refused from now on. This cannot be undone.`, "Revoke")) {
      attempt(async () => {
        await api(`/admin/keys/${encodeURIComponent(key.id)}`, { method: "DELETE" });
        announce(`The key ${key.name} was revoked.`);
      });
    }
  }

  async function archive(workspace) {
    if (await confirm("Archive this workspace?", `All keys of the workspace '${workspace.name}' stop working.`, "Archive")) {
      attempt(() => api(`/admin/workspaces/${encodeURIComponent(workspace.id)}`, { method: "DELETE" }));
    }
  }

  function change(key) {
    const form = element("form", { method: "dialog" }, element("h2", {}, `Change '${key.name}'`),
      field("Name", { name: "name", required: true, value: key.name }),
      select("Best tier", TIERS, key.best_tier, null, { name: "tier" }),
      field("Models", { name: "models", value: key.allowed_models?.join(", ") ?? "", placeholder: "all" }, "Names with commas between them; empty allows all."),
      scopeBoxes(key.scopes),
      element("div", { class: "row end" }, element("button", { value: "no", formnovalidate: true }, "Cancel"), element("button", { value: "yes", class: "primary" }, "Save")));
    const dialog = element("dialog", { "aria-label": "Change a key" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (dialog.returnValue !== "yes") return;
      const given = Object.fromEntries(new FormData(form));
      attempt(() => api(`/admin/keys/${encodeURIComponent(key.id)}`, { method: "PATCH", body: {
        name: given.name, best_tier: given.tier, scopes: scopesOf(form), allowed_models: modelsOf(given.models) } }));
    });
    document.body.append(dialog);
    dialog.showModal();
  }

  replace(root, heading("Keys and workspaces", "Who may use this server, and for what."), secret, complaint, keys, forms, workspaces, audit);
  await load();
}
