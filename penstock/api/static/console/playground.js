// The playground: talk to the models of this server. It is the page at `/` and a page of the console.

import { showCode } from "./code_dialog.js";
import { Composer } from "./composer.js";
import { Conversations, newConversation, titleOf } from "./conversations.js";
import { choice, element, replace } from "./dom.js";
import { HistoryList } from "./history_list.js";
import { Inference } from "./inference.js";
import { known, staysHere, takeImages } from "./models.js";
import { Pane } from "./pane.js";
import { DEFAULT_SETTINGS, requestOf } from "./requests.js";
import { settingsForm } from "./settings_form.js";

const KEPT = "penstock.playground"; // the settings and the model of last time
const STYLES = "/console/playground.css";
const NARROW_REM = 60; // as in playground.css, like the next one
const WIDE_REM = 78;
const SUGGESTIONS = [
  "Write a Python function that returns the n-th prime number.",
  "Explain continuous batching in two sentences.",
  "Make a table of three sorting algorithms and their costs.",
];

export async function show(root, context) {
  await loadStyles();
  const playground = new Playground(root, context);
  await playground.start();
  return () => playground.leave();
}

function loadStyles() {
  if (document.querySelector(`link[href="${STYLES}"]`)) return null;
  return new Promise((resolve) => {
    document.head.append(element("link", { rel: "stylesheet", href: STYLES, onload: resolve, onerror: resolve }));
  });
}

// Storage that forgets, for browsers that keep nothing for this page.
function openStorage() {
  try {
    localStorage.setItem("penstock.probe", "");
    localStorage.removeItem("penstock.probe");
    return localStorage;
  } catch {
    const items = new Map();
    return { getItem: (name) => items.get(name) ?? null, setItem: (name, text) => items.set(name, text), removeItem: (name) => items.delete(name) };
  }
}

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

class Playground {
  constructor(root, context) {
    this.root = root;
    this.context = context;
    this.inference = new Inference(context);
    this.storage = openStorage();
    this.store = new Conversations(this.storage);
    this.models = [];
    const kept = this.kept();
    this.settings = { ...structuredClone(DEFAULT_SETTINGS), ...kept.settings };
    this.conversation = newConversation(this.settings, kept.model ?? null, Date.now(), newId());
    root.classList.add("playground-page");
    this.build();
    root.replaceChildren(element("h1", { class: "unseen" }, "Playground"), this.node);
    this.showConversation();
  }

  build() {
    this.modelBoxes = [0, 1].map((at) => element("select", { class: "model-box", "aria-label": at ? "Second model" : "Model", onchange: (event) => this.chooseModel(at, event.target.value) }));
    this.versus = element("span", { class: "versus soft" }, "and");
    this.modes = element("div", {});
    this.problem = element("div", {});
    this.panesNode = element("div", { class: "panes" });
    this.composer = new Composer(this);
    this.history = new HistoryList(this);
    this.compareButton = this.toggle("Compare", "Answer with two models side by side", () => this.compare(this.panes.length === 1));
    this.sideButton = this.toggle("Chats", "Saved conversations", () => this.openDrawer("side"), "pg-side");
    this.settingsButton = this.toggle("Settings", "Parameters, tools and structured output", () => this.openDrawer("settings"), "pg-settings");
    this.side = element("aside", { class: "pg-side", id: "pg-side", "aria-label": "Conversations" }, this.history.node);
    this.settingsNode = element("aside", { class: "pg-settings", id: "pg-settings", "aria-label": "Settings" });
    const bar = element("div", { class: "pg-bar" },
      this.sideButton, element("div", { class: "model-choice" }, this.modelBoxes[0], this.versus, this.modelBoxes[1]), this.modes,
      element("div", { class: "pg-tools" }, this.compareButton,
        element("button", { type: "button", title: "The same call in curl, Python and JavaScript", onclick: () => this.openCode() }, "Code"), this.settingsButton));
    this.node = element("div", { class: "pg" }, this.side,
      element("div", { class: "pg-main" }, bar, this.problem, this.panesNode, this.composer.node), this.settingsNode);
    this.node.addEventListener("keydown", (event) => event.key === "Escape" && this.onEscape());
    if (!this.isNarrow) this.node.classList.add("side-open");
    if (this.width >= WIDE_REM) this.node.classList.add("settings-open");
    this.showDrawers();
  }

