/** What needs attention: pipelines that are not ready, and the findings of the linter. */

import { get } from "./api.js";
import { html, useCallback, useEffect, useState } from "./lib.js";

const ORDER = ["error", "warning", "hint", "unknown"];

/** Asks when it is shown, and again with its button. */
export function Findings() {
  const [state, setState] = useState(null);
  const check = useCallback(() => {
    setState(null);
    stateNow().then(setState, (error) => setState({ problem: error.message }));
  }, []);
  useEffect(check, []);
  return html`
    <div class="findings" role="status" aria-busy=${state === null}>${state === null ? html`<p class="empty">Checking…</p>` : html`<${State} ...${state} />`}</div>
    <p class="actions"><button type="button" onClick=${check} disabled=${state === null}>Check again</button></p>
  `;
}

async function stateNow() {
  const [listed, found] = await Promise.all([get("/v1/pipelines"), get("/v1/findings")]);
  const unready = listed.values.pipelines.filter(({ state }) => state !== "ready");
  const findings = found.values.findings.toSorted((a, b) => ORDER.indexOf(a.severity) - ORDER.indexOf(b.severity));
  return { count: listed.values.pipelines.length, unready, findings };
}

function State({ problem, count, unready, findings }) {
  if (problem) return html`<p class="empty">The models could not be checked: ${problem}</p>`;
  const ready = unready.length ? `${count - unready.length} of ${count} pipelines are ready.` : `All ${count} pipelines are ready.`;
  return html`
    <p>${ready} ${findings.length ? null : "The linter found nothing."}</p>
    <ul class="finding-list">
      ${unready.map(({ name, state, state_detail: detail }) => html`<${Entry} key=${name} severity=${state} where=${name} text=${detail} />`)}
      ${findings.map((each) => html`<${Entry} key=${each.text} severity=${each.severity} where=${whereOf(each)} text=${each.text} code=${each.code} solution=${each.solution} />`)}
    </ul>
  `;
}

function Entry({ severity, where, text, code, solution = "" }) {
  return html`
    <li data-severity=${severity}>
      <p><span class="chip">${severity.replaceAll("_", " ")}</span> <strong>${where}</strong> ${code ? html`<code>${code}</code>` : null}</p>
      <p>${text}</p>
      ${solution && html`<p class="small">${solution.split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part))}</p>`}
    </li>
  `;
}

function whereOf({ pipeline, model, step, tensor }) {
  const parts = [pipeline, pipeline ? null : model, step === null ? null : `step ${step}`, tensor === null ? null : `tensor ${tensor}`];
  return parts.filter(Boolean).join(", ");
}
