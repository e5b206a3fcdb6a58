import assert from "node:assert/strict";
import test from "node:test";
import { Conversations, exportJson, exportMarkdown, MAX_CONVERSATIONS, MAX_LENGTH, newConversation, titleOf } from "./conversations.js";
import { DEFAULT_SETTINGS } from "./requests.js";

// localStorage with a quota in characters.
class Storage {
  constructor(quota = Infinity) {
    Object.assign(this, { items: new Map(), quota });
  }
  getItem(name) { return this.items.get(name) ?? null; }
  removeItem(name) { this.items.delete(name); }
  setItem(name, text) {
    const used = [...this.items].reduce((sum, [key, value]) => sum + (key === name ? 0 : value.length), 0);
    if (used + text.length > this.quota) throw new DOMException("full", "QuotaExceededError");
    this.items.set(name, text);
  }
}

function conversation(id, text = `Question ${id}`, updatedAt = 1) {
  const made = newConversation(DEFAULT_SETTINGS, "m", updatedAt, id);
  made.panes[0].messages.push({ role: "user", text }, { role: "assistant", text: `Answer to ${text}`, model: "m" });
  return { ...made, title: titleOf(made) };
}

test("what is saved is listed, newest first, and comes back", () => {
  const store = new Conversations(new Storage());
  assert.ok(store.save(conversation("a", "Old", 1)));
  assert.ok(store.save(conversation("b", "New", 2)));
  assert.deepEqual(store.list().map(({ id, title }) => [id, title]), [["b", "New"], ["a", "Old"]]);
  assert.deepEqual(store.load("a"), conversation("a", "Old", 1));
  store.remove("b");
  assert.deepEqual([store.list().length, store.load("b")], [1, null]);
});

test("the number is bounded: the oldest goes", () => {
  const storage = new Storage(), store = new Conversations(storage);
  for (let at = 0; at < MAX_CONVERSATIONS + 3; at += 1) store.save(conversation(`c${at}`, "x", at));
  assert.equal(store.list().length, MAX_CONVERSATIONS);
  assert.equal(store.load("c0"), null);
  assert.equal(storage.items.size, MAX_CONVERSATIONS + 1);
});

test("a full browser gives up the oldest, not the one that is being saved", () => {
  const store = new Conversations(new Storage(6000));
  for (const [at, id] of ["a", "b", "c", "d"].entries()) assert.ok(store.save(conversation(id, "x".repeat(1200), at)));
  assert.ok(store.load("d"));
  assert.equal(store.load("a"), null);
  assert.equal(new Conversations(new Storage(10)).save(conversation("z")), false);
});

test("images that are too large are left out, and said to be", () => {
  const store = new Conversations(new Storage());
  const large = conversation("a");
  large.panes[0].messages[0].images = [`data:image/png;base64,${"A".repeat(MAX_LENGTH)}`];
  assert.ok(store.save(large));
  const [asked] = store.load("a").panes[0].messages;
  assert.deepEqual([asked.images, asked.lostImages], [[], 1]);
  assert.equal(large.panes[0].messages[0].images.length, 1);
  assert.equal(store.save(conversation("b", "x".repeat(MAX_LENGTH))), false);
});

test("search finds every word, in titles and texts", () => {
  const store = new Conversations(new Storage());
  store.save(conversation("a", "How do whales sleep?"));
  store.save(conversation("b", "Where do whales live?"));
  assert.deepEqual(store.search("WHALES sleep").map(({ id }) => id), ["a"]);
  assert.equal(store.search("answer whales").length, 2);
  assert.equal(store.search("unicorn").length, 0);
  assert.equal(store.search("  ").length, 2);
});

test("damaged storage is as good as empty", () => {
  const storage = new Storage(), store = new Conversations(storage);
  for (const text of ["{", "7", "null", '[{"id": 3}, null]']) {
    storage.setItem("penstock.conversations", text);
    assert.deepEqual(store.list(), []);
  }
  for (const text of ["{", "{}", '{"title": "x", "panes": []}', '{"title": "x", "panes": [{"messages": [{"role": "system", "text": ""}]}]}']) {
    storage.setItem("penstock.conversation.a", text);
    assert.equal(store.load("a"), null);
  }
});

test("export and import", () => {
  const store = new Conversations(new Storage());
  const own = store.importJson(exportJson(conversation("a")), "fresh");
  assert.deepEqual([own.id, store.load("fresh").panes[0].messages.length], ["fresh", 2]);
  for (const text of ["not json", "{}", "[]"]) assert.throws(() => store.importJson(text, "x"), /not a conversation that the playground exported/);
  assert.equal(exportMarkdown(conversation("a", "Why?")), "# Why?\n\n**You**\n\nWhy?\n\n**m**\n\nAnswer to Why?\n");
});

test("titles and names", () => {
  assert.equal(titleOf(conversation("a", `${"word ".repeat(30)}\nmore`)).length, 60);
  assert.equal(titleOf(newConversation(DEFAULT_SETTINGS, "m", 1, "a")), "New chat");
  const store = new Conversations(new Storage());
  store.save(conversation("a"));
  assert.ok(store.rename("a", " Mine "));
  assert.equal(store.list()[0].title, "Mine");
  assert.equal(store.rename("gone", "x"), false);
  store.clear();
  assert.equal(store.storage.items.size, 0);
});
