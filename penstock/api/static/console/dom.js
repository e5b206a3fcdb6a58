// Small helpers that build the page. No text is ever parsed as HTML: every text becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

// element("button", {class: "primary", onclick: save, disabled: true}, "Save"). A tag "svg:path" makes an SVG element.
export function element(tag, attributes = {}, ...children) {
  const isSvg = tag.startsWith("svg:");
  const made = isSvg ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on") && typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (name === "value" && !isSvg) made.value = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

export function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) parent.append(child);
  }
  return parent;
}

export function replace(parent, ...children) {
  parent.replaceChildren();
  return append(parent, children);
}

// Says a sentence to screen readers.
export function announce(sentence) {
  document.getElementById("news").textContent = sentence;
}

// columns: [{title, cell(row), number}]; the caption is read out before the table.
export function table(caption, columns, rows, empty = "Nothing yet.") {
  const head = columns.map((column) =>
    element("th", { scope: "col", class: column.number ? "number" : null }, column.title));
  const body = rows.map((row) => element("tr", {}, columns.map((column, index) => {
    const attributes = { class: column.number ? "number" : column.class ?? null, "data-title": column.title };
    const name = index === 0 ? "th" : "td";
    return element(name, index === 0 ? { ...attributes, scope: "row" } : attributes, column.cell(row));
  })));
  if (!rows.length) body.push(element("tr", {}, element("td", { colspan: columns.length, class: "soft" }, empty)));
  return element("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 },
    element("table", {}, element("caption", { class: "unseen" }, caption),
      element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

export function panel(title, ...children) {
  return element("section", { class: "panel", "aria-label": title }, element("h2", {}, title), children);
}

export function heading(title, explanation, ...actions) {
  return element("div", { class: "heading" },
    element("div", {}, element("h1", {}, title), element("p", { class: "soft" }, explanation)),
    element("div", { class: "actions" }, actions));
}

export function problem(error) {
  return element("p", { class: "problem", role: "alert" }, error.message ?? String(error));
}

export function badge(text, tone = "plain") {
  return element("span", { class: `badge ${tone}` }, text);
}

// A group of which one choice is on. choices: [[value, label]].
export function choice(label, choices, chosen, onchange) {
  const group = `choice-${Math.random().toString(36).slice(2)}`;
  return element("fieldset", { class: "choice" }, element("legend", { class: "unseen" }, label),
    choices.map(([value, text]) => element("label", {},
      element("input", { type: "radio", name: group, value, checked: value === chosen, onchange: () => onchange(value) }),
      element("span", {}, text))));
}

export function select(label, choices, chosen, onchange, attributes = {}) {
  const box = element("select", { ...attributes, onchange: () => onchange?.(box.value) },
    choices.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
  return element("label", { class: "field" }, element("span", {}, label), box);
}

export function field(label, attributes = {}, hint = null) {
  const id = `field-${Math.random().toString(36).slice(2)}`;
  const tag = attributes.rows ? "textarea" : "input";
  const box = element(tag, { ...attributes, id, "aria-describedby": hint ? `${id}-hint` : null });
  return element("div", { class: "field" }, element("label", { for: id }, label), box,
    hint && element("small", { id: `${id}-hint`, class: "soft" }, hint));
}

// Asks before something that cannot be undone. Resolves to true when the user agrees.
export function confirm(title, sentence, action) {
  return new Promise((resolve) => {
    const dialog = element("dialog", { "aria-label": title, onclose: () => { dialog.remove(); resolve(dialog.returnValue === "yes"); } },
      element("form", { method: "dialog" }, element("h2", {}, title), element("p", {}, sentence),
        element("div", { class: "row end" },
          element("button", { value: "no" }, "Cancel"), element("button", { value: "yes", class: "danger" }, action))));
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// Calls `work` now and again every `seconds`, one call at a time, until the page is left. A hidden page does not ask.
export function repeat(signal, seconds, work) {
  let timer = null;
  const turn = async () => {
    if (!document.hidden) await work();
    if (!signal.aborted) timer = setTimeout(turn, seconds * 1000);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  return turn();
}
