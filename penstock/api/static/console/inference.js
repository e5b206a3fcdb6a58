// The playground's calls to the server: which models there are, and answers as streams. A refusal for want of a key
// opens the key dialog, and the call is made again with the new key.

import { eventsOf } from "./answers.js";
import { askForKey } from "./key_dialog.js";

const UNAUTHORIZED = 401;

export class Inference {
  constructor(context) {
    this.context = context;
  }

  async models(signal) {
    const answer = await this.call("/v1/models", { signal });
    return (await answer.json()).data;
  }

  // Yields the events of an answer.
  async *stream({ path, body }, signal) {
    const response = await this.call(path, { method: "POST", body, signal });
    yield* eventsOf(response);
  }

  async call(path, options) {
    for (;;) {
      const response = await this.context.api(path, { ...options, as: "response" });
      if (response.ok) return response;
      const sentence = await sentenceOf(response);
      if (response.status !== UNAUTHORIZED || !(await askForKey(sentence))) throw new Error(sentence);
    }
  }
}

async function sentenceOf(response) {
  try {
    const { error } = await response.json();
    return error.message ?? String(error);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}
