/** Shows an answer: boxes on the image, scores as bars, texts as text, and the rest as JSON. */

import { element } from "./dom.js";
import { boxesOn } from "./image.js";

const LONGEST_JSON = 600;

/** `imageUrl`: the image in the request, if any. `sent`: the values of the request. */
export async function resultOf(pipeline, sent, values, imageUrl) {
  const nodes = values.early_exit ? [earlyExit(values.early_exit)] : [];
  const boxes = boxOutput(pipeline, values);
  const shown = new Set(["early_exit"]);
  if (boxes && imageUrl) {
    nodes.push(await boxesOn(imageUrl, values[boxes], textsBeside(pipeline, values, boxes)));
    shown.add(boxes);
  }
  for (const output of scoresFirst(pipeline.outputs, values)) {
    if (shown.has(output.name)) continue;
    const labels = labelsOf(pipeline, sent, values, output);
    if (labels?.name) shown.add(labels.name);
    nodes.push(outputOf(output.name, values[output.name], labels?.texts));
  }
  return element("div", { class: "result" }, ...nodes);
}

export function earlyExit(reason) {
  return element(
    "p",
    { class: "notice exit" },
    element("strong", {}, `Early exit: ${reason}`),
    " The pipeline decided that there was nothing more to do. This is an answer, not an error: the same fields, empty.",
  );
}

export function problemNode({ problem }) {
  const { title, detail, code, type, hint, errors, request_id: requestId } = problem;
  const rows = (errors || []).map(({ field, problem: said }) => element("li", {}, element("code", {}, field), " ", said));
  return element(
    "div",
    { class: "notice problem", role: "alert" },
    element("strong", {}, title),
    detail ? element("p", {}, detail) : null,
    rows.length ? element("ul", {}, ...rows) : null,
    hint ? element("p", {}, hint) : null,
    code ? element("p", { class: "small" }, element("a", { href: type }, code), requestId ? ` · request ${requestId}` : "") : null,
  );
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

const isNumbers = (value) => Array.isArray(value) && value.length > 0 && value.every((item) => typeof item === "number");
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

function outputOf(name, value, labels) {
  return element("section", { class: "output", "data-output": name }, element("h3", {}, name), valueOf(value, labels));
}

function valueOf(value, labels) {
  if (labels) return bars(labels, value);
  if (value === null || value === "" || value?.length === 0) return element("p", { class: "empty" }, "empty");
  if (typeof value === "string") return element("p", { class: "text" }, value);
  if (isTexts(value)) return element("ul", {}, ...value.map((text) => element("li", {}, text)));
  return element("pre", { class: "code" }, shortened(value));
}

function bars(labels, numbers) {
  const rows = labels.map((label, index) => {
    const part = Math.max(0, Math.min(1, numbers[index]));
    const bar = element("progress", { max: 1, value: part, "aria-label": label });
    return element("li", {}, element("span", {}, label), bar, element("output", {}, numbers[index].toFixed(3)));
  });
  return element("ul", { class: "bars" }, ...rows);
}

function shortened(value) {
  const text = JSON.stringify(value);
  if (text.length <= LONGEST_JSON) return text;
  const size = Array.isArray(value) ? `${value.length} items` : `${text.length} characters`;
  return `${text.slice(0, LONGEST_JSON)} …\n(${size})`;
}
