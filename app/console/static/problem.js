/** What went wrong, and where: an error with its remedy, the error of a field; the notice of an early exit; and the description of a field. */

import { html } from "./lib.js";

export function ProblemNotice({ problem }) {
  const { title, detail, code, type, hint, errors, request_id: requestId } = problem;
  const rows = (errors || []).map(({ field, problem: said }) => html`<li><code>${field}</code> ${said}</li>`);
  return html`
    <div class="notice problem" role="alert">
      <strong>${title}</strong>
      ${detail && html`<p>${detail}</p>`}
      ${rows.length > 0 && html`<ul>${rows}</ul>`}
      ${hint && html`<p>${hint}</p>`}
      ${code && html`<p class="small"><a href=${type}>${code}</a>${requestId ? ` · request ${requestId}` : ""}</p>`}
    </div>`;
}

/** `exit`: a reason or null; of a batch, a list with one for each item. */
export const reasonOf = (exit) => (Array.isArray(exit) ? [...new Set(exit.filter(Boolean))].join(", ") : exit) || null;

export function EarlyExit({ reason }) {
  return html`
    <p class="notice exit">
      <strong>Early exit: ${reason}</strong>${" "}
      The pipeline decided that there was nothing more to do. This is an answer, not an error: the same fields, empty.
    </p>`;
}

export function Description({ id, text }) {
  return text ? html`<p class="small" id=${`${id}-description`}>${text}</p>` : null;
}

export function FieldError({ id, error }) {
  return error ? html`<p class="field-error" id=${`${id}-error`}>${error}</p>` : null;
}
