// Line charts as inline SVG, each with a legend, a reading under the pointer or the arrow keys, and a table of the same
// values for those who do not see the lines.

import { element, replace, table } from "./dom.js";
import { shortTime, time } from "./format.js";

const HEIGHT = 190, LEFT = 58, RIGHT = 10, TOP = 10, BOTTOM = 24;
const MAX_TABLE_ROWS = 24;

// A chart that `draw(times, series)` fills in: series [{name, values, tone}], where a value of null is a gap. The
// tones are classes tone-1 … tone-4.
export function lineChart(title, format, { floor = 0, ceiling = null, width: WIDTH = 640, mark = shortTime } = {}) {
  const picture = element("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img",
    "aria-label": title, tabindex: 0, preserveAspectRatio: "none" });
  const reading = element("p", { class: "reading", "aria-live": "off" });
  const legend = element("ul", { class: "legend" });
  const values = element("details", { class: "values" }, element("summary", {}, "As a table"));
  const figure = element("figure", { class: "panel" }, element("figcaption", {}, element("h2", {}, title), legend),
    element("div", { class: "plot" }, picture, reading), values);
  let state = { times: [], series: [] };
  values.addEventListener("toggle", () => fillTable());

  function fillTable() {
    if (!values.open) return;
    const step = Math.max(1, Math.ceil(state.times.length / MAX_TABLE_ROWS));
    const rows = state.times.map((at, index) => ({ at, index })).filter(({ index }) => index % step === 0);
    const columns = [{ title: "Time", cell: (row) => time(row.at) },
      ...state.series.map((line) => ({ title: line.name, number: true, cell: (row) => format(line.values[row.index]) }))];
    replace(values, element("summary", {}, "As a table"), table(title, columns, rows));
  }

  const x = (index) => LEFT + (WIDTH - LEFT - RIGHT) * (state.times.length < 2 ? 1 : index / (state.times.length - 1));

  function draw(times, series) {
    state = { times, series };
    const known = series.flatMap((line) => line.values).filter((value) => value !== null && Number.isFinite(value));
    const top = ceiling ?? niceCeiling(Math.max(floor, ...known, 0));
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, value / top));
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(element("svg:line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(top * share), y2: y(top * share) }));
      parts.push(element("svg:text", { class: "mark end", x: LEFT - 8, y: y(top * share) + 4 }, format(top * share)));
    }
    for (const index of marks(times.length)) {
      const anchor = index === 0 ? "start" : index === times.length - 1 ? "end" : "middle";
      parts.push(element("svg:text", { class: `mark ${anchor}`, x: x(index), y: HEIGHT - 6 }, mark(times[index])));
    }
    series.forEach((line, number) => {
      const tone = line.tone ?? `tone-${number + 1}`;
      if (number === 0) parts.push(element("svg:path", { class: `area ${tone}`, d: area(line.values, x, y) }));
      parts.push(element("svg:path", { class: `line ${tone}`, d: path(line.values, x, y) }));
      lonely(line.values).forEach((index) =>
        parts.push(element("svg:circle", { class: `dot ${tone}`, cx: x(index), cy: y(line.values[index]), r: 2.5 })));
    });
    parts.push(element("svg:line", { class: "cursor", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }));
    replace(picture, parts);
    replace(legend, series.map((line, number) => element("li", { class: line.tone ?? `tone-${number + 1}` },
      element("span", { class: "key", "aria-hidden": "true" }), `${line.name} `,
      element("strong", {}, format(lastKnown(line.values))))));
    picture.setAttribute("aria-label", `${title}. Latest: ${series.map((line) => `${line.name} ${format(lastKnown(line.values))}`).join(", ")}.`);
    read(null);
    fillTable();
  }

  let place = null;
  function read(index) {
    place = index;
    const cursor = picture.querySelector(".cursor");
    if (index === null || !state.times.length) {
      reading.textContent = "";
      cursor?.setAttribute("visibility", "hidden");
      return;
    }
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", x(index));
    cursor.setAttribute("x2", x(index));
    reading.textContent = `${time(state.times[index])}  ` + state.series.map((line) => `${line.name} ${format(line.values[index])}`).join("  ·  ");
  }

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    if (state.times.length) read(Math.round(Math.min(1, Math.max(0, share)) * (state.times.length - 1)));
  });
  picture.addEventListener("pointerleave", () => read(null));
  picture.addEventListener("blur", () => { read(null); reading.setAttribute("aria-live", "off"); });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !state.times.length) return;
    event.preventDefault();
    reading.setAttribute("aria-live", "polite");
    const last = state.times.length - 1;
    read(Math.min(last, Math.max(0, (place ?? last + 1) + step)));
  });
  return { figure, draw };
}

export function sparkline(values) {
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  const top = Math.max(...known, 0) || 1;
  const x = (index) => values.length < 2 ? 0 : index / (values.length - 1) * 100;
  const y = (value) => 23 - value / top * 21;
  return element("svg:svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    element("svg:path", { class: "area tone-1", d: area(values, x, y, 24) }),
    element("svg:path", { class: "line tone-1", d: path(values, x, y) }));
}

function runs(values) {
  const found = [];
  let run = [];
  values.forEach((value, index) => {
    if (value !== null && Number.isFinite(value)) run.push(index);
    else if (run.length) { found.push(run); run = []; }
  });
  if (run.length) found.push(run);
  return found;
}

const point = (index, values, x, y) => `${x(index).toFixed(1)} ${y(values[index]).toFixed(1)}`;

function path(values, x, y) {
  return runs(values).map((run) => "M" + run.map((index) => point(index, values, x, y)).join("L")).join("");
}

function area(values, x, y, bottom = HEIGHT - BOTTOM) {
  return runs(values).filter((run) => run.length > 1).map((run) => `M${x(run[0]).toFixed(1)} ${bottom}L`
    + run.map((index) => point(index, values, x, y)).join("L") + `L${x(run.at(-1)).toFixed(1)} ${bottom}Z`).join("");
}

const lonely = (values) => runs(values).filter((run) => run.length === 1).map((run) => run[0]);
const lastKnown = (values) => values.findLast((value) => value !== null && value !== undefined) ?? null;

function marks(count) {
  return count < 2 ? [] : [0, Math.floor((count - 1) / 2), count - 1];
}

function niceCeiling(value) {
  if (value <= 0) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * size).find((ceiling) => ceiling >= value * 1.02) ?? 20 * size;
}
