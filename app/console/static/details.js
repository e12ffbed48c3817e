/** The selected part of the graph: a step's configuration, the tensors of a link, or an early exit. */

import { conditionText } from "./drawing.js";
import { html } from "./lib.js";

/** `item`: a box or a link of the drawing. */
export function GraphDetails({ item, onClose }) {
  const [title, content] = item.step ? [item.title, html`<${Step} step=${item.step} />`] : item.tensors?.length ? tensors(item) : item.kind === "order" ? order(item) : exit(item);
  return html`
    <section class="card details" aria-label="Selected: ${title}" aria-live="polite">
      <div class="meta">
        <h2>${title}</h2>
        <button type="button" onClick=${onClose}>Close</button>
      </div>
      ${content}
    </section>
  `;
}

const nameOf = (id) => id.replace(/^(step|exit) /, "");
const shapeText = (shape) => `[${shape.join(", ")}]`;

function order({ from, to }) {
  return [`${nameOf(from)} → ${nameOf(to)}`, html`<p>${nameOf(to)} waits for ${nameOf(from)}: its condition or its order needs it.</p>`];
}

/** `item`: of an exit of steps, with its `conditions`. */
function exit(item) {
  const reason = nameOf(item.to ?? item.id);
  const start = item.from ? `${nameOf(item.from)} can end the request` : "The request can end early";
  const condition = item.conditions?.length ? ` if ${item.conditions.join(" or ")}` : "";
  const rest = item.conditions?.length ? "no later step runs" : "later steps do not run if the exit is an error";
  const text = `${start} with the reason ${reason}${condition}. The answer is then 200 with empty values, and ${rest}.`;
  return [`Early exit: ${reason}`, html`<p>${text}</p>`];
}

function tensors({ from, to, tensors: edges }) {
  const rows = edges.map((edge) => [edge.tensor, edge.datatype, shapeText(edge.shape), edge.from.tensor, edge.to.tensor]);
  const heads = ["tensor", "datatype", "shape", `of ${nameOf(from)}`, `of ${nameOf(to)}`];
  return [`${nameOf(from)} → ${nameOf(to)}`, html`<${Table} heads=${heads} rows=${rows} />`];
}

function Step({ step }) {
  return html`
    <${Model} model=${step} ensemble=${step.ensemble} />
    ${step.calls.map((call) => html`
      <details key=${call.model}>
        <summary>calls ${call.model}</summary>
        <${Model} model=${call} />
      </details>
    `)}
  `;
}

function Model({ model, ensemble }) {
  const facts = [
    ["model", model.model],
    ["version", model.version ?? "latest"],
    ["backend", model.backend],
    ["largest batch", model.max_batch_size || "no batches"],
    ["instances", model.instances],
    ["responses", model.decoupled ? "any number (decoupled)" : "one"],
    ...(ensemble ? [["ensemble", ensemble]] : []),
    ...(model.part_of ? [["part of the step", model.part_of]] : []),
    ...(model.when ? [["condition", conditionText(model.when)]] : []),
    ...(model.after ? [["after", model.after.join(", ")]] : []),
    ...(model.each ? [["each", model.each]] : []),
    ...(model.optional ? [["optional", "yes"]] : []),
  ];
  const rows = [...model.inputs.map((tensor) => row("input", tensor)), ...model.outputs.map((tensor) => row("output", tensor))];
  return html`
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <${Table} heads=${["", "tensor", "datatype", "shape"]} rows=${rows} />
  `;
}

const row = (side, { name, datatype, shape, optional }) => [optional ? `optional ${side}` : side, name, datatype, shapeText(shape)];

function Table({ heads, rows }) {
  return html`
    <div class="table-view" tabindex="0" role="group" aria-label="Tensors">
      <table>
        <thead><tr>${heads.map((head, index) => (head ? html`<th key=${index} scope="col">${head}</th>` : html`<td key=${index}></td>`))}</tr></thead>
        <tbody>${rows.map((cells, index) => html`<tr key=${index}>${cells.map((cell, column) => html`<td key=${column}>${cell}</td>`)}</tr>`)}</tbody>
      </table>
    </div>
  `;
}
