// The console's frame: who is signed in, which pages there are, and which page is shown.
//
// A page is an ES module that exports `async function show(root, context)` and may return a function that is called
// when the page is left. `context` holds
//   api(path, options)  fetch with the key: options {method, body (any JSON) or text, headers, signal,
//                       as: "json" | "text" | "response"}; throws an Error with the server's own sentence, its `status`
//                       and its `code`
//   key()               the key of this tab, or null on a server without keys
//   element(tag, attributes, ...children)
//   signal              aborted when the page is left
//   server              the answer of /admin/console: version and what this server can show; null without the scope
//
// The key is kept in sessionStorage: the tab forgets it when it is closed, no other site's page can make the browser
// send it, and so there is nothing for a forged request (CSRF) to use.

import { announce, element, replace } from "./dom.js";
import { begin, finish, KEY_ITEM as KEY, offer } from "./sign_in.js";

// One line per page: the name in the address, the title, the module, and whether the page needs the scope `admin`.
const PAGES = [
  { name: "overview", title: "Overview", module: "./overview.js", isAdmin: true },
  { name: "fleet", title: "Fleet", module: "./fleet.js", isAdmin: true },
  { name: "releases", title: "Releases", module: "./releases.js", isAdmin: true },
  { name: "requests", title: "Requests", module: "./recent.js", isAdmin: true },
  { name: "keys", title: "Keys and workspaces", module: "./keys.js", isAdmin: true },
  { name: "usage", title: "Usage and cost", module: "./usage.js", isAdmin: true },
  { name: "settings", title: "Settings", module: "./settings.js", isAdmin: true },
  { name: "playground", title: "Playground", module: "./playground.js", isAdmin: false },
  { name: "simulator", title: "Simulator", module: "./simulator.js", isAdmin: true },
];

const page = document.getElementById("page");
let leaving = new AbortController();
let server = null;
let offered = { needs_key: false, provider: null };

export const key = () => sessionStorage.getItem(KEY);

export async function api(path, { method = "GET", body, text, headers: given = {}, signal = leaving.signal, as = "json" } = {}) {
  const headers = { ...given };
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body === undefined ? text : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  if (as === "response") return answer;
  if (!answer.ok) throw await refusal(answer);
  return as === "text" ? answer.text() : answer.json();
}

async function refusal(answer) {
  let said = null;
  try { said = (await answer.json()).error; } catch { /* no JSON: the status has to do */ }
  const error = new Error(said?.message ?? said ?? `The server answered with status ${answer.status}.`);
  error.status = answer.status;
  error.code = said?.code ?? null;
  return error;
}

function draw() {
  const [, name] = location.hash.match(/^#\/([a-z-]+)/) ?? [null, PAGES[0].name];
  const wanted = PAGES.find((each) => each.name === name);
  document.getElementById("places").replaceChildren(...PAGES.map((each) =>
    element("a", { href: `#/${each.name}`, "aria-current": each === wanted ? "page" : null }, each.title)));
  closeMenu();
  show(wanted, name);
}

async function show(wanted, name) {
  leaving.abort();
  const mine = leaving = new AbortController();
  const context = { api, key, element, server, signal: mine.signal };
  if (!wanted) {
    replace(page, element("h1", {}, "No such page"), element("p", {}, `The console has no page '${name}'.`));
    return;
  }
  document.title = `${wanted.title} · Penstock`;
  replace(page, element("p", { class: "soft" }, "Loading…"));
  if (wanted.isAdmin && offered.needs_key && !key()) {
    askForKey(null); // without a request that would only be refused
    return;
  }
  try {
    if (wanted.isAdmin) context.server = server = await api("/admin/console");
    const module = await import(wanted.module);
    if (mine.signal.aborted) return;
    showAccount();
    page.replaceChildren();
    const stop = await module.show(page, context);
    if (typeof stop === "function") {
      if (mine.signal.aborted) stop();
      else mine.signal.addEventListener("abort", () => stop());
    }
    announce(`${wanted.title} is shown.`);
  } catch (error) {
    if (mine.signal.aborted) return;
    if (error.status === 401) askForKey(key() ? error.message : null);
    else if (error.status === 403) refuse(error);
    else replace(page, element("h1", {}, wanted.title), element("p", { class: "problem", role: "alert" }, error.message));
  }
}

function askForKey(message) {
  showAccount();
  const box = element("input", { type: "password", id: "key", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": message ? "key-problem" : null });
  const { provider } = offered;
  const complain = (error) => askForKey(error.message);
  const form = element("form", { class: "panel sign-in" },
    element("h1", {}, "Sign in"),
    message && element("p", { class: "problem", role: "alert", id: "key-problem" }, message),
    provider && [element("button", { class: "primary", type: "button", onclick: () => begin(provider, location.pathname + location.hash).catch(complain) }, "Sign in with your organisation"),
      element("p", { class: "soft" }, `At ${new URL(provider.issuer).host}. Or with a key:`)],
    element("p", { class: "soft" }, provider ? "The key needs the scope 'admin'." : "With a key that has the scope 'admin', or with a token (JWT) of your identity provider where this server takes tokens."),
    element("label", { for: "key" }, "Key or token"), box,
    element("button", { class: provider ? null : "primary" }, "Sign in"),
    element("p", { class: "soft" }, "The key stays in this tab and is forgotten when the tab is closed. Make one with ",
      element("code", {}, "penstock keys create --scope admin"), "."));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, box.value.trim());
    draw();
  });
  replace(page, form);
  box.focus();
}

function refuse(error) {
  showAccount();
  replace(page, element("div", { class: "panel sign-in" }, element("h1", {}, "Not with this key"),
    element("p", { role: "alert" }, `This page needs a key with the scope 'admin'. The server says: ${error.message}`),
    element("button", { class: "primary", onclick: signOut }, "Sign in with another key")));
}

function showAccount() {
  document.getElementById("leave").hidden = !key();
  document.getElementById("who").textContent = key() ? "Signed in" : "";
}

function signOut() {
  sessionStorage.removeItem(KEY);
  server = null;
  draw();
}

function closeMenu() {
  document.body.classList.remove("menu-open");
  document.getElementById("menu").setAttribute("aria-expanded", "false");
}

document.getElementById("menu").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("menu-open");
  document.getElementById("menu").setAttribute("aria-expanded", String(isOpen));
});
document.getElementById("leave").addEventListener("click", signOut);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); page.focus(); });
window.addEventListener("hashchange", draw);
start();

async function start() {
  let problem = null;
  const signedIn = finish().catch((error) => { problem = error; });
  [offered] = await Promise.all([offer(), signedIn]);
  draw();
  if (problem) askForKey(problem.message);
}
