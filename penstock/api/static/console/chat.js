// The page at `/`: the playground in a frame of its own, for people who have no business in the console.

import { element, problem } from "./dom.js";
import { KEY_ITEM } from "./key_dialog.js";
import { show } from "./playground.js";

const key = () => sessionStorage.getItem(KEY_ITEM);
const leaving = new AbortController();

async function api(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
}

const root = document.getElementById("page");
window.addEventListener("pagehide", () => leaving.abort());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.querySelector(".entry")?.focus();
});
show(root, { api, key, element, signal: leaving.signal }).catch((error) => root.replaceChildren(problem(error)));
