// Runs the script of the chat page in Node with a minimal document, asks one question, and prints what a reader sees.
// Arguments: the page, the JSON of /v1/models, the server-sent events of the answer, and perhaps a data URL to paste.
"use strict";
const [page, models, events, pasted] = process.argv.slice(2);
const script = require("fs").readFileSync(page, "utf8").match(/<script>([\s\S]*)<\/script>/)[1];

class Element {
  constructor(className = "") {
    Object.assign(this, { className, children: [], text: "", value: "", hidden: false, handlers: {} });
    this.classList = { remove: (name) => (this.className = this.className.replace(name, "").trim()) };
  }
  get textContent() { return this.text + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.text = text; this.children = []; }
  append(...children) { this.children.push(...children); }
  prepend(...children) { this.children.unshift(...children); }
  replaceChildren(...children) { this.text = ""; this.children = children; }
  querySelector(selector) {
    const found = (child) => child.className.split(" ").includes(selector.slice(1)) || child.tag === selector;
    return this.children.find(found) || this.children.map((child) => child.querySelector(selector)).find(Boolean);
  }
  remove() { this.removed = true; }
  setAttribute() {}
  toggleAttribute() {}
  focus() {}
  addEventListener(name, handler) { this.handlers[name] = handler; }
}

const byId = {};
const welcome = new Element("welcome");
global.document = {
  getElementById: (id) => (byId[id] ||= new Element()),
  createElement: (tag) => Object.assign(new Element(), { tag }),
  querySelector: () => (welcome.removed ? null : welcome),
};
global.requestAnimationFrame = (draw) => setImmediate(draw);
let asked = null;
global.fetch = async (url, options) => {
  if (url !== "/v1/models") asked = JSON.parse(options.body);
  return new Response(url === "/v1/models" ? models : events);
};
global.FileReader = class {
  readAsDataURL(file) { Object.assign(this, { result: file.url }).onload(); }
};
document.getElementById("entry").value = "Hello?";

async function main() {
  new Function(script)();
  await new Promise((done) => setTimeout(done, 20));
  const seen = { model: byId.model.textContent, welcome: welcome.textContent };
  if (pasted) byId.entry.handlers.paste({ clipboardData: { files: [{ type: "image/png", url: pasted }] } });
  byId.form.handlers.submit({ preventDefault() {} });
  while (byId.send.textContent !== "Send") await new Promise((done) => setTimeout(done, 5));
  const turn = byId.turns.children.at(-1);
  const fold = turn.querySelector(".reasoning");
  seen.answer = turn.querySelector(".text").textContent;
  seen.reasoning = fold.hidden ? null : fold.querySelector(".prose").textContent;
  seen.asked = asked.messages;
  console.log(JSON.stringify(seen));
}
main();
