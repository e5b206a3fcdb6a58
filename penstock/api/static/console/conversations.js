// Saved conversations: in this browser alone, bounded in number and size, oldest out first.
//
// One entry of the storage per conversation and one for the list, so that saving a message does not rewrite all.
// A conversation is {id, title, updatedAt, settings, panes: [{model, messages}]}.

const PREFIX = "penstock.conversation.";
const INDEX = "penstock.conversations";
export const MAX_CONVERSATIONS = 200;
export const MAX_TOTAL_LENGTH = 3_500_000; // characters; browsers give an origin about five million
export const MAX_LENGTH = 1_000_000;
const TITLE_LENGTH = 60;

export function newConversation(settings, model, now, id) {
  return { id, title: "New chat", updatedAt: now, settings: structuredClone(settings), panes: [{ model, messages: [] }] };
}

export function titleOf(conversation) {
  const first = conversation.panes[0]?.messages.find((message) => message.role === "user");
  const line = (first?.text ?? "").trim().split("\n")[0];
  if (!line) return first?.images?.length ? "Image" : "New chat";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
}

// Text of a conversation without what only this page needs. Images are left out where they are too large to keep.
function packed(conversation) {
  const whole = JSON.stringify(conversation);
  if (whole.length <= MAX_LENGTH) return whole;
  const lean = structuredClone(conversation);
  for (const pane of lean.panes) {
    for (const message of pane.messages) {
      if (message.images?.length) Object.assign(message, { images: [], lostImages: message.images.length });
      delete message.tokens;
    }
  }
  const text = JSON.stringify(lean);
  return text.length <= MAX_LENGTH ? text : null;
}

export class Conversations {
  // `storage` is localStorage, or anything with getItem, setItem and removeItem.
  constructor(storage) {
    this.storage = storage;
  }

  // {id, title, updatedAt, length} of each, newest first. Damaged entries are as good as none.
  list() {
    try {
      const list = JSON.parse(this.storage.getItem(INDEX) ?? "[]");
      return Array.isArray(list) ? list.filter((entry) => typeof entry?.id === "string" && typeof entry.title === "string") : [];
    } catch {
      return [];
    }
  }

  load(id) {
    try {
      return checked(JSON.parse(this.storage.getItem(PREFIX + id)));
    } catch {
      return null;
    }
  }

  // Returns false where the conversation is too large to be kept, or the browser keeps nothing.
  save(conversation) {
    const text = packed(conversation);
    if (text === null) return false;
    const entry = { id: conversation.id, title: conversation.title, updatedAt: conversation.updatedAt, length: text.length };
    let list = [entry, ...this.list().filter(({ id }) => id !== conversation.id)].sort((one, other) => other.updatedAt - one.updatedAt);
    list = this.dropOldest(list, conversation.id, (kept) => kept.length > MAX_CONVERSATIONS || total(kept) > MAX_TOTAL_LENGTH);
    for (;;) {
      try {
        this.storage.setItem(PREFIX + conversation.id, text);
        this.storage.setItem(INDEX, JSON.stringify(list));
        return true;
      } catch {
        if (list.length < 2) return false; // there is no room even for this one
        const before = list.length;
        list = this.dropOldest(list, conversation.id, (kept) => kept.length === before);
      }
    }
  }

  dropOldest(list, keptId, isTooMuch) {
    const kept = [...list];
    while (kept.length > 1 && isTooMuch(kept)) {
      const at = kept.findLastIndex(({ id }) => id !== keptId);
      this.storage.removeItem(PREFIX + kept[at].id);
      kept.splice(at, 1);
    }
    return kept;
  }

  rename(id, title) {
    const conversation = this.load(id);
    return conversation !== null && this.save({ ...conversation, title: title.trim().slice(0, 200) || conversation.title });
  }

  remove(id) {
    this.storage.removeItem(PREFIX + id);
    this.storage.setItem(INDEX, JSON.stringify(this.list().filter((entry) => entry.id !== id)));
  }

  clear() {
    for (const { id } of this.list()) this.storage.removeItem(PREFIX + id);
    this.storage.removeItem(INDEX);
  }

  // Those whose title or text has every word of the query.
  search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.list();
    return this.list().filter(({ id, title }) => {
      const conversation = this.load(id);
      const texts = (conversation?.panes ?? []).flatMap(({ messages }) => messages.map((message) => message.text ?? ""));
      const all = [title, ...texts].join("\n").toLowerCase();
      return words.every((word) => all.includes(word));
    });
  }

  // Takes what exportJson wrote. Throws a sentence for a file that is something else.
  importJson(text, newId) {
    let given = null;
    try {
      given = JSON.parse(text);
    } catch {
      // told below
    }
    const conversation = checked(given);
    if (conversation === null) throw new Error("This file is not a conversation that the playground exported.");
    const own = { ...conversation, id: newId };
    if (!this.save(own)) throw new Error("The conversation is too large to be kept in this browser.");
    return own;
  }
}

const total = (list) => list.reduce((sum, entry) => sum + (entry.length || 0), 0);

// The conversation if it has the shape of one, else null: storage and files can hold anything.
function checked(conversation) {
  if (typeof conversation !== "object" || conversation === null || !Array.isArray(conversation.panes)) return null;
  const areMessages = (messages) => Array.isArray(messages) && messages.every((message) => ["user", "assistant", "tool"].includes(message?.role) && typeof message.text === "string");
  const arePanes = conversation.panes.length >= 1 && conversation.panes.length <= 2 && conversation.panes.every((pane) => areMessages(pane?.messages));
  if (!arePanes || typeof conversation.title !== "string") return null;
  if (typeof conversation.settings !== "object" || conversation.settings === null) conversation.settings = {};
  return conversation;
}

export function exportJson(conversation) {
  return JSON.stringify(conversation, null, 2);
}

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool" };

export function exportMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system) parts.push(`> System: ${conversation.settings.system.replaceAll("\n", "\n> ")}`);
  for (const { model, messages } of conversation.panes) {
    if (conversation.panes.length > 1) parts.push(`## ${model}`);
    for (const message of messages) {
      const name = message.role === "assistant" && message.model ? message.model : NAMES[message.role];
      const calls = (message.calls ?? []).map((call) => `Calls \`${call.name}(${call.arguments})\``);
      parts.push([`**${name}**`, message.text, ...calls].filter(Boolean).join("\n\n"));
    }
  }
  return `${parts.join("\n\n")}\n`;
}
