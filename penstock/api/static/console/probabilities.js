// An answer's tokens, coloured by how likely each one was. A token that is pointed at or focused shows what else the
// model might have written. The tokens are one stop of the Tab key; arrows go from token to token.

import { element } from "./dom.js";

const STEPS = [0.9, 0.7, 0.4, 0.15, 0.05]; // the least probability of the classes p5 to p1

export function classOf(logprob) {
  const probability = Math.exp(logprob);
  const at = STEPS.findIndex((least) => probability >= least);
  return `p${at < 0 ? 0 : STEPS.length - at}`;
}

export function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return value > 0 && value < 0.1 ? "< 0.1 %" : `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

// Spaces and line breaks, made visible.
export function visible(text) {
  return text.replaceAll("\n", "⏎").replace(/^ | $/g, "␣") || "(nothing)";
}

export function tokensView(tokens) {
  const card = element("div", { class: "alternatives", role: "tooltip", hidden: true });
  const spans = tokens.map((token, at) => element("span", {
    class: `token ${classOf(token.logprob)}`, role: "listitem", tabindex: at === 0 ? 0 : -1, "aria-label": spoken(token),
  }, token.text));
  const text = element("div", { class: "tokens", role: "list", "aria-label": "Tokens with their probabilities" }, spans);
  const frame = element("div", { class: "probabilities" }, legend(), text, card);

  const showCard = (at) => {
    card.replaceChildren(...cardRows(tokens[at]));
    card.hidden = false;
    const place = spans[at].getClientRects()[0] ?? spans[at].getBoundingClientRect(), outer = frame.getBoundingClientRect();
    const left = Math.min(place.left - outer.left, outer.width - card.offsetWidth);
    card.style.left = `${Math.max(0, left)}px`;
    card.style.top = `${place.bottom - outer.top + 4}px`;
  };
  const atOf = (event) => spans.indexOf(event.target);
  text.addEventListener("pointerover", (event) => atOf(event) >= 0 && showCard(atOf(event)));
  text.addEventListener("focusin", (event) => atOf(event) >= 0 && showCard(atOf(event)));
  text.addEventListener("pointerleave", () => (card.hidden = !text.contains(document.activeElement)));
  text.addEventListener("focusout", () => (card.hidden = true));
  text.addEventListener("keydown", (event) => {
    const at = atOf(event);
    if (at < 0) return;
    if (event.key === "Escape") card.hidden = true;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans[to]) return;
    event.preventDefault();
    spans[at].tabIndex = -1;
    spans[to].tabIndex = 0;
    spans[to].focus();
  });
  return frame;
}

function spoken({ text, logprob, top }) {
  const others = top.filter((each) => each.text !== text).slice(0, 3).map((each) => `${visible(each.text)} ${percent(each.logprob)}`);
  return `${visible(text)}, ${percent(logprob)}${others.length ? `; or ${others.join(", ")}` : ""}`;
}

function cardRows({ text, logprob, top }) {
  const rows = top.some((each) => each.text === text) ? top : [{ text, logprob }, ...top];
  return [...rows].sort((one, other) => other.logprob - one.logprob).map((each) => {
    const fill = element("span", { class: "probability-fill" });
    fill.style.width = `${Math.max(1, Math.exp(each.logprob) * 100)}%`;
    return element("div", { class: each.text === text ? "alternative chosen" : "alternative" },
      element("code", {}, visible(each.text)), element("span", { class: "probability" }, fill), element("span", { class: "share" }, percent(each.logprob)));
  });
}

function legend() {
  const marks = [["p5", "certain"], ["p3", "likely"], ["p1", "unlikely"], ["p0", "surprising"]];
  return element("p", { class: "token-legend", "aria-hidden": "true" }, marks.map(([name, text]) => [element("span", { class: `token ${name}` }, text), " "]));
}
