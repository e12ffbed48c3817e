/** Shows the outputs of an answer: boxes on the image, scores as bars, images as images, texts as text, and the rest as JSON. */

import { BoxedImage, cornersOf, imageUrlOf } from "./image.js";
import { html } from "./lib.js";
import { Description, EarlyExit, reasonOf } from "./problem.js";
import { Scores, Tensor, isNumbers, shortened } from "./tensor.js";

/** `sent`: the values of the request. `image`: the decoded image of the request, if it has one. */
export function Result({ pipeline, sent, values, image }) {
  const boxes = image && boxesIn(pipeline, values, image);
  const labels = new Map(pipeline.outputs.map((output) => [output, labelsOf(pipeline, sent, values, output)]));
  const hidden = new Set([...labels.values()].map((each) => each?.name));
  const shown = pipeline.outputs.filter(({ name }) => !hidden.has(name));
  const drawn = boxes && { image, boxes: boxes.corners, texts: textsBeside(pipeline, values, boxes) };
  return html`
    <div class="result">
      ${reasonOf(values.early_exit) && html`<${EarlyExit} reason=${reasonOf(values.early_exit)} />`}
      ${shown.map((output) => html`
        <${Output} key=${output.name} output=${output} value=${values[output.name]} labels=${labels.get(output)?.texts} drawn=${output.name === boxes?.name && drawn} />`)}
    </div>`;
}

function Output({ output, value, labels, drawn }) {
  const { name, kind, description, datatype } = output;
  const shown = drawn ? html`<${BoxedImage} ...${drawn} />` : html`<${Value} name=${name} kind=${kind} datatype=${datatype} value=${value} labels=${labels} />`;
  return html`<section class="output" data-output=${name}><h3>${name}</h3><${Description} id=${`output-${name}`} text=${description} />${shown}</section>`;
}

function Value({ name, kind, datatype, value, labels }) {
  if (labels) return html`<${Scores} labels=${labels} numbers=${value} />`;
  if (value === null || value === "" || value?.length === 0) return html`<p class="empty">empty</p>`;
  if (typeof value === "string" && (kind === "image" || kind === "binary")) return html`<${Bytes} name=${name} base64=${value} />`;
  if (typeof value === "string") return html`<p class="text">${value}</p>`;
  if (isTexts(value)) return html`<ul>${value.map((text) => html`<li>${text}</li>`)}</ul>`;
  if (Array.isArray(value) && kind === "number") return html`<${Tensor} name=${name} value=${value} isFloat=${isFloat({ datatype })} />`;
  return html`<pre class="code">${shortened(JSON.stringify(value, null, kind === "json" ? 2 : 0))}</pre>`;
}

function Bytes({ name, base64 }) {
  const url = imageUrlOf(base64);
  const bytes = Math.floor((base64.replace(/=+$/, "").length * 3) / 4);
  return html`
    ${url && html`<img class="shown" src=${url} alt=${`the output ${name}`} />`}
    <p class="small">${bytes} bytes · <a download=${name} href=${url ?? `data:application/octet-stream;base64,${base64}`}>Save</a></p>`;
}

/** Returns the output with boxes on the image, as `{name, corners}`, or null. */
function boxesIn({ outputs }, values, image) {
  for (const output of outputs) {
    const corners = cornersOf(output, values[output.name], image);
    if (corners) return { name: output.name, corners };
  }
  return null;
}

/** Returns a text for each box: those of an output with as many, and else the index, as at a score without a label. */
function textsBeside({ outputs }, values, { corners }) {
  const found = outputs.find(({ name, kind }) => kind === "text" && Array.isArray(values[name]) && values[name].length === corners.length);
  return found ? values[found.name] : corners.map((_, index) => `#${index}`);
}

const isFloat = ({ datatype }) => /^(FP|BF)/.test(datatype);
const isTexts = (value) => Array.isArray(value) && value.length > 0 && value.every((item) => typeof item === "string");

/** Returns texts of the answer or the request that label a list of floating-point numbers one by one. */
function labelsOf(pipeline, sent, values, output) {
  const numbers = values[output.name];
  if (!isNumbers(numbers) || !isFloat(output)) return null;
  const fits = (texts) => isTexts(texts) && texts.length === numbers.length;
  const own = pipeline.outputs.find(({ name }) => fits(values[name]));
  if (own) return { name: own.name, texts: values[own.name] };
  const input = pipeline.inputs.find(({ name, default: initial }) => fits(sent[name] ?? initial));
  return input ? { texts: sent[input.name] ?? input.default } : null;
}
