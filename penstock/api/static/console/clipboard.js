// Copies a text, and says so on the button that was pressed.

import { announce } from "./dom.js";

const SHOWN_MS = 1500;

export async function copy(text, button) {
  const label = button.textContent;
  const hasCopied = await write(text);
  button.textContent = hasCopied ? "Copied" : "Not copied";
  announce(hasCopied ? "Copied." : "The browser did not let this page copy.");
  setTimeout(() => (button.textContent = label), SHOWN_MS);
}

// Browsers give the clipboard to pages of https and localhost alone; elsewhere an older way works.
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.className = "unseen";
    area.value = text;
    document.body.append(area);
    area.select();
    const hasCopied = document.execCommand("copy");
    area.remove();
    return hasCopied;
  }
}
