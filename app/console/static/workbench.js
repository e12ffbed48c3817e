/** One pipeline: its description, its form and its answer. */

import { Problem, post } from "./api.js";
import { element } from "./dom.js";
import { fieldsOf, valuesOf } from "./form.js";
import { graphOf } from "./graph.js";
import { html, render } from "./lib.js";
import { LiveStream } from "./live.js";
import { problemNode, resultOf } from "./result.js";
import { samplesOf } from "./samples.js";
import { TrySection } from "./try.js";

export class Workbench {
  #pipeline;
  #fields;
  #live = null;
  #buttons;
  #answer = element("div", { class: "answer" }, element("p", { class: "empty" }, "The answer appears here."));

  constructor(pipeline) {
    this.#pipeline = pipeline;
    this.#fields = fieldsOf(pipeline);
    this.#buttons = this.#makeButtons();
    this.node = element("div", {}, this.#heading(), graphOf(pipeline.graph), this.#panels(), this.#tries(), samplesOf(pipeline.samples));
    this.#idle();
  }

  /** Closes the pipeline and cancels its running requests. */
  close() {
    if (this.#live) this.#live.cancel();
  }

  #heading() {
    const { name, description, model, decoupled, streams, early_exit: exits } = this.#pipeline;
    const words = [`model ${model}`, decoupled ? "decoupled" : "", streams ? "streams" : ""].filter(Boolean);
    const chips = [...words, ...exits.map((reason) => `may exit early: ${reason}`)];
    return element(
      "div",
      { class: "heading" },
      element("h1", {}, name),
      element("p", {}, description || ""),
      element("p", { class: "chips" }, ...chips.map((text) => element("span", { class: "chip" }, text))),
    );
  }

  #panels() {
    const { cancel, drop, ...starts } = this.#buttons;
    const form = element("form", { class: "card", "aria-label": "Request" }, element("h2", {}, "Request"));
    form.append(...this.#fields.map((field) => field.node), element("p", { class: "actions" }, ...Object.values(starts)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(event.submitter === this.#buttons.run);
    });
    form.addEventListener("chosen", () => form.requestSubmit(this.#pipeline.streams ? null : this.#buttons.run));
    const whileLive = element("p", { class: "actions" }, cancel, drop);
    const heading = element("div", { class: "answer-heading" }, element("h2", {}, "Answer"), whileLive);
    const answer = element("section", { class: "card", "aria-label": "Answer" }, heading, this.#answer);
    return element("div", { class: "panels" }, form, answer);
  }

  #tries() {
    const node = element("div");
    render(html`<${TrySection} url=${this.#pipeline.url} body=${() => valuesOf(this.#fields)} />`, node);
    return node;
  }

  #makeButtons() {
    const { streams } = this.#pipeline;
    return {
      ...(streams ? { stream: element("button", { class: "primary", id: "stream" }, "Stream") } : {}),
      run: element("button", { class: streams ? "" : "primary", id: "run" }, streams ? "Run at once" : "Run"),
      cancel: element("button", { type: "button", id: "cancel", click: () => this.#live?.cancel() }, "Cancel"),
      drop: element("button", { type: "button", id: "drop", click: () => this.#live?.drop() }, "Lose the connection"),
    };
  }

  #submit(isUnary) {
    this.#busy();
    this.#answer.replaceChildren(element("p", { class: "empty" }, "…"));
    (isUnary || !this.#pipeline.streams ? this.#run() : this.#stream()).catch((error) => this.#failed(error));
  }

  async #run() {
    const sent = valuesOf(this.#fields);
    const { values, tookMs } = await post(this.#pipeline.url, sent);
    const imageUrl = this.#fields.map((field) => field.imageUrl?.()).find(Boolean);
    const took = element("p", { class: "small took" }, `answered in ${Math.round(tookMs)} ms`);
    this.#answer.replaceChildren(await resultOf(this.#pipeline, sent, values, imageUrl), took);
    this.#idle();
  }

  async #stream() {
    const started = performance.now();
    const { values } = await post("/v1/streams", { pipeline: this.#pipeline.name, inputs: valuesOf(this.#fields) });
    this.#live = new LiveStream(this.#pipeline, { url: values.url, started, onEnd: () => this.#idle() });
    this.#answer.replaceChildren(this.#live.node);
    this.#busy();
    this.#live.open();
  }

  #failed(error) {
    const problem = error instanceof Problem ? error : { problem: { title: error.message } };
    this.#answer.replaceChildren(problemNode(problem));
    this.#idle();
  }

  #busy() {
    const { stream, run, cancel, drop } = this.#buttons;
    for (const button of [stream, run]) if (button) button.disabled = true;
    for (const button of [cancel, drop]) button.hidden = this.#live === null;
  }

  #idle() {
    this.#live = null;
    const { stream, run, cancel, drop } = this.#buttons;
    for (const button of [stream, run]) if (button) button.disabled = false;
    for (const button of [cancel, drop]) button.hidden = true;
  }
}
