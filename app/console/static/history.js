/** The latest requests of a pipeline, to show again, to run again, and to compare. */

import { differences } from "./differences.js";
import { html, useState } from "./lib.js";
import { reasonOf } from "./problem.js";
import { stepText } from "./session.js";

/** `fields`: those of the pipeline. `runs`: the newest first; `shown`: one of them, or null. `onShow(run)`, `onRerun(run)`. */
export function History({ fields, runs, shown, onShow, onRerun }) {
  const [compared, setCompared] = useState(null);
  if (!runs.length) return null;
  const other = runs.includes(compared) && compared !== shown ? compared : null;
  return html`
    <details class="history">
      <summary>History (${runs.length})</summary>
      <ol reversed>
        ${runs.map((run) => html`
          <li key=${run.id} aria-current=${run === shown ? "true" : null}>
            <span class="small">${run.at.toLocaleTimeString()} · ${labelOf(run)}</span>
            <span class="code summary"><${Thumbnails} fields=${fields} draft=${run.draft} />${summaryOf(fields, run)}</span>
            <span class="actions">
              <button type="button" class="quiet" onClick=${() => onShow(run)}>Show</button>
              <button type="button" class="quiet" onClick=${() => onRerun(run)}>Run again</button>
              ${shown && run !== shown && html`<button type="button" class="quiet" onClick=${() => setCompared(run)}>Compare</button>`}
            </span>
          </li>`)}
      </ol>
      ${other && shown && html`<${Comparison} before=${other} after=${shown} />`}
    </details>`;
}

function Thumbnails({ fields, draft }) {
  const images = fields.filter(({ name, input }) => input?.kind === "image" && draft[name]);
  return images.map(({ name }) => html`<img key=${name} class="thumbnail" src=${draft[name].url} alt="" />`);
}

function Comparison({ before, after }) {
  const parts = { request: differences(before.sent, after.sent), answer: differences(bodyOf(before), bodyOf(after)) };
  const rows = Object.entries(parts).flatMap(([part, found]) => found.map((each) => ({ part, ...each })));
  if (!rows.length) return html`<p class="small" role="status">No difference between ${time(before)} and ${time(after)}.</p>`;
  return html`
    <div class="compared" role="status" tabindex="0">
      <table>
        <caption class="small">Differences</caption>
        <thead><tr><th>value</th><th>${time(before)}</th><th>${time(after)}, shown</th></tr></thead>
        <tbody>${rows.map(({ part, path, before: was, after: is }) => html`<tr><th>${part} ${path}</th><td>${short(was)}</td><td>${short(is)}</td></tr>`)}</tbody>
      </table>
    </div>`;
}

const bodyOf = ({ values, problem }) => values ?? problem;
const time = ({ at }) => at.toLocaleTimeString();
const labelOf = ({ answer, problem, values, ending }) =>
  ending ?? (answer ? `${answer.status} · ${Math.round(answer.tookMs)} ms${stepText(answer)}${reasonOf(values?.early_exit) ? ` · early exit: ${reasonOf(values.early_exit)}` : ""}` : problem.title);

/** A file is shown by its name. */
function summaryOf(fields, { sent, draft }) {
  const names = new Map(fields.filter(({ control }) => control === "file").map(({ name }) => [name, draft[name]?.name]));
  return short(Object.entries(sent).map(([name, value]) => `${name}: ${short(names.get(name) ?? value, 40)}`).join(", "), 120);
}

function short(value, longest = 80) {
  const text = typeof value === "string" ? value : value === undefined ? "–" : JSON.stringify(value);
  return text.length <= longest ? text : `${text.slice(0, longest)}…`;
}
