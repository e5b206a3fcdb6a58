// Markdown to a tree, and the tree to document nodes.
//
// A model's text is never parsed as HTML: tags in it stay text. A link gets an address only with a scheme that cannot
// run a script. Pictures become links, because loading one would tell another server that the answer was read.
// `parse` needs no document, so that Node can test it.

import { highlight } from "./highlight.js";

const MAX_DEPTH = 12; // of quotes and lists within each other
const SAFE_SCHEMES = ["http:", "https:", "mailto:"];
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+([^]*))?$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

// The address if a click on it is harmless, else null.
export function safeAddress(address) {
  try {
    const parsed = new URL(address);
    return SAFE_SCHEMES.includes(parsed.protocol) ? parsed.href : null;
  } catch {
    return null; // relative addresses would point into this server
  }
}

// The blocks of a text: {kind, source, …}. `source` is the text of a block, by which a view knows what has not changed.
export function parse(text, depth = 0) {
  const lines = withoutTabs(text.replace(/\r\n?/g, "\n").split("\n"));
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = readBlock(lines, at, depth);
    block.source = lines.slice(at, next).join("\n");
    blocks.push(block);
    at = next;
  }
  return blocks;
}

// Tabs that indent become spaces, so that columns can be counted. Code keeps its tabs.
function withoutTabs(lines) {
  let fence = "";
  return lines.map((line) => {
    const mark = /^\s*(```|~~~)/.exec(line)?.[1];
    if (mark && (!fence || mark === fence)) fence = fence ? "" : mark;
    return fence ? line : line.replace(/^[ \t]+/, (indent) => indent.replaceAll("\t", "    "));
  });
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, inline: parseInline(headingText(heading[2] ?? "")) }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at, depth);
}

// Without the marks that may close a heading.
function headingText(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(trimmed[end - 1]) ? trimmed.slice(0, end).trimEnd() : trimmed;
}

function readFence(lines, at) {
  const [, mark, info] = FENCE.exec(lines[at]);
  const [language] = info.trim().split(/\s/, 1);
  const indent = lines[at].search(/[`~]/);
  const body = [];
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const end = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(lines[next]);
    if (end && end[1][0] === mark[0] && end[1].length >= mark.length) break;
    body.push(lines[next].replace(new RegExp(`^ {0,${indent}}`), ""));
  }
  const isOpen = next >= lines.length; // more of it may be on its way
  return [{ kind: "code", language: language.toLowerCase(), text: body.join("\n"), isOpen }, Math.min(next + 1, lines.length)];
}

function readQuote(lines, at, depth) {
  const body = [];
  let next = at;
  for (; next < lines.length && QUOTE.test(lines[next]); next += 1) body.push(QUOTE.exec(lines[next])[1]);
  return [{ kind: "quote", blocks: parse(body.join("\n"), depth + 1) }, next];
}

function readList(lines, at, depth) {
  const isOrdered = (mark) => /\d/.test(mark);
  const first = ITEM.exec(lines[at]);
  const ordered = isOrdered(first[2]);
  const items = [];
  let next = at, body = null, width = 0, isLoose = false;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    const indent = line.search(/\S/);
    if (body !== null && (indent < 0 || indent >= width)) {
      // A blank line belongs to the item if the item goes on after it.
      if (indent < 0 && !continuesAfter(lines, next, width, ordered)) break;
      if (indent < 0 && body.length) isLoose = true;
      body.push(line.slice(Math.min(width, Math.max(indent, 0))));
      continue;
    }
    const item = ITEM.exec(line);
    if (item && isOrdered(item[2]) === ordered && !RULE.test(line)) {
      width = item[1].length + item[2].length + 1;
      body = [item[3] || ""];
      items.push(body);
    } else if (body !== null && !startsBlock(line) && lines[next - 1].trim()) {
      body.push(line); // a paragraph that goes on without its indent
    } else {
      break;
    }
  }
  const start = ordered ? Number.parseInt(first[2], 10) : null;
  return [{ kind: "list", start, isLoose, items: items.map((item) => readItem(item.join("\n"), depth)) }, next];
}

function continuesAfter(lines, at, width, ordered) {
  while (at < lines.length && !lines[at].trim()) at += 1;
  const next = lines[at];
  if (next === undefined) return false;
  const item = ITEM.exec(next);
  return next.search(/\S/) >= width || Boolean(item && /\d/.test(item[2]) === ordered);
}

function readItem(text, depth) {
  const task = /^\[([ xX])\]\s+/.exec(text);
  const blocks = parse(task ? text.slice(task[0].length) : text, depth + 1);
  return { blocks, isDone: task ? task[1] !== " " : null };
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function readParagraph(lines, at, depth) {
  let next = at + 1;
  const stops = (line) => {
    if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
    return depth < MAX_DEPTH && (QUOTE.test(line) || /^ {0,3}(?:[-*+]|1[.)])\s+\S/.test(line));
  };
  while (next < lines.length && !stops(lines[next]) && !isTable(lines, next)) next += 1;
  return [{ kind: "paragraph", inline: parseInline(lines.slice(at, next).map((line) => line.trimStart()).join("\n")) }, next];
}

