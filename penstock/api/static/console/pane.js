// One transcript with one model: its messages, their turns on the page, and the answer that is on its way. A comparison
// has two panes.

import { Answer, Sentences } from "./answers.js";
import { announce, element, replace } from "./dom.js";
import { requestOf, streamed } from "./requests.js";
import { turnOf } from "./turn.js";

const NEAR_END_PX = 90;

export class Pane {
  // `host` is the playground: settings, inference, saved(), refresh(), takePrompt(text), welcome().
  constructor(host, model, messages = []) {
    this.host = host;
    this.model = model;
    this.messages = messages;
    this.running = null; // the AbortController of the answer on its way
    this.turns = element("div", { class: "turns", role: "log", "aria-live": "off", "aria-label": "Conversation" });
    this.name = element("h2", { class: "pane-name" });
    this.scroller = element("div", { class: "pane-scroll", tabindex: 0, role: "region", "aria-label": "Messages" }, this.turns);
    this.node = element("section", { class: "pane" }, this.name, this.scroller);
    this.show();
  }

  get isCompletion() {
    return this.host.settings.mode === "completion";
  }

  show() {
    this.name.textContent = this.model ?? "";
    this.node.setAttribute("aria-label", this.model ? `Chat with ${this.model}` : "Chat");
    if (!this.messages.length) {
      replace(this.turns, this.host.welcome());
      return;
    }
    const turns = this.messages.map((message, at) => {
      const turn = turnOf(message, this.actionsOf(message, at), this.isCompletion);
      turn.finish?.();
      return turn.node;
    });
    replace(this.turns, turns);
    this.scrollDown();
  }

  actionsOf(message, at) {
    if (this.running) return {};
    const isLast = at === this.messages.length - 1;
    const isAnswer = message.role === "assistant";
    return {
      edit: (text) => (isAnswer ? this.rewrite(at, text) : this.askAgain(at, text)),
      regenerate: isAnswer ? () => this.regenerate(at) : null,
      choose: isAnswer && isLast ? (step) => this.choose(at, step) : null,
      sendResults: isAnswer && isLast && message.calls?.length ? (texts) => this.sendResults(message.calls, texts) : null,
      continueFrom: isAnswer && this.isCompletion ? () => this.host.takePrompt(this.messages[at - 1].text + message.text) : null,
    };
  }

  ask(message) {
    this.messages.push(message);
    return this.answer();
  }

  askAgain(at, text) {
    this.messages.splice(at, this.messages.length, { ...this.messages[at], text });
    return this.answer();
  }

  rewrite(at, text) {
    const { role, model, reasoning, calls } = this.messages[at];
    this.messages.splice(at, this.messages.length, { role, model, reasoning, calls, text });
    this.host.saved();
    this.show();
  }

  regenerate(at) {
    const { variants, chosen, ...old } = this.messages[at];
    this.messages.length = at;
    return this.answer(old.problem ? (variants ?? []) : (variants ?? [old]));
  }

  choose(at, step) {
    const { variants, chosen } = this.messages[at];
    const next = chosen + step;
    if (!variants[next]) return;
    this.messages[at] = { ...variants[next], variants, chosen: next };
    this.host.saved();
    this.show();
  }

  sendResults(calls, texts) {
    this.messages.push(...calls.map(({ id, name }, at) => ({ role: "tool", callId: id, name, text: texts[at] })));
    return this.answer();
  }

  stop() {
    this.running?.abort();
  }

  // Answers the last message. `variants` are the answers before, where this is another one to the same message.
  async answer(variants = []) {
    const { messages } = this; // a new chat gets a new list, so that a late answer cannot leak into it
    const conversation = this.host.current(); // the user may open another one meanwhile
    const controller = (this.running = new AbortController());
    const answer = new Answer(this.model, performance.now());
    this.show();
    const turn = turnOf(answer.message, {}, this.isCompletion);
    turn.grow(answer.message, null);
    this.turns.append(turn.node);
    this.scrollDown();
    this.host.refresh();
    announce(`${this.model} is answering.`);
    try {
      const request = streamed(requestOf(this.model, messages, this.host.settings));
      await this.read(request, answer, turn, controller.signal);
    } catch (error) {
      if (controller.signal.aborted) answer.end = "stopped";
      else answer.message.problem = error.message;
    }
    this.running = null;
    messages.push(finished(answer, variants, this.host.settings));
    this.host.saved(conversation);
    if (this.messages === messages) this.show();
    this.host.refresh();
    if (answer.message.problem) announce(answer.message.problem);
  }

  async read(request, answer, turn, signal) {
    const sentences = new Sentences();
    let isDrawing = false;
    const draw = () => {
      isDrawing = false;
      if (this.running === null || !turn.node.isConnected) return;
      const follows = this.isAtEnd();
      turn.grow(answer.message, answer.figures);
      if (follows) this.scrollDown();
      const news = sentences.next(answer.message.text);
      if (news) announce(news);
    };
    for await (const event of this.host.inference.stream(request, signal)) {
      answer.take(event, performance.now());
      if (isDrawing) continue;
      isDrawing = true;
      requestAnimationFrame(draw);
    }
    const rest = sentences.next(answer.message.text, true);
    announce(rest ? `${rest} End of the answer.` : "End of the answer.");
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  scrollDown() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

function finished(answer, variants, settings) {
  const { tokens, ...message } = answer.message;
  const own = { ...message, figures: answer.figures };
  if (tokens.length) own.tokens = tokens;
  if (settings.format !== "text" && settings.mode === "chat") own.isJson = true;
  if (!variants.length) return own;
  const all = [...variants, own];
  return { ...own, variants: all, chosen: all.length - 1 };
}
