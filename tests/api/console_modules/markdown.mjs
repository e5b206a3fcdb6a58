import assert from "node:assert/strict";
import test from "node:test";
import { highlight } from "./highlight.js";
import { MarkdownView, parse, parseInline, safeAddress } from "./markdown.js";

const kinds = (text) => parse(text).map(({ kind }) => kind);
// Every address anywhere in a tree.
function addresses(tree) {
  if (Array.isArray(tree)) return tree.flatMap(addresses);
  if (tree === null || typeof tree !== "object") return [];
  return [...(tree.kind === "link" ? [tree.address] : []), ...Object.values(tree).flatMap(addresses)];
}

test("blocks", () => {
  const text = "# Title\n\nWords\nmore\n\n- a\n- b\n\n1. c\n\n> q\n\n---\n\n```js\nlet x\n```\n\n|a|b|\n|-|-|\n|1|2|";
  assert.deepEqual(kinds(text), ["heading", "paragraph", "list", "list", "quote", "rule", "code", "table"]);
});

test("headings, spans of code and fences at their edges", () => {
  const headings = ["# a # b ##  ", "## C#", "### #", "#", "# "].map((line) => parse(line)[0].inline);
  assert.deepEqual(headings, [["a # b"], ["C#"], [], [], []]);
  assert.deepEqual(kinds("#a"), ["paragraph"]);
  assert.deepEqual(parseInline("`` a`b `` ` ``x`"), [{ kind: "code", text: "a`b" }, " ", { kind: "code", text: " ``x" }]);
  assert.deepEqual(parseInline("``a` b"), ["``a` b"]);
  assert.deepEqual(["```  Go x=1", "~~~ js", "```"].map((line) => parse(line)[0].language), ["go", "js", ""]);
  assert.deepEqual(kinds("```a`b"), ["paragraph"]);
});

test("nested and loose lists", () => {
  const [list] = parse("- a\n  - b\n    1. c\n- [x] d");
  assert.equal(list.items.length, 2);
  assert.equal(list.items[0].blocks[1].items[0].blocks[1].start, 1);
  assert.equal(list.items[1].isDone, true);
  const [loose] = parse("3. one\n\n   more\n\n4. two");
  assert.deepEqual([loose.start, loose.isLoose, loose.items.length], [3, true, 2]);
  assert.equal(loose.items[0].blocks.length, 2);
});

test("a fence keeps its text as it is, tabs included, and may still be open", () => {
  const [code] = parse("```Make\nall:\n\tcc *a* <b>\n```");
  assert.deepEqual([code.language, code.text, code.isOpen], ["make", "all:\n\tcc *a* <b>", false]);
  assert.equal(parse("~~~\n```\nx").at(0).isOpen, true);
});

test("inline marks, and words that only look like them", () => {
  assert.deepEqual(parseInline("**a *b* c**"), [{ kind: "strong", inline: ["a ", { kind: "emphasis", inline: ["b"] }, " c"] }]);
  assert.deepEqual(parseInline("snake_case_name 2 * 3 * 4"), ["snake_case_name 2 * 3 * 4"]);
  assert.deepEqual(parseInline("`a*b*` \\*x\\*"), [{ kind: "code", text: "a*b*" }, " *x*"]);
  assert.deepEqual(parseInline("see https://a.example/b."), ["see ", { kind: "link", address: "https://a.example/b", inline: ["https://a.example/b"] }, "."]);
});

test("tables align, and a short row is filled", () => {
  const [table] = parse("| a | b |\n|:-:|--:|\n| `x|y` |");
  assert.deepEqual(table.align, ["center", "right"]);
  assert.deepEqual(table.rows, [[[{ kind: "code", text: "x|y" }], []]]);
});

test("no address can run a script or reach into this server", () => {
  const evil = ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", " javascript:alert(1)", "vbscript:x", "data:text/html,<script>alert(1)</script>", "file:///etc/passwd", "blob:http://x/y", "/admin/keys", "//evil.example", "#x", ""];
  for (const address of evil) assert.equal(safeAddress(address), null, address);
  for (const address of ["https://a.example/", "mailto:a@b.example"]) assert.equal(safeAddress(address), address);
  const texts = [
    "[x](javascript:alert(1))", "[x](JAVASCRIPT:alert%281%29)", "![x](javascript:alert(1))", "<javascript:alert(1)>", "[x](data:text/html;base64,PHM+)",
    "[x](<javascript:alert(1)>)", "[a [b](javascript:alert(1)) c](javascript:alert(2))", "[x](java\nscript:alert(1))", "[x](&#106;avascript:alert(1))",
  ];
  for (const text of texts) assert.ok(addresses(parse(text)).every((address) => address === null), text);
});

