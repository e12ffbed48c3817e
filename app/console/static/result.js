/** Shows the outputs of an answer: boxes on the image, scores as bars, images as images, texts as text, and the rest as JSON. */

import { BoxedImage, imageUrlOf } from "./image.js";
import { html } from "./lib.js";
import { Description, EarlyExit, reasonOf } from "./problem.js";
import { Scores, Tensor, isNumbers, shortened } from "./tensor.js";

/** `sent`: the values of the request. `image`: the decoded image of the request, if it has one. */
export function Result({ pipeline, sent, values, image }) {
  const boxes = image && boxOutput(pipeline, values);
  const hidden = new Set(boxes ? [boxes] : []);
  const outputs = [];
  for (const output of scoresFirst(pipeline.outputs, values)) {
    if (hidden.has(output.name)) continue;
    const labels = labelsOf(pipeline, sent, values, output);
    if (labels?.name) hidden.add(labels.name);
    outputs.push(html`<${Output} key=${output.name} output=${output} value=${values[output.name]} labels=${labels?.texts} />`);
  }
  return html`
    <div class="result">
      ${reasonOf(values.early_exit) && html`<${EarlyExit} reason=${reasonOf(values.early_exit)} />`}
      ${boxes && html`<${BoxedImage} image=${image} boxes=${values[boxes]} texts=${textsBeside(pipeline, values, boxes)} />`}
      ${outputs}
    </div>`;
}

function Output({ output, value, labels }) {
  const { name, kind, description } = output;
  return html`<section class="output" data-output=${name}><h3>${name}</h3><${Description} id=${`output-${name}`} text=${description} /><${Value} name=${name} kind=${kind} value=${value} labels=${labels} /></section>`;
}

function Value({ name, kind, value, labels }) {
  if (labels) return html`<${Scores} labels=${labels} numbers=${value} />`;
  if (value === null || value === "" || value?.length === 0) return html`<p class="empty">empty</p>`;
  if (typeof value === "string" && (kind === "image" || kind === "binary")) return html`<${Bytes} name=${name} base64=${value} />`;
  if (typeof value === "string") return html`<p class="text">${value}</p>`;
  if (isTexts(value)) return html`<ul>${value.map((text) => html`<li>${text}</li>`)}</ul>`;
  if (Array.isArray(value) && kind === "number") return html`<${Tensor} name=${name} value=${value} />`;
  return html`<pre class="code">${shortened(JSON.stringify(value, null, kind === "json" ? 2 : 0))}</pre>`;
}

function Bytes({ name, base64 }) {
  const url = imageUrlOf(base64);
  const bytes = Math.floor((base64.replace(/=+$/, "").length * 3) / 4);
  return html`
    ${url && html`<img class="shown" src=${url} alt=${`the output ${name}`} />`}
    <p class="small">${bytes} bytes · <a download=${name} href=${url ?? `data:application/octet-stream;base64,${base64}`}>Save</a></p>`;
}

/** Returns the output whose items are boxes of four points, if it has any. */
function boxOutput(pipeline, values) {
  const found = pipeline.outputs.find(({ kind, shape }) => kind === "number" && shape.slice(-2).join() === "4,2");
  return found && values[found.name]?.length ? found.name : null;
}

function textsBeside(pipeline, values, boxes) {
  const found = pipeline.outputs.find(
    ({ name, kind }) => kind === "text" && Array.isArray(values[name]) && values[name].length === values[boxes].length,
  );
  return found ? values[found.name] : [];
}

const isTexts = (value) => Array.isArray(value) && value.length > 0 && value.every((item) => typeof item === "string");

/** Shows scores first, because their labels are texts that must not be shown again. */
function scoresFirst(outputs, values) {
  const bare = outputs.filter(({ name }) => !Array.isArray(values[name]));
  const scores = outputs.filter(({ name }) => isNumbers(values[name]));
  return [...new Set([...bare, ...scores, ...outputs])];
}

/** Returns texts of the answer or the request that label a list of numbers one by one. */
function labelsOf(pipeline, sent, values, output) {
  const numbers = values[output.name];
  if (!isNumbers(numbers)) return null;
  const fits = (texts) => isTexts(texts) && texts.length === numbers.length;
  const own = pipeline.outputs.find(({ name }) => fits(values[name]));
  if (own) return { name: own.name, texts: values[own.name] };
  const input = pipeline.inputs.find(({ name, default: initial }) => fits(sent[name] ?? initial));
  return input ? { texts: sent[input.name] ?? input.default } : null;
}
