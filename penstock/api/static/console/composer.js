// The box at the bottom: text, images where the model takes them, and one button that sends or stops.

import { announce, element, replace } from "./dom.js";
import { picture } from "./turn.js";

const MAX_IMAGES = 8;
const MAX_IMAGE_BYTES = 8_000_000;
const MAX_ROWS = 12;

export class Composer {
  // `host` has send(text, images), stopAll() and editLast().
  constructor(host) {
    this.host = host;
    this.images = []; // data URLs of the next message
    this.takesImages = false;
    this.isRunning = false;
    this.entry = element("textarea", { class: "entry", rows: 1, "aria-label": "Message", placeholder: "Message", enterkeyhint: "send" });
    this.pictures = element("div", { class: "pictures", "aria-label": "Images of the next message" });
    this.note = element("p", { class: "problem", role: "alert", hidden: true });
    this.file = element("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true, hidden: true });
    this.attach = element("button", { type: "button", class: "attach", title: "Add images; they can also be pasted or dropped", hidden: true, onclick: () => this.file.click() }, "Image");
    this.button = element("button", { class: "primary send", type: "submit" }, "Send");
    this.node = element("form", { class: "composer", "aria-label": "Write a message" }, this.note, this.pictures,
      element("div", { class: "composer-row" }, this.file, this.attach, this.entry, this.button));
    this.listen();
  }

  listen() {
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.entry.addEventListener("input", () => this.fit());
    this.entry.addEventListener("paste", (event) => this.add(event.clipboardData.files));
    this.node.addEventListener("dragover", (event) => event.preventDefault());
    this.node.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
    this.file.addEventListener("change", () => {
      this.add(this.file.files);
      this.file.value = "";
    });
    this.entry.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    if (event.key === "ArrowUp" && !this.entry.value) {
      event.preventDefault();
      this.host.editLast();
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.isRunning) this.submit();
  }

  submit() {
    if (this.isRunning) {
      this.host.stopAll();
      return;
    }
    const text = this.entry.value.trim() ? this.entry.value : "";
    if (!text && !this.images.length) return;
    const images = this.images;
    this.images = [];
    this.setText("");
    this.showImages();
    this.host.send(text, images);
  }

  setText(text) {
    this.entry.value = text;
    this.fit();
  }

  fit() {
    this.note.hidden = true;
    this.entry.rows = 1;
    const line = parseFloat(getComputedStyle(this.entry).lineHeight) || 22;
    this.entry.rows = Math.max(1, Math.min(MAX_ROWS, Math.floor((this.entry.scrollHeight - 8) / line)));
  }

  show({ isRunning, takesImages, mode }) {
    this.isRunning = isRunning;
    this.takesImages = takesImages;
    this.attach.hidden = !takesImages;
    this.button.textContent = isRunning ? "Stop" : mode === "completion" ? "Complete" : "Send";
    this.entry.placeholder = mode === "completion" ? "Text that the model continues" : "Message";
    this.entry.setAttribute("aria-label", mode === "completion" ? "Prompt" : "Message");
  }

  say(sentence) {
    this.note.textContent = sentence;
    this.note.hidden = !sentence;
  }

  async add(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      if (!this.takesImages) this.say("This model takes text only.");
      else if (file.size > MAX_IMAGE_BYTES) this.say(`${file.name} is larger than ${MAX_IMAGE_BYTES / 1e6} MB.`);
      else if (this.images.length >= MAX_IMAGES) this.say(`A message takes at most ${MAX_IMAGES} images.`);
      else this.images.push(await dataUrlOf(file));
    }
    this.showImages();
  }

  showImages() {
    replace(this.pictures, this.images.map((url, at) => element("button", { type: "button", class: "picture-button", title: "Remove this image", "aria-label": `Remove image ${at + 1}`, onclick: () => {
      this.images.splice(at, 1);
      this.showImages();
      announce("The image was removed.");
      this.entry.focus();
    } }, picture(url, ""))));
  }
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