test("markup in a text stays text", () => {
  const text = '<img src=x onerror="alert(1)"> <script>alert(1)</script> <a href="javascript:alert(1)">x</a>';
  assert.deepEqual(parse(text)[0].inline, [text]);
  assert.equal(parse("```html\n</code></pre><script>alert(1)</script>\n```")[0].text, "</code></pre><script>alert(1)</script>");
});

test("hostile texts take no long time and no deep stack", () => {
  const pieces = ["*", "_a", "**a", "~~a", "[", "![a](", "`` ` ", "<http://", "> ", "- ", "1. ", "|-", "- a\n  ", "[a](b", "*a **b ", "a_", "\\"];
  for (const piece of pieces) parse(piece.repeat(4000)); // a test that hangs fails by its time limit
  parse(Array.from({ length: 200 }, (_, length) => "`".repeat(length) + "a").join(""));
  const gap = " ".repeat(150_000);
  for (const text of [`# a${gap}b`, `~~~${gap}\``, `[a](<${gap}`, `a${gap}b\nc`, `- a${"\n".repeat(50_000)}b`]) parse(text);
  for (const piece of ["a", '"\\', "1", " "]) highlight(piece.repeat(150_000 / piece.length), "js");
});

// A document that is just enough for the view.
class FakeNode {
  constructor(tag) {
    Object.assign(this, { tag, childNodes: [], attributes: {} });
  }
  append(...nodes) { for (const node of nodes) this.childNodes.push(Object.assign(typeof node === "string" ? new FakeNode("#text") : node, { parent: this })); }
  get lastChild() { return this.childNodes.at(-1); }
  remove() { this.parent.childNodes.splice(this.parent.childNodes.indexOf(this), 1); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
}

test("a growing answer keeps the nodes of what has not changed", () => {
  globalThis.document = { createElement: (tag) => new FakeNode(tag), createTextNode: () => new FakeNode("#text") };
  const target = new FakeNode("div");
  const view = new MarkdownView(target);
  view.update("First.\n\nSec");
  const first = target.childNodes[0], second = target.childNodes[1];
  view.update("First.\n\nSecond.\n\n```\nx");
  assert.equal(target.childNodes[0], first);
  assert.notEqual(target.childNodes[1], second);
  view.update("First.\n\nSecond.\n\n```\nx\n```");
  assert.equal(target.childNodes.length, 3);
  view.update("");
  assert.equal(target.childNodes.length, 0);
});

test("colours lose no text in any language", () => {
  const text = "# x \"a\" 'b\n-- @p def f(x): return 1.5e3 // c\n<a href=\"x\">&amp; `z` + - [t]\nk = 3 /* open";
  for (const language of ["python", "js", "ts", "rust", "bash", "json", "yaml", "toml", "sql", "html", "css", "diff", "go", "c", "java", "nothing", "", "constructor", "__proto__"]) {
    assert.equal(highlight(text, language).map((piece) => piece.text).join(""), text, language);
  }
  assert.deepEqual(highlight("", "python"), []);
});

test("colours know comments, strings, words and numbers", () => {
  const kindOf = (code, language, text) => highlight(code, language).find((piece) => piece.text === text)?.kind;
  const python = "def f(x):  # note\n    return 'a # b' if x else 12";
  assert.equal(kindOf(python, "py", "# note"), "comment");
  assert.equal(kindOf(python, "py", "'a # b'"), "string");
  assert.equal(kindOf(python, "py", "return"), "keyword");
  assert.equal(kindOf(python, "py", "12"), "number");
  assert.equal(kindOf('{"a": "b"}', "json", '"a"'), "name");
  assert.equal(kindOf("SELECT 1", "sql", "SELECT"), "keyword");
  assert.equal(kindOf("+new\n-old", "diff", "+new"), "added");
});
