/** The form of a pipeline: one control for each field, with its type, shape, range and unit, and its error. */

import { filled } from "./fields.js";
import { FileField } from "./file-field.js";
import { html } from "./lib.js";
import { Description, FieldError } from "./problem.js";

const FILLS = ["zeros", "ones", "counting", "random"];

/** `draft`: what the controls hold. `errors`: text by field name. `onChange(name, held)`. */
export function Fields({ fields, draft, errors, onChange }) {
  return fields.map((field) => {
    const { name, control } = field;
    const change = (held) => onChange(name, held);
    const Shown = control === "file" ? FileField : Field;
    return html`<${Shown} key=${name} field=${field} held=${draft[name]} error=${errors[name]} onChange=${change} />`;
  });
}

function Field({ field, held, error, onChange }) {
  const id = field.id ?? `field-${field.name}`;
  const common = {
    id,
    name: field.name,
    required: field.isRequired && field.control !== "toggle",
    "aria-describedby": [`${id}-note`, field.description && `${id}-description`, error && `${id}-error`].filter(Boolean).join(" "),
    "aria-invalid": error ? "true" : null,
    onInput: ({ currentTarget }) => onChange(field.control === "toggle" ? currentTarget.checked : currentTarget.value),
  };
  return html`
    <div class="field">
      <span class="name"><label for=${id}>${field.name}</label><small id=${`${id}-note`}>${field.note}</small></span>
      <${Description} id=${id} text=${field.description} />
      ${controlFor(field, held, common)}
      ${field.control === "tensor" && html`<${Fill} field=${field} onChange=${onChange} />`}
      <${FieldError} id=${id} error=${error} />
    </div>`;
}

function controlFor({ control, schema, isRequired }, held, common) {
  switch (control) {
    case "toggle":
      return html`<input type="checkbox" checked=${held} ...${common} />`;
    case "number":
      return html`<input type="number" inputmode="decimal" value=${held} ...${boundsOf(schema)} ...${common} />`;
    case "choice":
      return html`
        <select value=${held} ...${common}>
          ${!isRequired && html`<option value=""></option>`}
          ${schema.enum.map((value) => html`<option value=${JSON.stringify(value)}>${String(value)}</option>`)}
        </select>`;
    default:
      return html`<textarea rows=${rowsOf(held)} class=${control === "text" ? null : "code"} spellcheck="false" value=${held} ...${common} />`;
  }
}

const rowsOf = (held) => Math.min(9, Math.max(3, held.split("\n").length));

function boundsOf({ minimum, maximum, type }) {
  const isExact = Number.isSafeInteger(minimum ?? 0) && Number.isSafeInteger(maximum ?? 0);
  return { step: type === "integer" ? 1 : "any", ...(isExact ? { min: minimum, max: maximum } : {}) };
}

function Fill({ field, onChange }) {
  const fill = (name) => html`<button type="button" onClick=${() => onChange(filled(field, name))}>${name}</button>`;
  return html`<p class="fills" role="group" aria-label=${`Fill ${field.name} with`}><small>fill with</small>${FILLS.map(fill)}</p>`;
}