function isTable(lines, at) {
  const below = lines[at + 1];
  if (below === undefined || !lines[at].includes("|") || !TABLE_LINE.test(below) || !below.includes("-")) return false;
  return cellsOf(lines[at]).length === cellsOf(below).length;
}

function cellsOf(line) {
  const cells = [""];
  let isCode = false;
  const bare = line.trim().replace(/^\|/, "");
  for (let at = 0; at < bare.length; at += 1) {
    const letter = bare[at];
    if (letter === "\\" && bare[at + 1] === "|") {
      cells[cells.length - 1] += "|";
      at += 1;
    } else if (letter === "|" && !isCode) {
      cells.push("");
    } else {
      if (letter === "`") isCode = !isCode;
      cells[cells.length - 1] += letter;
    }
  }
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim());
}

function readTable(lines, at) {
  const head = cellsOf(lines[at]).map(parseInline);
  const align = cellsOf(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return "left";
  });
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].trim() && lines[next].includes("|"); next += 1) {
    const cells = cellsOf(lines[next]).slice(0, head.length).map(parseInline);
    rows.push([...cells, ...Array(head.length - cells.length).fill([])]);
  }
  return [{ kind: "table", head, align, rows }, next];
}

const INLINE = [
  ["escape", /\\([!-/:-@[-`{-~])/y],
  ["break", / {2,100}\n|\\\n/y],
  ["link", /!?\[((?:[^[\]\\]|\\.|\[[^[\]]{0,200}\]){0,1000})\]\(\s*<?([^\s<>()]{0,2000}(?:\([^\s()]{0,500}\)[^\s<>()]{0,500})?)>?(?:\s+["'][^"']{0,500}["'])?\s*\)/y],
  ["auto", /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y],
  ["bare", /https?:\/\/[^\s<>"'`]{1,2000}/y],
  ["strong", /\*\*(?=\S)((?:[^*\\]|\\.|\*(?!\*)){1,2000}?)(?<=\S)\*\*(?!\*)|__(?=\S)((?:[^_\\]|\\.){1,2000}?)(?<=\S)__(?!\w)/y],
  ["emphasis", /\*(?=[^\s*])((?:[^*\\]|\\.|\*\*[^*]{1,1000}\*\*){1,2000}?)(?<=\S)\*(?!\*)|_(?=[^\s_])((?:[^_\\]|\\.){1,2000}?)(?<=\S)_(?!\w)/y],
  ["strike", /~~(?=\S)([^~]{1,2000}?)(?<=\S)~~/y],
];
const SPECIAL = /[\\`!\[<*_~h ]/g;

// Pieces of a line: a string, or {kind, inline | text | address}.
export function parseInline(text, depth = 0) {
  const pieces = [];
  let plain = "", at = 0;
  const flush = () => {
    if (plain) pieces.push(plain);
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    const upTo = special ? special.index : text.length;
    plain += text.slice(at, upTo);
    at = upTo;
    if (!special) break;
    const found = depth < MAX_DEPTH ? readInline(text, at, depth) : null;
    if (found === null) {
      plain += text[at];
      at += 1;
    } else {
      if (typeof found.piece === "string") plain += found.piece;
      else {
        flush();
        pieces.push(found.piece);
      }
      at = found.end;
    }
  }
  flush();
  return pieces;
}

// A span of code ends at the next run of as many backticks. Backticks without such an end stay as they are, all at once.
function readCode(text, at) {
  const runs = /`+/g;
  runs.lastIndex = at;
  const mark = runs.exec(text)[0];
  let end = runs.exec(text);
  while (end !== null && end[0].length !== mark.length) end = runs.exec(text);
  if (end === null) return { piece: mark, end: at + mark.length };
  const inner = text.slice(at + mark.length, end.index).replace(/\n/g, " ");
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return { piece: { kind: "code", text: isPadded ? inner.slice(1, -1) : inner }, end: end.index + mark.length };
}

function readInline(text, at, depth) {
  if (text[at] === "`") return readCode(text, at);
  const before = text[at - 1] ?? " ";
  for (const [kind, pattern] of INLINE) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match === null) continue;
    if (/\w/.test(before) && (kind === "bare" || text[at] === "_")) continue;
    return { piece: inlinePiece(kind, match, depth), end: at + lengthOf(kind, match) };
  }
  return null;
}

// Full stops and brackets after an address belong to the sentence.
function bareAddress(address) {
  let trimmed = address.replace(/[.,;:!?*_~]+$/, "");
  while (trimmed.endsWith(")") && !trimmed.includes("(")) trimmed = trimmed.slice(0, -1);
  return trimmed;
}