  get width() {
    return this.root.clientWidth / parseFloat(getComputedStyle(document.documentElement).fontSize);
  }

  // Whether the drawers lie over the conversation.
  get isNarrow() {
    return this.width < NARROW_REM;
  }

  toggle(label, title, onclick, controls = null) {
    return element("button", { type: "button", title, onclick, "aria-controls": controls }, label);
  }

  async start() {
    try {
      this.models = (await this.inference.models(this.context.signal)).filter(Boolean);
      replace(this.problem);
    } catch (error) {
      if (this.context.signal.aborted) return;
      replace(this.problem, element("p", { class: "problem", role: "alert" }, error.message, " ",
        element("button", { type: "button", onclick: () => this.start() }, "Try again")));
    }
    this.panes.forEach((pane) => (pane.model = known(this.models, pane.model)));
    this.panes.forEach((pane) => pane.running || pane.show());
    this.refresh();
    this.composer.entry.focus();
  }

  leave() {
    this.stopAll();
    this.root.classList.remove("playground-page");
  }

  get isRunning() {
    return this.panes.some((pane) => pane.running);
  }

  current() {
    return this.conversation;
  }

  showConversation() {
    this.panes = this.conversation.panes.map(({ model, messages }) => new Pane(this, known(this.models, model), messages));
    this.panesNode.replaceChildren(...this.panes.map((pane) => pane.node));
    this.showSettings();
    this.refresh();
    this.history.show();
  }

  showSettings() {
    replace(this.settingsNode, element("div", { class: "settings-head" }, element("h2", {}, "Settings"),
      element("button", { type: "button", class: "quiet", onclick: () => {
        Object.assign(this.settings, structuredClone(DEFAULT_SETTINGS), { mode: this.settings.mode });
        this.keep();
        this.showSettings();
      } }, "Reset"), element("button", { type: "button", class: "quiet close-drawer", onclick: () => this.openDrawer("settings") }, "Close")),
      settingsForm(this.settings, () => this.keep()));
    replace(this.modes, choice("Mode", [["chat", "Chat"], ["completion", "Completion"]], this.settings.mode, (mode) => this.chooseMode(mode)));
  }

  chooseMode(mode) {
    if (this.conversation.panes[0].messages.length) this.startNew();
    this.settings.mode = mode;
    this.keep();
    this.showConversation();
  }

  // Draws what depends on which model is chosen and whether an answer is on its way.
  refresh() {
    const isComparing = this.panes.length > 1;
    this.node.classList.toggle("comparing", isComparing);
    this.compareButton.setAttribute("aria-pressed", String(isComparing));
    this.modelBoxes.forEach((box, at) => {
      const model = this.panes[at]?.model;
      replace(box, this.models.map(({ id }) => element("option", { value: id, selected: id === model }, id)));
      box.hidden = at >= this.panes.length || !this.models.length;
      box.disabled = this.isRunning || !this.models.length;
    });
    this.versus.hidden = !isComparing;
    const { mode } = this.settings;
    const takesImages = mode === "chat" && takeImages(this.models, this.panes.map((pane) => pane.model));
    this.composer.show({ isRunning: this.isRunning, takesImages, mode });
  }

  chooseModel(at, model) {
    this.panes[at].model = model;
    this.conversation.panes[at].model = model;
    this.panes[at].show();
    this.keep();
    this.refresh();
  }

  compare(isOn) {
    if (this.isRunning) return;
    const { panes } = this.conversation;
    const other = this.models.find(({ id }) => id !== this.panes[0].model)?.id ?? this.panes[0].model;
    if (isOn) panes.push({ model: other, messages: structuredClone(panes[0].messages) });
    else panes.length = 1;
    this.showConversation();
  }

  welcome() {
    const isChat = this.settings.mode === "chat";
    return element("div", { class: "welcome" },
      element("h2", {}, isChat ? "Ask anything." : "Write the beginning of a text."),
      element("p", { class: "soft" }, staysHere(this.models) ? "Nothing leaves this server." : ""),
      isChat && element("div", { class: "suggestions" }, SUGGESTIONS.map((text) => element("button", { type: "button", onclick: () => this.send(text, []) }, text))));
  }

