// The playground's settings: a form over one plain object, `settings`, with a call for every change.

import { element, field, replace, select } from "./dom.js";
import { toolOf } from "./requests.js";

const EXAMPLE_SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "year": {"type": "integer"}
  },
  "required": ["name", "year"],
  "additionalProperties": false
}`;
const EXAMPLE_TOOL = {
  name: "get_weather",
  description: "The weather in a city, now.",
  parameters: `{
  "type": "object",
  "properties": {"city": {"type": "string"}},
  "required": ["city"]
}`,
};

export function settingsForm(settings, changed) {
  const set = (name, value) => {
    settings[name] = value;
    changed(name);
  };
  const typed = (label, name, attributes, hint) =>
    field(label, { ...attributes, value: settings[name], oninput: (event) => set(name, event.target.value) }, hint);
  const isChat = settings.mode !== "completion";
  return element("form", { class: "settings-form", onsubmit: (event) => event.preventDefault() },
    isChat && typed("System prompt", "system", { rows: 4, placeholder: "None" }),
    section("Sampling", true,
      slider(settings, set),
      element("div", { class: "pair" },
        typed("Top p", "topP", { type: "number", min: 0, max: 1, step: 0.05, placeholder: "Default" }),
        typed("Max tokens", "maxTokens", { type: "number", min: 1, step: 1, placeholder: isChat ? "No limit" : "256" })),
      element("div", { class: "pair" },
        typed("Seed", "seed", { type: "number", min: 0, step: 1, placeholder: "Random" }),
        typed("Stop strings", "stop", { rows: 2, placeholder: "None" }, "One a line; \\n is a line break."))),
    isChat && section("Structured output", settings.format !== "text", outputFields(settings, set)),
    isChat && section("Tools", settings.tools.length > 0, toolFields(settings, changed)),
    element("label", { class: "check" },
      element("input", { type: "checkbox", checked: settings.logprobs, onchange: (event) => set("logprobs", event.target.checked) }),
      element("span", {}, "Show token probabilities")));
}

function section(title, isOpen, ...children) {
  return element("details", { class: "settings-section", open: isOpen }, element("summary", {}, title), children);
}

function slider(settings, set) {
  const shown = element("output", {}, String(settings.temperature));
  const box = field("Temperature", {
    type: "range", min: 0, max: 2, step: 0.05, value: settings.temperature,
    oninput: (event) => {
      shown.textContent = event.target.value;
      set("temperature", Number(event.target.value));
    },
  });
  box.querySelector("label").append(" ", shown);
  return box;
}

function outputFields(settings, set) {
  const problem = element("p", { class: "problem", role: "alert", hidden: true });
  const check = () => {
    problem.hidden = true;
    try {
      JSON.parse(settings.schema);
    } catch (error) {
      Object.assign(problem, { hidden: false, textContent: `This is not JSON yet: ${error.message}.` });
    }
  };
  const schema = field("JSON schema", {
    rows: 9, class: "mono", spellcheck: "false", value: settings.schema,
    oninput: (event) => {
      set("schema", event.target.value);
      check();
    },
  });
  const reveal = () => (schema.hidden = problem.hidden = settings.format !== "json_schema");
  const formats = [["text", "Text"], ["json_object", "Any JSON object"], ["json_schema", "JSON with this schema"]];
  const box = select("The answer is", formats, settings.format, (format) => {
    if (format === "json_schema" && !settings.schema) {
      settings.schema = EXAMPLE_SCHEMA;
      schema.querySelector("textarea").value = EXAMPLE_SCHEMA;
    }
    set("format", format);
    reveal();
    problem.hidden = true;
  });
  reveal();
  problem.hidden = true;
  return [box, schema, problem];
}

function toolFields(settings, changed) {
  const frame = element("div", {});
  const draw = () => {
    const cards = settings.tools.map((tool, at) => toolCard(tool, changed, () => {
      settings.tools.splice(at, 1);
      changed("tools");
      draw();
    }));
    const choices = [["auto", "The model decides"], ["required", "A call is required"], ["none", "No calls"]];
    replace(frame, cards,
      settings.tools.length ? select("Calls", choices, settings.toolChoice, (choice) => {
        settings.toolChoice = choice;
        changed("toolChoice");
      }) : element("p", { class: "soft" }, "Functions that the model may call. You type what they return."),
      element("button", { type: "button", onclick: () => {
        settings.tools.push(settings.tools.length ? { name: "", description: "", parameters: "" } : { ...EXAMPLE_TOOL });
        changed("tools");
        draw();
        frame.querySelectorAll(".tool-card input")[2 * (settings.tools.length - 1)]?.focus();
      } }, "Add a tool"));
  };
  draw();
  return frame;
}

function toolCard(tool, changed, remove) {
  const problem = element("p", { class: "problem", role: "alert", hidden: true });
  const set = (name) => (event) => {
    tool[name] = event.target.value;
    problem.hidden = true;
    try {
      toolOf(tool);
    } catch (error) {
      Object.assign(problem, { hidden: false, textContent: error.message });
    }
    changed("tools");
  };
  return element("fieldset", { class: "tool-card" },
    element("legend", { class: "unseen" }, "Tool"),
    field("Name", { value: tool.name, spellcheck: "false", class: "mono", oninput: set("name") }),
    field("Description", { value: tool.description, oninput: set("description") }),
    field("Parameters, a JSON schema", { rows: 5, class: "mono", spellcheck: "false", value: tool.parameters, oninput: set("parameters") }),
    problem,
    element("button", { type: "button", class: "quiet danger", onclick: remove }, "Remove this tool"));
}
