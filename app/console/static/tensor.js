/** Shows numbers: scores as bars, the highest first if there are many; a long tensor by its shape and statistics. */

import { html, useState } from "./lib.js";

const TOP = 10;
const LONGEST_JSON = 600;

export const isNumbers = (value) => Array.isArray(value) && value.length > 0 && value.every((item) => typeof item === "number");

/** `labels`: a text for each number; without labels, the indexes are shown. */
export function Scores({ labels, numbers }) {
  const [isWhole, setWhole] = useState(false);
  const rows = numbers.map((number, index) => ({ number, label: labels?.[index] ?? `#${index}` }));
  const isLong = rows.length > TOP;
  const sorted = isLong ? rows.toSorted((a, b) => b.number - a.number) : rows;
  const shown = isWhole ? sorted : sorted.slice(0, TOP);
  return html`
    <ul class="bars">${shown.map((row) => html`<${Bar} ...${row} />`)}</ul>
    ${isLong && html`
      <p class="actions">
        <small>${isWhole ? "All" : `The highest ${TOP} of`} ${rows.length}</small>
        <button type="button" class="quiet" aria-expanded=${String(isWhole)} onClick=${() => setWhole(!isWhole)}>${isWhole ? `Show ${TOP}` : "Show all"}</button>
      </p>`}`;
}

function Bar({ label, number }) {
  const part = Math.max(0, Math.min(1, number));
  return html`<li><span>${label}</span><progress max="1" value=${part} aria-label=${label} /><output>${number.toFixed(3)}</output></li>`;
}

/** Nested lists of numbers. A list of floating-point numbers from 0 to 1 is shown as scores. */
export function Tensor({ name, value, isFloat = true }) {
  const numbers = value.flat(Infinity);
  const text = JSON.stringify(value);
  const isScores = isFloat && isNumbers(value) && numbers.every((number) => number >= 0 && number <= 1);
  if (text.length <= LONGEST_JSON && numbers.length <= 16) return isScores ? html`<${Scores} numbers=${value} />` : html`<pre class="code">${text}</pre>`;
  return html`
    <${Statistics} shape=${shapeOf(value)} numbers=${numbers} />
    ${isScores && html`<${Scores} numbers=${value} />`}
    <details><summary class="small">${name} as JSON</summary><pre class="code">${shortened(text)}</pre></details>`;
}

function Statistics({ shape, numbers }) {
  const known = numbers.filter((number) => typeof number === "number");
  const [low, high, sum] = known.reduce(([a, b, c], x) => [Math.min(a, x), Math.max(b, x), c + x], [Infinity, -Infinity, 0]);
  const mean = sum / known.length;
  const deviation = Math.sqrt(known.reduce((total, x) => total + (x - mean) ** 2, 0) / known.length);
  const figures = { shape: `[${shape.join(", ")}]`, minimum: short(low), maximum: short(high), mean: short(mean), deviation: short(deviation) };
  if (known.length < numbers.length) figures.null = numbers.length - known.length;
  return html`<dl class="figures">${Object.entries(figures).map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>`;
}

const short = (number) => (Number.isFinite(number) ? String(Number(number.toPrecision(4))) : "–");
const shapeOf = (value) => (Array.isArray(value) ? [value.length, ...(value.length ? shapeOf(value[0]) : [])] : []);

/** Returns a text without its middle if it is too long to read. */
export function shortened(text, longest = 20_000) {
  return text.length <= longest ? text : `${text.slice(0, longest)} …\n(${text.length} characters)`;
}
