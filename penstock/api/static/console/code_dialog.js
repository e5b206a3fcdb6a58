// A dialog with the code that makes the same call, one tab for each language.

import { copy } from "./clipboard.js";
import { samplesOf } from "./code_samples.js";
import { element, replace } from "./dom.js";
import { codeNode } from "./markdown.js";

export function showCode(request, { baseUrl, hasKey }) {
  let chosen = 0, isStreamed = false;
  const tabs = element("div", { class: "tabs", role: "tablist", "aria-label": "Language" });
  const panel = element("div", { class: "tab-panel", role: "tabpanel", id: "code-panel", "aria-labelledby": "code-tab-0" });
  const draw = () => {
    const samples = samplesOf(request, { baseUrl, hasKey, isStreamed });
    replace(tabs, samples.map(({ title }, at) => element("button", {
      type: "button", role: "tab", id: `code-tab-${at}`, "aria-controls": "code-panel", "aria-selected": String(at === chosen), tabindex: at === chosen ? 0 : -1,
      onclick: () => choose(at),
    }, title)));
    const { language, code, note } = samples[chosen];
    panel.setAttribute("aria-labelledby", `code-tab-${chosen}`);
    replace(panel, code ? codeNode({ language, text: code.trimEnd() }, { onCopy: copy }) : null, note && element("p", { class: "soft" }, note));
  };
  const choose = (at) => {
    chosen = (at + tabs.children.length) % tabs.children.length;
    draw();
    tabs.children[chosen].focus();
  };
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) choose(chosen + step);
  });
  const streams = element("label", { class: "check" },
    element("input", { type: "checkbox", onchange: (event) => {
      isStreamed = event.target.checked;
      draw();
    } }), element("span", {}, "Stream the answer"));
  const dialog = element("dialog", { class: "code-dialog", "aria-label": "Code of this call" },
    element("div", { class: "dialog-head" }, element("h2", {}, "The same call in code"),
      element("button", { type: "button", onclick: () => dialog.close() }, "Close")),
    tabs, panel, element("div", { class: "row" }, streams,
      hasKey && element("span", { class: "soft" }, "The key is read from the variable PENSTOCK_API_KEY.")));
  dialog.addEventListener("close", () => dialog.remove());
  draw();
  document.body.append(dialog);
  dialog.showModal();
}
