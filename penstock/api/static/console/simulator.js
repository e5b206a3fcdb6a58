// The simulator: traffic and the sizes of fleets in, latency and load of each fleet out. The server runs
// `penstock simulate` with the scheduler and the dispatcher that serve, in virtual time.

import { announce, element, field, heading, panel, problem, replace, select, table } from "./dom.js";
import { number, seconds, share } from "./format.js";

const LENGTHS = "Tokens: 512, 100:1024, or lognormal(median, sigma, maximum).";
const PERCENTILES = [["p50", "tone-1"], ["p90", "tone-2"], ["p99", "tone-3"]];
const WIDTH = 640, HEIGHT = 200, LEFT = 64, BOTTOM = 26, TOP = 12;

export async function show(root, context) {
  const choices = await context.api("/admin/simulations");
  const results = element("div", { class: "simulation-results" });
  const button = element("button", { class: "primary" }, "Run");
  const form = orderForm(choices, button);
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) {
      running.abort();
      return;
    }
    running = new AbortController();
    button.textContent = "Stop";
    replace(results, element("p", { class: "soft", role: "status" }, "Simulating … at most two minutes."));
    try {
      const answer = await context.api("/admin/simulations", { method: "POST", body: orderOf(form), signal: AbortSignal.any([running.signal, context.signal]) });
      showResults(results, answer);
    } catch (error) {
      if (context.signal.aborted) return;
      replace(results, running.signal.aborted ? element("p", { class: "soft" }, "Stopped.") : problem(error));
    } finally {
      running = null;
      button.textContent = "Run";
    }
  });
  root.append(heading("Simulator", "What fleets of different sizes would make of your traffic, in virtual time, before you pay for them."),
    panel("Traffic and fleet", form), results);
  return () => running?.abort();
}

function orderForm(choices, button) {
  const names = (list) => list.map((name) => [name, name]);
  const named = (node, name) => {
    node.querySelector("input, select").name = name;
    return node;
  };
  const input = (label, name, attributes, hint = null) => named(field(label, attributes, hint), name);
  return element("form", { class: "simulation-form" },
    element("div", { class: "fields" },
      named(select("Model", names(choices.models), "llama-3.1-8b"), "model"),
      named(select("Hardware", names(choices.hardware), "h200"), "hardware"),
      named(select("Weights", names(choices.formats), "bfloat16"), "format"),
      input("Devices per replica", "tensor_parallel", { type: "number", min: 1, max: 64, value: 1, required: true }),
      input("Requests per second", "rate", { type: "number", min: 0.001, step: "any", value: 20, required: true }),
      input("Requests", "requests", { type: "number", min: 1, max: choices.max_requests, value: 500, required: true }, `At most ${number(choices.max_requests)}.`),
      input("Prompt length", "input", { value: "lognormal(300, 1.0, 8000)", required: true }, LENGTHS),
      input("Answer length", "output", { value: "lognormal(150, 0.8, 1000)", required: true }, LENGTHS),
      input("Shared prefix", "prefix", { type: "number", min: 0, value: 0 }, "Tokens that all prompts begin with."),
      input("Requests in conversations", "session_share", { type: "number", min: 0, max: 1, step: 0.05, value: 0 }, "A share from 0 to 1."),
      input("Replicas to compare", "replicas", { value: "1, 2, 4", required: true }, `Up to ${choices.max_fleets} numbers, each at most ${choices.max_replicas}.`),
      input("Seed", "seed", { type: "number", min: 0, value: 0 })),
    element("div", { class: "row" }, button));
}

// The order as the server wants it. Throws a sentence for replicas that are no numbers.
function orderOf(form) {
  const given = Object.fromEntries(new FormData(form));
  const replicas = given.replicas.split(/[\s,]+/).filter(Boolean).map(Number);
  if (!replicas.length || replicas.some((count) => !Number.isInteger(count))) throw new Error("Replicas to compare must be whole numbers, such as 1, 2, 4.");
  const whole = Object.fromEntries(["tensor_parallel", "requests", "prefix", "seed"].map((name) => [name, Number(given[name])]));
  return { ...given, ...whole, rate: Number(given.rate), session_share: Number(given.session_share), replicas };
}

