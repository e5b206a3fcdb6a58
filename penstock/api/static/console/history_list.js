// The list of saved conversations: search, open, rename, export, delete.

import { exportJson, exportMarkdown } from "./conversations.js";
import { confirm, download, element, replace } from "./dom.js";

const DAY_MS = 86_400_000;

export function agoOf(updatedAt, now) {
  const days = Math.floor(startOfDay(now) / DAY_MS) - Math.floor(startOfDay(updatedAt) / DAY_MS);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  return days < 7 ? "This week" : days < 31 ? "This month" : "Older";
}

function startOfDay(time) {
  const date = new Date(time);
  return Date.UTC(date.getFullYear(), date.getMonth(), date.getDate());
}

export class HistoryList {
  // `host` has store, current(), openConversation(id), startNew(), importFile(file).
  constructor(host) {
    this.host = host;
    this.search = element("input", { type: "search", placeholder: "Search", "aria-label": "Search the saved conversations", oninput: () => this.show() });
    this.list = element("nav", { class: "history", "aria-label": "Saved conversations" });
    this.file = element("input", { type: "file", accept: "application/json,.json", hidden: true, onchange: (event) => {
      const [file] = event.target.files;
      if (file) this.host.importFile(file);
      event.target.value = "";
    } });
    this.node = element("div", { class: "history-frame" },
      element("button", { type: "button", class: "primary new-chat", onclick: () => this.host.startNew() }, "New chat"),
      this.search, this.list, this.file,
      element("div", { class: "history-foot" },
        element("button", { type: "button", class: "quiet", onclick: () => this.file.click() }, "Import"),
        element("button", { type: "button", class: "quiet", onclick: () => this.clear() }, "Delete all")));
    this.show();
  }

  show() {
    const found = this.host.store.search(this.search.value);
    const rows = [];
    let group = "";
    for (const entry of found) {
      const ago = agoOf(entry.updatedAt, Date.now());
      if (ago !== group) rows.push(element("h3", { class: "history-group" }, ago));
      group = ago;
      rows.push(this.row(entry));
    }
    const empty = this.search.value ? "Nothing was found." : "Conversations are kept in this browser.";
    replace(this.list, rows.length ? rows : element("p", { class: "soft" }, empty));
  }

  row({ id, title }) {
    const isCurrent = id === this.host.current().id;
    const menu = element("details", { class: "history-menu" }, element("summary", { "aria-label": `More about ${title}`, title: "More" }, "⋯"),
      element("div", { class: "menu" },
        this.item("Rename", menuOf, () => this.rename(id, title)),
        this.item("Export as JSON", menuOf, () => this.export(id, "json")),
        this.item("Export as Markdown", menuOf, () => this.export(id, "md")),
        this.item("Delete", menuOf, () => this.remove(id, title), "danger")));
    function menuOf() {
      return menu;
    }
    menu.addEventListener("focusout", (event) => menu.contains(event.relatedTarget) || (menu.open = false));
    menu.addEventListener("keydown", (event) => event.key === "Escape" && (menu.open = false));
    return element("div", { class: "history-row" },
      element("button", { type: "button", class: "history-open", "aria-current": isCurrent ? "true" : null, title, onclick: () => this.host.openConversation(id) }, title), menu);
  }

  item(label, menuOf, onclick, tone = "") {
    return element("button", { type: "button", class: `quiet ${tone}`, onclick: () => {
      menuOf().open = false;
      onclick();
    } }, label);
  }

  rename(id, title) {
    const box = element("input", { value: title, "aria-label": "Title" });
    const dialog = element("dialog", { "aria-label": "Rename" }, element("form", { method: "dialog" },
      element("h2", {}, "Rename"), box,
      element("div", { class: "row end" }, element("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), element("button", { class: "primary", value: "yes" }, "Rename"))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (dialog.returnValue === "yes") this.host.rename(id, box.value);
    });
    document.body.append(dialog);
    dialog.showModal();
    box.select();
  }

  export(id, kind) {
    const conversation = this.host.store.load(id);
    if (conversation === null) return;
    const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation";
    if (kind === "json") download(`${name}.json`, exportJson(conversation), "application/json");
    else download(`${name}.md`, exportMarkdown(conversation), "text/markdown");
  }

  async remove(id, title) {
    if (!(await confirm("Delete this conversation?", `“${title}” will be gone for good.`, "Delete"))) return;
    this.host.store.remove(id);
    if (id === this.host.current().id) this.host.startNew();
    this.show();
  }

  async clear() {
    const count = this.host.store.list().length;
    if (!count || !(await confirm("Delete all conversations?", `All ${count} saved conversations will be gone for good.`, "Delete all"))) return;
    this.host.store.clear();
    this.host.startNew();
    this.show();
  }
}