  send(text, images) {
    if (this.isRunning || !this.models.length) {
      this.composer.setText(text);
      return;
    }
    try {
      requestOf(this.panes[0].model, [], this.settings);
    } catch (error) {
      this.composer.setText(text);
      this.composer.say(error.message);
      return;
    }
    for (const pane of this.panes) pane.ask({ role: "user", text, ...(images.length ? { images } : {}) });
    this.saved();
  }

  stopAll() {
    this.panes.forEach((pane) => pane.stop());
  }

  onEscape() {
    if (this.isRunning) this.stopAll();
    else if (this.isNarrow) {
      this.node.classList.remove("side-open", "settings-open");
      this.showDrawers();
    }
  }

  editLast() {
    const buttons = this.panes[0].turns.querySelectorAll(".asked .turn-actions button:nth-of-type(2)");
    [...buttons].at(-1)?.click();
  }

  takePrompt(text) {
    this.composer.setText(text);
    this.composer.entry.focus();
  }

  // Called after every change of the messages. An answer may end after its conversation was left, or deleted.
  saved(conversation = this.conversation) {
    if (!conversation.panes[0].messages.length) return;
    if (conversation === this.conversation) {
      conversation.panes.forEach((pane, at) => (pane.model = this.panes[at]?.model ?? pane.model));
      conversation.settings = structuredClone(this.settings);
    } else if (!this.store.list().some(({ id }) => id === conversation.id)) {
      return;
    }
    conversation.updatedAt = Date.now();
    if (!conversation.isNamed) conversation.title = titleOf(conversation);
    if (!this.store.save(conversation)) this.composer.say("This conversation is too large to be saved in this browser.");
    this.history.show();
  }

  startNew() {
    this.stopAll();
    this.conversation = newConversation(this.settings, this.panes[0].model, Date.now(), newId());
    if (this.panes.length > 1) this.conversation.panes.push({ model: this.panes[1].model, messages: [] });
    this.showConversation();
    this.composer.entry.focus();
  }

  openConversation(id) {
    const conversation = this.store.load(id);
    if (conversation === null) return;
    this.stopAll();
    this.conversation = conversation;
    this.settings = { ...structuredClone(DEFAULT_SETTINGS), ...conversation.settings };
    if (this.isNarrow) this.node.classList.remove("side-open");
    this.showDrawers();
    this.showConversation();
  }

  rename(id, title) {
    if (id === this.conversation.id) Object.assign(this.conversation, { title: title.trim() || this.conversation.title, isNamed: true });
    this.store.rename(id, title);
    this.history.show();
  }

  async importFile(file) {
    try {
      this.openConversation(this.store.importJson(await file.text(), newId()).id);
    } catch (error) {
      this.composer.say(error.message);
    }
  }

  openCode() {
    const { messages } = this.panes[0];
    const typed = this.composer.entry.value.trim();
    const until = messages.findLastIndex(({ role }) => role !== "assistant") + 1;
    const sent = typed ? [...messages, { role: "user", text: typed, images: this.composer.images }] : messages.slice(0, until);
    try {
      const request = requestOf(this.panes[0].model, sent.length ? sent : [{ role: "user", text: "Hello" }], this.settings);
      showCode(request, { baseUrl: location.origin, hasKey: Boolean(this.context.key()) });
    } catch (error) {
      this.composer.say(error.message);
    }
  }

  openDrawer(name) {
    this.node.classList.toggle(`${name}-open`);
    this.showDrawers();
  }

  showDrawers() {
    for (const [name, button, drawer] of [["side", this.sideButton, this.side], ["settings", this.settingsButton, this.settingsNode]]) {
      const isOpen = this.node.classList.contains(`${name}-open`);
      button.setAttribute("aria-expanded", String(isOpen));
      drawer.hidden = !isOpen;
    }
  }

  kept() {
    try {
      return JSON.parse(this.storage.getItem(KEPT)) ?? {};
    } catch {
      return {};
    }
  }

  keep() {
    try {
      this.storage.setItem(KEPT, JSON.stringify({ settings: this.settings, model: this.panes?.[0].model }));
    } catch {
      // a full storage loses the settings of this time, and nothing else
    }
  }
}