function lengthOf(kind, match) {
  return kind === "bare" ? bareAddress(match[0]).length : match[0].length;
}

function inlinePiece(kind, match, depth) {
  const inner = match[1] ?? match[2];
  if (kind === "escape") return match[1];
  if (kind === "break") return { kind: "break" };
  if (kind === "auto") return { kind: "link", address: safeAddress(match[1]), inline: [match[1]] };
  if (kind === "bare") {
    const address = bareAddress(match[0]);
    return { kind: "link", address: safeAddress(address), inline: [address] };
  }
  if (kind !== "link") return { kind, inline: parseInline(inner, depth + 1) };
  const isPicture = match[0].startsWith("!");
  const inline = parseInline(match[1] || match[2], depth + 1).map((piece) => (piece.kind === "link" ? piece.inline.join("") : piece));
  return { kind: "link", address: safeAddress(match[2]), inline: isPicture ? ["Image: ", ...inline] : inline };
}

// Shows a growing text in `target`. Blocks that have not changed keep their nodes, so that a long answer stays cheap
// and a selection survives.
export class MarkdownView {
  constructor(target, options = {}) {
    this.target = target;
    this.options = options; // onCopy(text): adds a button to blocks of code
    this.sources = [];
  }

  update(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === keyOf(blocks[same])) same += 1;
    while (this.target.childNodes.length > same) this.target.lastChild.remove();
    this.target.append(...blocks.slice(same).map((block) => blockNode(block, this.options)));
    this.sources = blocks.map(keyOf);
  }
}

const keyOf = (block) => `${block.kind}${block.isOpen ? "+" : ""}\n${block.source}`;

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function blockNode(block, options) {
  const blocks = (list) => list.map((each) => blockNode(each, options));
  if (block.kind === "heading") return make(`h${Math.min(6, block.level + 2)}`, "md-heading", ...inlineNodes(block.inline));
  if (block.kind === "paragraph") return make("p", "", ...inlineNodes(block.inline));
  if (block.kind === "rule") return make("hr");
  if (block.kind === "quote") return make("blockquote", "", ...blocks(block.blocks));
  if (block.kind === "table") return tableNode(block);
  if (block.kind === "code") return codeNode(block, options);
  const list = make(block.start === null ? "ul" : "ol", "");
  if (block.start !== null && block.start !== 1) list.start = block.start;
  list.append(...block.items.map((item) => itemNode(item, block.isLoose, blocks)));
  return list;
}

function itemNode(item, isLoose, blocks) {
  const node = make("li", item.isDone === null ? "" : "task");
  if (item.isDone !== null) node.append(make("span", "task-mark", item.isDone ? "☑ " : "☐ "));
  const [first, ...rest] = item.blocks;
  if (!isLoose && first?.kind === "paragraph") node.append(...inlineNodes(first.inline), ...blocks(rest));
  else node.append(...blocks(item.blocks));
  return node;
}

function tableNode({ head, align, rows }) {
  const cells = (tag) => (inline, column) => make(tag, `align-${align[column] ?? "left"}`, ...inlineNodes(inline));
  const body = rows.map((row) => make("tr", "", ...row.map(cells("td"))));
  const table = make("table", "", make("thead", "", make("tr", "", ...head.map(cells("th")))), make("tbody", "", ...body));
  const frame = make("div", "md-table", table);
  frame.tabIndex = 0; // so that a keyboard can scroll it
  return frame;
}

export function codeNode({ language, text }, options = {}) {
  const code = make("code", "", ...highlight(text, language).map(({ kind, text: piece }) => (kind ? make("span", `hl-${kind}`, piece) : piece)));
  const pre = make("pre", "", code);
  pre.tabIndex = 0;
  const bar = make("div", "md-code-bar", make("span", "md-code-language", language || "text"));
  if (options.onCopy) {
    const button = make("button", "quiet", "Copy");
    button.type = "button";
    button.setAttribute("aria-label", `Copy this code${language ? ` (${language})` : ""}`);
    button.addEventListener("click", () => options.onCopy(text, button));
    bar.append(button);
  }
  return make("div", "md-code", bar, pre);
}

function inlineNodes(pieces) {
  return pieces.map((piece) => {
    if (typeof piece === "string") return document.createTextNode(piece);
    if (piece.kind === "break") return make("br");
    if (piece.kind === "code") return make("code", "", piece.text);
    if (piece.kind !== "link") return make({ strong: "strong", emphasis: "em", strike: "del" }[piece.kind], "", ...inlineNodes(piece.inline));
    if (piece.address === null) return make("span", "", ...inlineNodes(piece.inline));
    const link = make("a", "", ...inlineNodes(piece.inline));
    Object.assign(link, { href: piece.address, target: "_blank", rel: "noopener noreferrer nofollow" });
    return link;
  });
}
