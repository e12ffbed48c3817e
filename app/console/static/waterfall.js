/** Where the time of a traced request went: shares of the total, and a line for each phase and each span. */

import { problemIn } from "./api.js";
import { explanationOf, factsOf, msText, percentText, rowsOf, sharesOf, ticksOf, totalOf } from "./explain.js";
import { html, useEffect, useState } from "./lib.js";
import { ProblemNotice } from "./problem.js";
import { explained } from "./runs.js";

const SHARE_NAMES = {
  gateway: "gateway",
  "gateway-queue": "queue of the gateway",
  network: "network",
  queue: "queues of Triton",
  compute: "models",
  other: "rest of Triton",
};
const PHASE_NAMES = { read: "read request", queue: "gateway's queue", triton: "call Triton", respond: "write answer" };
const KIND_NAMES = { step: "", run: "model", bls: "call", ensemble: "ensemble" };
const STATE_NAMES = { failed: "failed", early_exit: "early exit", cancelled: "cancelled" };

/**
 * Fetches and shows the explanation of a request. `graph`: of its pipeline. `explain`: the explanation if it is known;
 * `onFound(explain)` reports it.
 */
export function Explanation({ requestId, graph, explain, onFound }) {
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    if (explain) return;
    explanationOf(requestId).then((answer) => onFound(explained(answer, graph)), (error) => setProblem(problemIn(error)));
  }, [requestId]);
  if (problem) return html`<${ProblemNotice} problem=${problem} />`;
  if (!explain) return html`<p class="empty" role="status">Waiting for Triton's spans…</p>`;
  return html`<${Waterfall} explain=${explain} />`;
}

/** `explain`: an explanation of a request, with its runs. */
export function Waterfall({ explain }) {
  const total = totalOf(explain);
  const ticks = ticksOf(total);
  return html`
    <section class="waterfall" aria-label="Where the time went">
      <h3>Where the time went: ${msText(total)}</h3>
      <${Shares} shares=${sharesOf(explain)} total=${total} />
      <div class="lines" style=${{ "--tick": percent(ticks[1], total) }}>
        <${Axis} ticks=${ticks} total=${total} />
        ${explain.gateway.map((phase) => html`<${Phase} key=${phase.name} phase=${phase} total=${total} sharedWith=${explain.shared_with} />`)}
        ${rowsOf(explain).map((row) => html`<${Span} key=${row.id} row=${row} total=${total} />`)}
        ${explain.steps_skipped.map((name) => html`<p key=${name} class="time-line not-run"><b>${name}</b> skipped</p>`)}
        ${explain.steps_not_run.map((name) => html`<p key=${name} class="time-line not-run"><b>${name}</b> not run</p>`)}
      </div>
      ${!explain.is_complete && html`<p class="small">Some of Triton's spans are missing.</p>`}
      ${explain.notes.map((note) => html`<p key=${note} class="small">${note}</p>`)}
    </section>
  `;
}

/** A bar with the shares of the total, and their names with milliseconds and percent. */
function Shares({ shares, total }) {
  const shown = shares.filter(({ ms }) => ms > 0);
  return html`
    <div class="shares" aria-hidden="true">
      ${shown.map(({ kind, ms }) => html`<span key=${kind} data-kind=${kind} style=${{ flexGrow: ms }}></span>`)}
    </div>
    <ul class="legend">
      ${shown.map(({ kind, ms }) => html`
        <li key=${kind} data-kind=${kind} data-ms=${ms}>${SHARE_NAMES[kind]} <b>${msText(ms)}</b> ${percentText(ms, total)}</li>
      `)}
    </ul>
  `;
}

/** The times of the vertical lines. */
function Axis({ ticks, total }) {
  return html`
    <div class="time-line axis" aria-hidden="true">
      <span class="track">${ticks.map((ms) => html`<span key=${ms} style=${{ left: percent(ms, total) }}>${ms || "0 ms"}</span>`)}</span>
    </div>
  `;
}

/** `sharedWith`: the number of other requests in the same call to Triton. */
function Phase({ phase, total, sharedWith }) {
  const { name: id, start_ms: start, duration_ms: ms } = phase;
  const isShared = id === "triton" && sharedWith > 0;
  const name = html`${PHASE_NAMES[id] ?? id} ${isShared && html`<small>in a batch of ${sharedWith + 1}</small>`}`;
  const facts = [["start", msText(start)], ["end", msText(start + ms)], ...(isShared ? [["requests in the call", sharedWith + 1]] : [])];
  const row = { name, ms, facts };
  return html`<${Line} row=${row} parts=${[{ kind: "gateway", start, ms }]} total=${total} phase=${id} />`;
}

function Span({ row, total }) {
  const kind = [KIND_NAMES[row.kind], row.count > 1 ? `× ${row.count}` : ""].filter(Boolean).join(" ");
  const state = row.kind === "ensemble" ? null : STATE_NAMES[row.state];
  const name = html`${row.name} ${kind && html`<small>${kind}</small>`} ${state && html`<span class="chip">${state}</span>`}`;
  return html`<${Line} row=${{ ...row, name, facts: factsOf(row) }} parts=${[...row.wholes, ...row.parts]} total=${total} span=${row.name} />`;
}

/** One line, and its details after a click. `row`: `name`, `ms`, `facts`, and `depth` and `state` of a span. */
function Line({ row: { name, ms, facts, depth = 0, state }, parts, total, phase, span }) {
  const shown = [...facts, ["share of the request", percentText(ms, total)]];
  return html`
    <details class=${phase ? "phase" : ""} data-phase=${phase} data-span=${span} data-state=${state}>
      <summary class="time-line">
        <span class="name" style=${{ paddingLeft: `${depth * 0.9}rem` }}>${name}</span>
        <span class="track">
          ${parts.map(({ kind, start, ms: width }, index) => html`<span key=${index} data-kind=${kind} style=${{ left: percent(start, total), width: percent(width, total) }}></span>`)}
        </span>
        <span class="ms">${msText(ms)}</span>
      </summary>
      <dl class="facts">${shown.map(([label, text]) => html`<div key=${label}><dt>${label}</dt><dd>${text}</dd></div>`)}</dl>
    </details>
  `;
}

const percent = (ms, total) => `${Math.min(100, Math.max(0, (100 * ms) / total))}%`;
