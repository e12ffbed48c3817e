/** Shows a running stream: text, time to the first output, tokens per second, and the state of the connection. */

import { remove } from "./api.js";
import { element } from "./dom.js";
import { earlyExit, problemNode } from "./result.js";
import { StreamReader } from "./stream.js";

const DROP_MS = 2000;
const STATES = { opening: "waiting", live: "live", lost: "lost, resuming…", done: "complete", exit: "early exit" };

export class LiveStream {
  #url;
  #reader;
  #started;
  #firstAt = 0;
  #lastAt = 0;
  #outputs = 0;
  #units = 0;
  #unitsAtFirst = 0;
  #runs;
  #tokens;
  #nodes;

  /** `started`: performance.now() at the start of the request. `onEnd` is called once. */
  constructor(pipeline, { url, started, onEnd }) {
    this.#url = url;
    this.#started = started;
    this.onEnd = onEnd;
    const joined = pipeline.schemas.result.properties;
    this.#runs = pipeline.outputs.filter(({ name }) => joined[name].type === "string").map(({ name }) => name);
    this.#tokens = pipeline.outputs.find(({ kind, shape }) => kind === "number" && shape.length === 1)?.name;
    this.#nodes = this.#build();
    this.node = element("div", { class: "result live" }, ...Object.values(this.#nodes));
    this.#reader = new StreamReader(url, {
      event: (name, data) => this.#event(name, data),
      state: (state) => this.#state(state),
      problem: (problem) => this.#failed(problem),
    });
  }

  open() {
    this.#state("opening");
    this.#reader.open();
  }

  drop() {
    this.#reader.drop(DROP_MS);
  }

  async cancel() {
    this.#reader.close();
    await remove(this.#url).catch(() => undefined);
    this.#end("cancelled", "cancelled");
  }

  #build() {
    const unit = this.#tokens ? "tokens/s" : "outputs/s";
    const figures = ["first output", unit, this.#tokens ? "tokens" : "outputs", "connection"];
    const cells = figures.map((name) =>
      element("div", {}, element("dt", {}, name), element("dd", { "data-figure": name.replace(/\W/g, "-") }, "–")),
    );
    return {
      figures: element("dl", { class: "figures" }, ...cells),
      text: element("pre", { class: "written", tabindex: 0, "aria-label": "output" }),
      last: element("pre", { class: "code", hidden: true }),
      ending: element("div", { role: "status" }),
    };
  }

  #event(name, data) {
    if (name === "output") this.#output(data);
    else if (name === "error") this.#failed({ problem: data });
    else this.#done(data);
  }

  #output(values) {
    const now = performance.now();
    this.#outputs += 1;
    this.#units += this.#tokens ? (values[this.#tokens]?.length ?? 0) : 1;
    if (!this.#firstAt) [this.#firstAt, this.#unitsAtFirst] = [now, this.#units];
    this.#lastAt = now;
    this.#append(values);
    this.#measure();
  }

  #append(values) {
    const { text, last } = this.#nodes;
    const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
    if (this.#runs.length) text.append(this.#runs.map((name) => values[name] ?? "").join(""));
    else text.append(`${JSON.stringify(values)}\n`);
    if (isAtEnd) text.scrollTop = text.scrollHeight;
    last.textContent = `last output: ${JSON.stringify(values)}`;
    last.hidden = false;
  }

  #measure() {
    const [first, rate, count] = this.#nodes.figures.querySelectorAll("dd");
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    first.textContent = `${Math.round(this.#firstAt - this.#started)} ms`;
    rate.textContent = seconds > 0 ? ((this.#units - this.#unitsAtFirst) / seconds).toFixed(1) : "–";
    count.textContent = String(this.#units);
  }

  #state(state, text = STATES[state]) {
    const cell = this.#nodes.figures.querySelector("[data-figure=connection]");
    cell.textContent = text;
    this.node.dataset.state = state;
  }

  #done({ early_exit: reason }) {
    if (reason) this.#nodes.ending.append(earlyExit(reason));
    this.#end(reason ? "exit" : "done");
  }

  #failed(problem) {
    this.#nodes.ending.append(problemNode(problem));
    this.#end("failed", "failed");
  }

  #end(state, text) {
    this.#state(state, text);
    this.onEnd();
  }
}
