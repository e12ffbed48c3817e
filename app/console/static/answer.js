/** One answer: its status and times, and its outputs, its text as received, or its headers. */

import { html, useState } from "./lib.js";
import { ProblemNotice } from "./problem.js";
import { Result } from "./result.js";
import { stepText } from "./session.js";
import { shortened } from "./tensor.js";

const VIEWS = ["Pretty", "Raw", "Headers"];

/**
 * `run`: `sent` and `image` of the request; `values` or `problem`; `answer`, the HTTP answer, undefined if there was none; for a
 * stream `ending`, a text about its end, and no `answer`.
 * `isStale`: the form has other inputs now.
 */
export function Answer({ pipeline, run, isStale }) {
  const [view, setView] = useState("Pretty");
  const { answer, problem, ending } = run;
  const staleness = isStale && html`<span class="chip">the form has changed since</span>`;
  const outcome = problem ? html`<${ProblemNotice} problem=${problem} />` : html`<${Result} pipeline=${pipeline} ...${run} />`;
  if (ending) return html`<p class="small took">${ending} ${staleness}</p>${outcome}<p class="small code">request ${run.requestId}</p>`;
  if (!answer) return outcome;
  const tab = (name) => html`<button type="button" class="quiet" aria-pressed=${String(view === name)} onClick=${() => setView(name)}>${name}</button>`;
  return html`
    <div class="meta">
      <p class="small took">
        <strong class=${problem ? "chip bad" : "chip good"}>${answer.status}</strong> answered in ${Math.round(answer.tookMs)} ms${stepText(answer)}
        ${staleness}
      </p>
      <p class="views" role="group" aria-label="View">${VIEWS.map(tab)}</p>
    </div>
    ${view === "Pretty" && outcome}
    ${view === "Raw" && html`<pre class="code sent" tabindex="0" aria-label="The answer as received">${shortened(answer.text)}</pre>`}
    ${view === "Headers" && html`<${Headers} answer=${answer} />`}
    <p class="small code">${[`request ${answer.requestId}`, ...timesOf(answer.headers)].join(" · ")}</p>`;
}

function Headers({ answer }) {
  return html`<dl class="headers">${[...answer.headers].map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** Returns the parts of `Server-Timing` as texts. */
function timesOf(headers) {
  const parts = (headers.get("Server-Timing") ?? "").matchAll(/([\w-]+)(?:;desc=([\w-]+))?;dur=([\d.]+)/g);
  return [...parts].map(([, name, step, milliseconds]) => `${name} ${step ? `${step} ` : ""}${Number(milliseconds).toFixed(1)} ms`);
}
