/** What each pipeline does now: requests a second, durations, errors, early exits and running work. */

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { History } from "./statistics.js";

const POLL_MS = 2000;
const POLLS = 61;
const SPAN_S = ((POLLS - 1) * POLL_MS) / 1000;

/** Asks the gateway while it is shown, and while the tab is visible. */
export function LivePanel() {
  const { times, rows, problem } = usePolls();
  if (problem) return html`<p class="empty" role="status">The statistics are not available: ${problem}</p>`;
  if (times.length === 0) return html`<p class="empty">Measuring…</p>`;
  if (rows.length === 0) return html`<p class="empty">No pipeline has had a request since the start of the gateway.</p>`;
  const busy = rows.filter((row) => !isIdle(row));
  const idle = rows.filter(isIdle);
  return html`
    ${busy.length > 0 ? html`<${Rows} rows=${busy} times=${times} />` : html`<p class="empty">No request in this time.</p>`}
    ${idle.length > 0 && html`
      <details class="idle">
        <summary class="small">${idle.length} idle: ${idle.map(nameOf).join(", ")}</summary>
        <${Rows} rows=${idle} times=${times} />
      </details>`}
    <p class="small">
      Since this page was opened, at most two minutes, of all callers. Lines: <span class="line accent">requests, p50</span>, <span class="line exit">early exits</span>,
      ${" "}<span class="line bad">errors</span>, <span class="line">p95</span>. Percentiles are estimates from the last ten seconds.
    </p>
  `;
}

const isIdle = ({ rate, running, waiting }) => running === 0 && waiting === 0 && rate.every((each) => each === 0);
const nameOf = ({ name, transport }) => (transport === "stream" ? `${name} (streams)` : name);

function Rows({ rows, times }) {
  return html`<ul class="live-rows">${rows.map((row) => html`<${Row} key=${`${row.name} ${row.transport}`} row=${row} times=${times} />`)}</ul>`;
}

function usePolls() {
  const history = useRef(null);
  history.current ??= new History(POLLS);
  const [state, setState] = useState({ times: [], rows: [], problem: "" });
  useEffect(() => {
    let timer = 0;
    let isShown = true;
    async function poll() {
      if (!document.hidden) {
        const next = await askedOnce(history.current);
        if (isShown) setState(next);
      }
      if (isShown) timer = setTimeout(poll, POLL_MS);
    }
    poll();
    return () => {
      isShown = false;
      clearTimeout(timer);
    };
  }, []);
  return state;
}

async function askedOnce(history) {
  try {
    history.add((await get("/v1/statistics")).values);
    return { times: history.times, rows: history.rows, problem: "" };
  } catch (error) {
    return { times: [], rows: [], problem: error.message };
  }
}

function Row({ row, times }) {
  const { name, transport, rate, errors, exits, p50, p95, outcomes, running, waiting } = row;
  const failed = Object.entries(outcomes).filter(([outcome]) => outcome !== "ok" && outcome !== "early_exit");
  const rates = [
    { values: rate, colour: "--accent", isFilled: true },
    { values: drawn(exits), colour: "--exit" },
    { values: drawn(errors), colour: "--bad" },
  ];
  const durations = [
    { values: p95, colour: "--quiet" },
    { values: p50, colour: "--accent" },
  ];
  const now = perSecond(rate.at(-1));
  const [half, most] = [milliseconds(lastOf(p50)), milliseconds(lastOf(p95))];
  return html`
    <li class="live-row" data-row=${`${name} ${transport}`}>
      <h3>${name}${transport === "stream" ? html` <small>streams</small>` : null}</h3>
      <div class="live-chart">
        <p><strong data-live="rate">${now}</strong> <small>requests/s</small></p>
        <${Chart} times=${times} lines=${rates} spanS=${SPAN_S} textOf=${short} label=${`Requests a second of ${name}: now ${now}`} />
      </div>
      <div class="live-chart">
        <p><strong data-live="p50">${half}</strong> <small>p50</small> <strong data-live="p95">${most}</strong> <small>p95</small></p>
        <${Chart} times=${times} lines=${durations} spanS=${SPAN_S} textOf=${milliseconds} label=${`Durations of ${name}: p50 ${half}, p95 ${most}`} />
      </div>
      <dl class="live-counts">
        <${Count} name="errors" value=${sum(failed)} state=${failed.length ? "bad" : ""} note=${listed(failed)} />
        <${Count} name="early exits" value=${outcomes.early_exit ?? 0} state=${outcomes.early_exit ? "exit" : ""} />
        <${Count} name=${transport === "stream" ? "active streams" : "running"} value=${running} />
        <${Count} name="waiting" value=${waiting} />
      </dl>
    </li>
  `;
}

const Count = ({ name, value, state = "", note = "" }) =>
  html`<div title=${note}><dt>${name}</dt><dd class=${state} data-live=${name.replace(" ", "-")}>${value}</dd></div>`;

/** A line that would lie on the axis all the time is not drawn. */
const drawn = (values) => (values.some((value) => value > 0) ? values : values.map(() => null));

const sum = (counts) => counts.reduce((total, [, count]) => total + count, 0);
const listed = (counts) => counts.map(([outcome, count]) => `${outcome}: ${count}`).join(", ");
const perSecond = (rate) => (rate >= 10 || rate === 0 ? rate.toFixed(0) : rate.toFixed(1));

const short = (value) => String(Number(value.toPrecision(2)));

/** The last percentile with requests, so that the number does not vanish in a pause. */
const lastOf = (values) => values.findLast((value) => value !== null) ?? null;

export function milliseconds(seconds) {
  if (seconds === null) return "–";
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  return seconds >= 1 ? `${seconds.toFixed(1)} s` : `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}
