// One message of a conversation on the page: what was asked, an answer, or a tool's result, with what can be done to it.

import { describe } from "./answers.js";
import { copy } from "./clipboard.js";
import { element, replace } from "./dom.js";
import { codeNode, MarkdownView } from "./markdown.js";
import { tokensView } from "./probabilities.js";

// `actions` are the pane's: edit(text), regenerate(), choose(step), sendResults(texts), continueFrom(). Each is null
// where it makes no sense for this message.
export function turnOf(message, actions, isCompletion) {
  if (message.role === "user") return new Asked(message, actions, isCompletion);
  if (message.role === "tool") return new Result(message);
  return new Answered(message, actions, isCompletion);
}

const button = (label, title, onclick, attributes = {}) =>
  element("button", { type: "button", class: "quiet", title, onclick, ...attributes }, label);

export function picture(url, alt) {
  return element("img", { class: "picture", src: url, alt });
}

class Asked {
  constructor(message, actions, isCompletion) {
    this.node = element("article", { class: isCompletion ? "turn asked prompt" : "turn asked", "aria-label": isCompletion ? "Prompt" : "You" });
    this.message = message;
    this.actions = actions;
    this.show();
  }

  show() {
    const { message } = this;
    const images = (message.images ?? []).map((url, at) => picture(url, `Attached image ${at + 1}`));
    const lost = message.lostImages ? element("p", { class: "soft" }, `${message.lostImages} image(s) were too large to be saved.`) : null;
    replace(this.node, element("div", { class: "bubble" }, images, lost, element("div", { class: "plain" }, message.text)),
      element("div", { class: "turn-actions" },
        button("Copy", "Copy this message", (event) => copy(message.text, event.currentTarget)),
        this.actions.edit && button("Edit", "Edit this message and continue from here", () => this.edit())));
  }

  edit() {
    editor(this.node, this.message.text, "Send", (text) => this.actions.edit(text), () => this.show());
  }
}

// Puts a text area in place of a turn. Escape cancels; Ctrl or ⌘ with Enter saves.
function editor(node, text, label, save, cancel) {
  const area = element("textarea", { class: "editor", "aria-label": "Message", rows: Math.min(16, text.split("\n").length + 1), value: text });
  const done = () => area.value.trim() && save(area.value);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
  });
  replace(node, element("div", { class: "editing" }, area, element("div", { class: "row end" },
    element("button", { type: "button", onclick: cancel }, "Cancel"),
    element("button", { type: "button", class: "primary", onclick: done }, label))));
  area.focus();
  area.setSelectionRange(text.length, text.length);
}

class Result {
  constructor(message) {
    this.node = element("article", { class: "turn result", "aria-label": `Result of ${message.name}` },
      element("p", { class: "call-head" }, "Result of ", element("code", {}, message.name)),
      codeNode({ language: isJson(message.text) ? "json" : "", text: message.text }, { onCopy: copy }));
  }
}

class Answered {
  constructor(message, actions, isCompletion) {
    this.message = message;
    this.actions = actions;
    this.isCompletion = isCompletion;
    this.thoughts = element("div", { class: "plain" });
    this.summary = element("summary", {}, "Reasoning");
    this.fold = element("details", { class: "reasoning", hidden: true }, this.summary, this.thoughts);
    this.body = element("div", { class: isCompletion ? "answer-text plain" : "answer-text" });
    this.calls = element("div", { class: "calls" });
    this.problem = element("p", { class: "problem", role: "alert", hidden: true });
    this.figures = element("p", { class: "figures" });
    this.tools = element("div", { class: "turn-actions" });
    this.node = element("article", { class: "turn answered", "aria-label": message.model || "Answer" },
      this.fold, this.body, this.calls, this.problem, this.figures, this.tools);
    this.view = new MarkdownView(this.body, { onCopy: copy });
    this.showsTokens = message.tokens?.length > 0;
  }

  // While an answer comes in: text and reasoning only.
  grow(message, figures) {
    this.node.classList.add("live");
    this.node.setAttribute("aria-busy", "true");
    this.message = message;
    this.showReasoning(true);
    this.showText();
    this.showCalls();
    this.figures.textContent = figures ? describe(figures) : "";
  }

  finish(message = this.message) {
    this.node.classList.remove("live");
    this.node.removeAttribute("aria-busy");
    this.message = message;
    this.showsTokens = message.tokens?.length > 0;
    this.showReasoning(false);
    this.showBody();
    this.showCalls();
    this.problem.hidden = !message.problem;
    this.problem.textContent = message.problem ?? "";
    this.figures.textContent = message.figures ? describe(message.figures) : "";
    this.showActions();
  }

  showReasoning(isLive) {
    const { reasoning, text } = this.message;
    this.fold.hidden = !reasoning;
    this.summary.textContent = isLive && !text ? "Reasoning …" : "Reasoning";
    if (this.thoughts.textContent !== reasoning) this.thoughts.textContent = reasoning ?? "";
  }

  showText() {
    if (this.isCompletion) this.body.textContent = this.message.text;
    else this.view.update(this.message.text);
  }

  showBody() {
    this.body.replaceChildren();
    this.view = new MarkdownView(this.body, { onCopy: copy });
    if (this.showsTokens) this.body.append(tokensView(this.message.tokens));
    else if (!this.isCompletion && this.message.isJson) this.body.append(codeNode({ language: "json", text: prettyJson(this.message.text) }, { onCopy: copy }));
    else this.showText();
  }

  showCalls() {
    const calls = this.message.calls ?? [];
    const wants = this.actions.sendResults && calls.length;
    const boxes = calls.map((call) => wants && element("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "What the function returned" }));
    const cards = calls.map((call, at) => element("div", { class: "call" },
      element("p", { class: "call-head" }, "Calls ", element("code", {}, call.name)),
      codeNode({ language: "json", text: prettyJson(call.arguments) }, { onCopy: copy }), boxes[at]));
    const send = () => this.actions.sendResults(boxes.map((box) => box.value));
    replace(this.calls, cards, wants ? element("div", { class: "row end" }, element("button", { type: "button", class: "primary", onclick: send }, calls.length > 1 ? "Send results" : "Send result")) : null);
  }

  showActions() {
    const { message, actions } = this;
    const variants = message.variants ?? [];
    const tokens = message.tokens?.length && button("Probabilities", "Show how likely each token was", (event) => {
      this.showsTokens = !this.showsTokens;
      event.currentTarget.setAttribute("aria-pressed", String(this.showsTokens));
      this.showBody();
    }, { "aria-pressed": String(this.showsTokens) });
    replace(this.tools,
      actions.choose && variants.length > 1 && element("span", { class: "variants" },
        button("‹", "The answer before", () => actions.choose(-1), { "aria-label": "The answer before", disabled: message.chosen === 0 }),
        element("span", {}, `${message.chosen + 1}/${variants.length}`),
        button("›", "The next answer", () => actions.choose(1), { "aria-label": "The next answer", disabled: message.chosen === variants.length - 1 })),
      message.text && button("Copy", "Copy this answer", (event) => copy(message.text, event.currentTarget)),
      actions.regenerate && button("Regenerate", "Answer again", actions.regenerate),
      actions.edit && message.text && button("Edit", "Edit this answer and continue from here", () => this.edit()),
      actions.continueFrom && message.text && button("Continue", "Put the prompt and its completion into the box", actions.continueFrom),
      tokens || null);
  }

  edit() {
    const rest = [...this.node.childNodes];
    editor(this.node, this.message.text, "Save", (text) => this.actions.edit(text), () => replace(this.node, rest));
  }
}

export function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function isJson(text) {
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
}
