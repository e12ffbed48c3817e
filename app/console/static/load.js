/** Sends one request many times, to see durations under load. For development only: the gateway says where it is offered. */

import { requestIn } from "./drafts.js";
import { Histogram, sharePoint } from "./histogram.js";
import { keyHeaders } from "./key.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { Section } from "./operation.js";

export const MAX_REQUESTS = 1000;
export const MAX_AT_ONCE = 32;

/** `pipelines`, `last`: see Operation. Leaving the page stops it. */
export function LoadTest({ pipelines, last }) {
  const [run, setRun] = useState(null);
  const stop = useRef(null);
  useEffect(() => () => stop.current?.abort(), []);
  const names = pipelines.filter(({ state, sessions }) => state === "ready" && !sessions).map(({ name }) => name);
  async function start(event) {
    event.preventDefault();
    const { pipeline, requests, "at-once": atOnce } = event.target.elements;
    const signal = (stop.current = new AbortController()).signal;
    try {
      const { url, body } = await requestIn(pipeline.value);
      await send({ url, body: JSON.stringify(body), count: requests.valueAsNumber, atOnce: atOnce.valueAsNumber, signal, onChange: setRun });
    } catch (error) {
      setRun({ problem: error.message });
    }
  }
  const isRunning = run !== null && !run.problem && !run.isOver;
  return html`
    <${Section} name="load" title="Load test">
      <form class="load" aria-label="Load" onSubmit=${start}>
        <div class="load-fields">
          <label>Pipeline <select name="pipeline" required>${names.map((name) => html`<option selected=${name === last}>${name}</option>`)}</select></label>
          <label>Requests <input type="number" name="requests" min="1" max=${MAX_REQUESTS} defaultValue="100" required /></label>
          <label>At a time <input type="number" name="at-once" min="1" max=${MAX_AT_ONCE} defaultValue="4" required /></label>
          <button class="primary" disabled=${isRunning}>Start</button>
          <button type="button" disabled=${!isRunning} onClick=${() => stop.current.abort()}>Stop</button>
        </div>
        <p class="small">Sends the request that the form of the pipeline has. A browser has at most 6 requests to one HTTP/1.1 server on their way; more wait in the browser, and that wait is not counted.</p>
        ${run === null ? null : run.problem ? html`<p role="alert">${run.problem}</p>` : html`<${Run} run=${run} />`}
      </form>
    <//>`;
}

function Run({ run }) {
  const { count, statuses, durations, seconds, isOver } = run;
  const done = Object.values(statuses).reduce((sum, each) => sum + each, 0);
  const sorted = durations.toSorted((a, b) => a - b);
  const figures = sorted.length ? { p50: sharePoint(sorted, 0.5), p95: sharePoint(sorted, 0.95), p99: sharePoint(sorted, 0.99), slowest: sorted.at(-1) } : {};
  return html`
    <div class="load-run">
      <progress aria-label="Requests that ended" max=${count} value=${done}></progress>
      <p role="status">${isOver ? endOf(done, count) : "Running."} ${Object.entries(statuses).map(([status, n]) => `${status}: ${n}`).join(", ")}</p>
      <dl class="figures">
        <div><dt>requests/s</dt><dd data-load="rate">${seconds > 0 ? (done / seconds).toFixed(1) : "–"}</dd></div>
        ${Object.entries(figures).map(([name, ms]) => html`<div key=${name}><dt>${name}</dt><dd>${ms.toFixed(1)} ms</dd></div>`)}
      </dl>
      ${sorted.length ? html`<${Histogram} values=${durations} label=${`Durations of ${sorted.length} requests`} />` : null}
    </div>
  `;
}

const endOf = (done, count) => (done < count ? `Stopped after ${done} of ${count} requests.` : `${count} requests ended.`);

/** Calls `onChange` with the state of the run: after each batch of answers, and at the end. */
async function send({ url, body, count, atOnce, signal, onChange }) {
  const started = performance.now();
  const statuses = {};
  const timings = new Timings(url);
  let left = count;
  const stateNow = (isOver) => ({ count, statuses: { ...statuses }, durations: timings.durations, seconds: (performance.now() - started) / 1000, isOver });
  const client = async () => {
    while (left > 0 && !signal.aborted) {
      left -= 1;
      const status = await statusOf(url, body, signal);
      if (status !== null) statuses[status] = (statuses[status] ?? 0) + 1;
    }
  };
  const timer = setInterval(() => onChange(stateNow(false)), 250);
  onChange(stateNow(false));
  await Promise.all(Array.from({ length: Math.min(atOnce, count) }, client));
  clearInterval(timer);
  timings.close();
  onChange(stateNow(true));
}

/** The status of the answer, or `no answer`; null if the request was stopped. */
async function statusOf(url, body, signal) {
  try {
    const headers = { "Content-Type": "application/json", Accept: "application/json", ...keyHeaders() };
    const response = await fetch(url, { method: "POST", headers, body, signal });
    await response.arrayBuffer();
    return String(response.status);
  } catch {
    return signal.aborted ? null : "no answer";
  }
}

/** The browser's own times of the requests to an address: from sending a request to the end of its answer. */
class Timings {
  durations = [];
  #observer = new PerformanceObserver((list) => this.#add(list.getEntries()));
  #url;

  constructor(url) {
    this.#url = new URL(url, location.href).href;
    this.#observer.observe({ type: "resource" });
  }

  close() {
    this.#add(this.#observer.takeRecords());
    this.#observer.disconnect();
  }

  #add(entries) {
    const own = entries.filter(({ name, initiatorType, requestStart }) => name === this.#url && initiatorType === "fetch" && requestStart > 0);
    this.durations = [...this.durations, ...own.map(({ requestStart, responseEnd }) => responseEnd - requestStart)];
  }
}