function showResults(results, { fleets, took_s: took }) {
  const columns = [
    { title: "Replicas", cell: (fleet) => String(fleet.replicas) },
    { title: "Answered", number: true, cell: (fleet) => `${number(fleet.num_answered)} of ${number(fleet.num_requests)}` },
    { title: "Output tokens/s", number: true, cell: (fleet) => number(fleet.output_tokens_per_s, 0) },
    { title: "TTFT p50", number: true, cell: (fleet) => seconds(fleet.ttft_s.p50) },
    { title: "TTFT p99", number: true, cell: (fleet) => seconds(fleet.ttft_s.p99) },
    { title: "ITL p50", number: true, cell: (fleet) => seconds(fleet.itl_s.p50) },
    { title: "ITL p99", number: true, cell: (fleet) => seconds(fleet.itl_s.p99) },
    { title: "From cache", number: true, cell: (fleet) => share(fleet.cached_share) },
    { title: "Preemptions", number: true, cell: (fleet) => number(fleet.num_preemptions) },
    { title: "Busy", number: true, cell: (fleet) => share(fleet.busy_share) },
  ];
  replace(results,
    element("div", { class: "grid-2" },
      barChart("Time to the first token", fleets, (fleet) => fleet.ttft_s),
      barChart("Time between tokens", fleets, (fleet) => fleet.itl_s)),
    panel("Fleets", table("Figures of each fleet", columns, fleets),
      element("p", { class: "soft" }, `Virtual time: ${seconds(fleets[0].duration_s)} of traffic, computed in ${seconds(took)}. The hardware is a model of its data sheet: `,
        element("code", {}, "penstock plan --measure"), " calibrates it.")));
  announce(`The simulation is done. ${fleets.map((fleet) => `${fleet.replicas} replicas: first token in ${seconds(fleet.ttft_s.p50)}, 99 % within ${seconds(fleet.ttft_s.p99)}`).join("; ")}.`);
}

// Bars of three percentiles for each fleet. The table below has the same figures for those who do not see them.
function barChart(title, fleets, figuresOf) {
  const top = Math.max(...fleets.map((fleet) => figuresOf(fleet).p99)) * 1.08 || 1;
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const slot = (WIDTH - LEFT) / fleets.length, bar = Math.min(46, slot / 4.5);
  const parts = [0, 0.5, 1].flatMap((part) => [
    element("svg:line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(top * part), y2: y(top * part) }),
    element("svg:text", { class: "mark end", x: LEFT - 8, y: y(top * part) + 4 }, seconds(top * part)),
  ]);
  fleets.forEach((fleet, at) => {
    const middle = LEFT + slot * (at + 0.5);
    PERCENTILES.forEach(([name, tone], rank) => {
      const value = figuresOf(fleet)[name];
      parts.push(element("svg:rect", { class: `dot ${tone}`, x: middle + (rank - 1.5) * (bar + 3), y: y(value), width: bar, height: Math.max(1, HEIGHT - BOTTOM - y(value)), rx: 2 },
        element("svg:title", {}, `${fleet.replicas} replicas, ${name}: ${seconds(value)}`)));
    });
    parts.push(element("svg:text", { class: "mark middle", x: middle, y: HEIGHT - 8 }, `${fleet.replicas} replica${fleet.replicas === 1 ? "" : "s"}`));
  });
  const legend = PERCENTILES.map(([name, tone]) => element("li", { class: tone }, element("span", { class: "key", "aria-hidden": "true" }), name));
  const spoken = fleets.map((fleet) => `${fleet.replicas} replicas: ${PERCENTILES.map(([name]) => `${name} ${seconds(figuresOf(fleet)[name])}`).join(", ")}`).join("; ");
  return element("figure", { class: "panel" }, element("figcaption", {}, element("h2", {}, title), element("ul", { class: "legend" }, legend)),
    element("svg:svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}. ${spoken}.` }, parts));
}
