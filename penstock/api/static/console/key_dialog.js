// Asks for a key when the server wants one. The key stays in this tab: the browser forgets it with the tab.

import { element } from "./dom.js";
import { begin, KEY_ITEM, offer } from "./sign_in.js";

export { KEY_ITEM };
let open = null; // one dialog for all calls that wait for a key

// Resolves to true when the user gave a key, which `sessionStorage` then holds.
export function askForKey(sentence) {
  open ??= ask(sentence).finally(() => (open = null));
  return open;
}

// Without the hint about headers, which is for programs.
const forPeople = (sentence) => sentence.replace(/ Send it as the header .*$/, "");

async function ask(sentence) {
  const { provider } = await offer();
  return new Promise((resolve) => {
    const box = element("input", { type: "password", id: "asked-key", autocomplete: "off", required: true, spellcheck: "false" });
    const why = element("p", { class: "soft", id: "asked-key-why", role: "status" }, forPeople(sentence));
    const form = element("form", { method: "dialog" },
      element("h2", { id: "asked-key-title" }, "This server asks for a key"),
      why,
      element("label", { for: "asked-key" }, "Key"), box,
      element("p", { class: "soft small-print" }, "It stays in this tab and is forgotten when the tab is closed."),
      element("div", { class: "row end" },
        provider && element("button", { type: "button", onclick: () => begin(provider, location.pathname + location.hash).catch((error) => why.replaceChildren(error.message)) }, "Sign in with your organisation"),
        element("button", { type: "button", onclick: () => dialog.close("no") }, "Cancel"),
        element("button", { class: "primary", value: "yes" }, "Use this key")));
    const dialog = element("dialog", { class: "key-dialog", "aria-labelledby": "asked-key-title", "aria-describedby": "asked-key-why" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      const key = box.value.trim();
      const isGiven = dialog.returnValue === "yes" && key !== "";
      if (isGiven) sessionStorage.setItem(KEY_ITEM, key);
      resolve(isGiven);
    });
    document.body.append(dialog);
    dialog.showModal();
    box.focus();
  });
}
