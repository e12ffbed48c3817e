/** Shows a running stream: its text, time to the first output, tokens per second, and the state of the connection. */

import { remove } from "./api.js";
import { JoinedAnswer } from "./joined.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { EarlyExit, ProblemNotice, reasonOf } from "./problem.js";
import { StreamReader } from "./stream.js";
import { TokenHistogram } from "./token-histogram.js";

const DROP_MS = 2000;
const STATES = { opening: "waiting", live: "live", lost: "lost, resuming…", done: "complete", exit: "early exit" };
const OVER = new Set(["done", "exit", "failed", "cancelled"]);

/**
 * `started`: performance.now() at the start of the request. `onEnd(ending)` is called once: `state`, `outputs` (their number), and
 * `problem` of a stream that failed or `values`, the joined outputs.
 */
export function LiveStream({ pipeline, url, started, onEnd }) {
  const [shown, setShown] = useState({ state: "opening", figures: null, last: null, reason: null, problem: null, times: [] });
  const written = useRef(null);
  const stream = useRef(null);
  useEffect(() => {
    const on = { shown: (changes) => setShown((before) => ({ ...before, ...changes })), end: onEnd, write: (text) => write(written.current, text) };
    const shownStream = (stream.current = new Stream(pipeline, { url, started }, on));
    const stop = () => shownStream.cancel();
    addEventListener("hashchange", stop);
    return () => {
      removeEventListener("hashchange", stop);
      shownStream.leave();
    };
  }, [url]);
  const { state, figures, last, reason, problem, times } = shown;
  return html`
    <div class="result live" data-state=${state}>
      ${!OVER.has(state) && html`<${Controls} stream=${stream} />`}
      <${Figures} unit=${tokensOf(pipeline) ? "tokens" : "outputs"} figures=${figures} connection=${STATES[state] ?? state} />
      <pre class="written" tabindex="0" aria-label="output" ref=${written}></pre>
      ${last && html`<pre class="code">last output: ${JSON.stringify(last)}</pre>`}
      <${TokenHistogram} times_ms=${times} />
      <div role="status">
        ${reason && html`<${EarlyExit} reason=${reason} />`}
        ${problem && html`<${ProblemNotice} problem=${problem} />`}
      </div>
    </div>`;
}

function Controls({ stream }) {
  return html`
    <div class="actions">
      <button type="button" id="cancel" onClick=${() => stream.current.cancel()}>Cancel</button>
      <details class="try">
        <summary class="small">Try</summary>
        <button type="button" class="quiet" id="drop" onClick=${() => stream.current.drop()}>Lose the connection</button>
      </details>
    </div>`;
}

function Figures({ unit, figures, connection }) {
  const first = figures ? `${Math.round(figures.first_ms)} ms` : "–";
  const rate = figures?.rate ? figures.rate.toFixed(1) : "–";
  const cells = { "first output": first, [`${unit}/s`]: rate, [unit]: figures?.units ?? "–", connection };
  const cell = ([name, text]) => html`<div><dt>${name}</dt><dd data-figure=${name.replace(/\W/g, "-")}>${text}</dd></div>`;
  return html`<dl class="figures">${Object.entries(cells).map(cell)}</dl>`;
}

/** Appends to an element, and keeps its end in view if it was. */
function write(element, text) {
  const isAtEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 8;
  element.append(text);
  if (isAtEnd) element.scrollTop = element.scrollHeight;
}

/** Returns the output that holds token ids, if there is one: other lists of numbers are counted as one output. */
function tokensOf({ outputs }) {
  return outputs.find(({ name, datatype, shape }) => /token/i.test(name) && /INT/.test(datatype) && shape.length === 1)?.name;
}

/** One stream, from its first event to its end. */
class Stream {
  #url;
  #on;
  #reader;
  #started;
  #tokens;
  #texts;
  #joined;
  #units = 0;
  #unitsAtFirst = 0;
  #times = [];
  #isOver = false;

  constructor(pipeline, { url, started }, on) {
    this.#url = url;
    this.#on = on;
    this.#started = started;
    this.#tokens = tokensOf(pipeline);
    this.#joined = new JoinedAnswer(pipeline);
    const joined = pipeline.schemas.result.properties;
    this.#texts = pipeline.outputs.filter(({ name }) => joined[name].type === "string").map(({ name }) => name);
    this.#reader = new StreamReader(url, {
      event: (name, data) => this.#event(name, data),
      state: (state) => on.shown({ state }),
      problem: ({ problem }) => this.#end("failed", { problem }),
    });
    this.#reader.open();
  }

  drop() {
    this.#reader.drop(DROP_MS);
  }

  async cancel() {
    this.#reader.close();
    await remove(this.#url).catch(() => undefined);
    this.#end("cancelled");
  }

  /** Cancels a stream that still runs, because the page no longer shows it. */
  leave() {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#reader.close();
    remove(this.#url).catch(() => undefined);
  }

  #event(name, data) {
    if (name === "output") this.#output(data);
    else if (name === "error") this.#end("failed", { problem: data });
    else {
      this.#joined.end(data.early_exit);
      const reason = reasonOf(data.early_exit);
      this.#end(reason ? "exit" : "done", { reason });
    }
  }

  #output(values) {
    this.#times.push(performance.now() - this.#started);
    this.#joined.add(values);
    this.#units += this.#tokens ? (values[this.#tokens]?.length ?? 0) : 1;
    if (this.#times.length === 1) this.#unitsAtFirst = this.#units;
    this.#on.write(this.#texts.length ? this.#texts.map((name) => values[name] ?? "").join("") : `${JSON.stringify(values)}\n`);
    this.#on.shown({ last: values, figures: this.#figures() });
  }

  #figures() {
    const [first, last] = [this.#times[0], this.#times.at(-1)];
    const rate = last > first ? ((this.#units - this.#unitsAtFirst) / (last - first)) * 1000 : 0;
    return { first_ms: first, rate, units: this.#units };
  }

  #end(state, changes = {}) {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#on.shown({ state, times: this.#times.slice(1).map((time, index) => time - this.#times[index]), ...changes });
    const answer = changes.problem ? { problem: changes.problem } : { values: this.#joined.values };
    this.#on.end({ state, outputs: this.#times.length, ...answer });
  }
}
