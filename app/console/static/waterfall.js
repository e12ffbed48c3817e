/** Where the time of a traced request went: shares of the total, and a line for each phase and each span. */

import { problemIn } from "./api.js";
import { digits, explanationOf, msText, rowsOf, sharesOf, timeIn, totalOf, waitingOf } from "./explain.js";
import { html, useEffect, useState } from "./lib.js";
import { ProblemNotice } from "./problem.js";

const SHARE_NAMES = {
  gateway: "gateway",
  "gateway-queue": "queue of the gateway",
  network: "network",
  queue: "queues of Triton",
  compute: "models",
  other: "rest of Triton",
};
const PHASE_NAMES = { read: "read request", queue: "gateway's queue", triton: "call Triton", respond: "write answer" };
const KIND_NAMES = { step: "", bls: "call", ensemble: "ensemble" };
const STATE_NAMES = { failed: "failed", early_exit: "early exit" };

/** Fetches and shows the explanation of a request. `explain`: the explanation if it is known; `onFound(explain)` reports it. */
export function Explanation({ requestId, explain, onFound }) {
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    if (!explain) explanationOf(requestId).then(onFound, (error) => setProblem(problemIn(error)));
  }, [requestId]);
  if (problem) return html`<${ProblemNotice} problem=${problem} />`;
  if (!explain) return html`<p class="empty" role="status">Waiting for Triton's spans…</p>`;
  return html`<${Waterfall} explain=${explain} />`;
}

/** `explain`: an explanation of a request. */
export function Waterfall({ explain }) {
  const total = totalOf(explain);
  const rows = rowsOf(explain);
  return html`
    <section class="waterfall" aria-label="Where the time went">
      <h3>Where the time went: ${msText(total)}</h3>
      <${Shares} shares=${sharesOf(explain)} total=${total} />
      <div class="table-view" tabindex="0" role="group" aria-label="Phases and steps">
        <table>
          <thead>
            <tr>
              <th scope="col">phase or step</th>
              <th scope="col" class="when">time</th>
              <th scope="col">total ms</th>
              <th scope="col">queue</th>
              <th scope="col">compute</th>
              <th scope="col">waiting</th>
            </tr>
          </thead>
          <tbody>
            ${explain.gateway.map((phase) => html`<${Phase} key=${phase.name} phase=${phase} total=${total} />`)}
            ${rows.map((row) => html`<${Span} key=${row.id} row=${row} total=${total} />`)}
            ${explain.steps_not_run.map((name) => html`<tr key=${name} class="not-run"><th scope="row">${name}</th><td class="when"></td><td colspan="4">not run</td></tr>`)}
          </tbody>
        </table>
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
        <li key=${kind} data-kind=${kind} data-ms=${ms}>${SHARE_NAMES[kind]} <b>${msText(ms)}</b> ${Math.round((100 * ms) / total)} %</li>
      `)}
    </ul>
  `;
}

function Phase({ phase, total }) {
  return html`
    <tr class="phase" data-phase=${phase.name}>
      <th scope="row">${PHASE_NAMES[phase.name] ?? phase.name}</th>
      <${Line} parts=${[{ kind: "gateway", start: phase.start_ms, ms: phase.duration_ms }]} total=${total} />
      <td>${digits(phase.duration_ms)}</td>
      <td></td>
      <td></td>
      <td></td>
    </tr>
  `;
}

function Span({ row, total }) {
  const kind = [KIND_NAMES[row.kind], row.count > 1 ? `× ${row.count}` : ""].filter(Boolean).join(" ");
  const state = row.kind === "ensemble" ? null : STATE_NAMES[row.state];
  return html`
    <tr data-state=${row.state} data-span=${row.name}>
      <th scope="row" style=${{ paddingLeft: `${0.5 + row.depth * 0.9}rem` }}>
        ${row.name} ${kind && html`<small>${kind}</small>`} ${state && html`<span class="chip">${state}</span>`}
      </th>
      <${Line} parts=${[...row.wholes, ...row.parts]} total=${total} />
      <td>${digits(row.ms)}</td>
      <td>${digits(timeIn(row, "queue"))}</td>
      <td>${digits(timeIn(row, "compute"))}</td>
      <td>${digits(waitingOf(row))}</td>
    </tr>
  `;
}

function Line({ parts, total }) {
  const percent = (ms) => `${Math.min(100, Math.max(0, (100 * ms) / total))}%`;
  return html`
    <td class="when">
      <div class="track">
        ${parts.map(({ kind, start, ms }, index) => html`<span key=${index} data-kind=${kind} style=${{ left: percent(start), width: percent(ms) }}></span>`)}
      </div>
    </td>
  `;
}
