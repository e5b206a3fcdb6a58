// Sign-in at an identity provider: authorization code with PKCE. The secrets of a sign-in are made here and stay in this
// tab; the gateway exchanges the code. `state` ties the answer to this tab, so that no other page can sign it in as
// somebody else; the gateway compares `nonce` with the ID token.

export const KEY_ITEM = "penstock-key";
const FLOW_ITEM = "penstock-sign-in";
const PATH = "/console/sign-in";
const REDIRECT_PATH = "/console";

// How one signs in here: {needs_key, provider}. A provider that cannot be reached is no reason to ask for no key.
export async function offer() {
  try {
    const answer = await fetch(PATH);
    if (answer.ok) return await answer.json();
  } catch { /* the next call to the server says what is wrong */ }
  return { needs_key: false, provider: null };
}

// Leaves this page for the provider's. `back` is the address on this server to return to.
export async function begin(provider, back) {
  if (!globalThis.crypto?.subtle) throw new Error("Browsers sign in at an identity provider only over HTTPS, or on this machine.");
  const flow = { state: secret(), nonce: secret(), verifier: secret(), issuer: provider.issuer, back };
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(flow.verifier));
  const url = new URL(provider.authorization_endpoint);
  const query = {
    response_type: "code", client_id: provider.client_id, scope: provider.scope, redirect_uri: location.origin + REDIRECT_PATH,
    state: flow.state, nonce: flow.nonce, code_challenge: encoded(new Uint8Array(digest)), code_challenge_method: "S256",
  };
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  sessionStorage.setItem(FLOW_ITEM, JSON.stringify(flow));
  location.assign(url);
}

// When the provider has sent the browser back: exchanges the code, keeps the token, and shows the page where the sign-in
// began. Resolves to false when this page was opened otherwise. Throws an Error with a sentence.
export async function finish() {
  const answer = new URLSearchParams(location.search);
  if (!answer.has("state") || !(answer.has("code") || answer.has("error"))) return false;
  const flow = JSON.parse(sessionStorage.getItem(FLOW_ITEM) ?? "null");
  sessionStorage.removeItem(FLOW_ITEM); // once only, whatever comes of it
  history.replaceState(null, "", REDIRECT_PATH + location.hash); // codes stay out of the browser's history
  if (flow?.state !== answer.get("state")) throw new Error("This sign-in was not begun in this tab. Please begin again.");
  if (answer.has("iss") && answer.get("iss") !== flow.issuer) throw new Error("Another identity provider answered. Please begin again.");
  if (answer.has("error")) throw new Error(`The identity provider refused: ${answer.get("error_description") ?? answer.get("error")}`);
  const body = { code: answer.get("code"), code_verifier: flow.verifier, nonce: flow.nonce, redirect_uri: location.origin + REDIRECT_PATH };
  const response = await fetch(PATH, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  const told = await response.json();
  if (!response.ok) throw new Error(told.error?.message ?? `The server answered with status ${response.status}.`);
  sessionStorage.setItem(KEY_ITEM, told.token);
  const back = new URL(flow.back, location.origin);
  if (back.pathname !== REDIRECT_PATH) location.replace(back.pathname + back.hash);
  else history.replaceState(null, "", REDIRECT_PATH + back.hash);
  return true;
}

const secret = () => encoded(crypto.getRandomValues(new Uint8Array(32)));
const encoded = (bytes) => btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
