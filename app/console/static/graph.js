/** Draws a pipeline from request to response: its steps, tensors and early exits, and the times of a traced request. */

import { CALL_HEIGHT, drawingOf, REQUEST, RESPONSE } from "./drawing.js";
import { totalOf } from "./explain.js";
import { placed } from "./layout.js";
import { lazy } from "./lazy.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";

const GraphDetails = lazy(async () => (await import("./details.js")).GraphDetails);
const SMALLEST_SCALE = { horizontal: 0.78, vertical: 0.96 }; // on a phone a step is 44 pixels high
const LABELLED_SCALE = 0.88;
const NARROW = 620;

/** `pipeline`: its description. `explain`: an explanation of a request of the pipeline, or null. */
export function Graph({ pipeline, explain = null }) {
  const [node, width] = useWidth();
  const [selected, select] = useState(null);
  const drawing = useMemo(() => drawingOf(pipeline.graph, explain), [pipeline, explain]);
  const drawn = useMemo(() => fitted(drawing, width), [drawing, width]);
  const item = [...drawing.boxes, ...drawing.links].find(({ id }) => id === selected);
  useEffect(() => select(null), [pipeline]);
  const onKey = (event) => event.key === "Escape" && select(null);
  return html`
    <section class="graph" aria-label="Steps" onKeyDown=${onKey}>
      <div class="graph-view" ref=${node} tabindex="0" role="group" aria-label="Graph of the steps">
        <${Drawing} ...${drawn} selected=${item?.id} total=${explain && totalOf(explain)} onSelect=${(id) => select(id === selected ? null : id)} />
      </div>
      ${item && html`<${GraphDetails} item=${item} onClose=${() => select(null)} />`}
    </section>
  `;
}

/** Returns a ref for an element, and the element's width in pixels. */
function useWidth() {
  const node = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(node.current);
    return () => observer.disconnect();
  }, []);
  return [node, width];
}

/** Chooses a direction that fits, with the tensors' names where there is space, and a scale. Wider graphs scroll. */
function fitted({ boxes, links }, width) {
  if (width === 0) return { width: 0, height: 0, scale: 1, boxes: [], links: [] };
  const plain = links.map((link) => ({ ...link, label: null }));
  const isVertical = width < NARROW;
  const smallest = SMALLEST_SCALE[isVertical ? "vertical" : "horizontal"];
  const labelled = placed({ boxes, links }, isVertical);
  const isLabelled = labelled.width * Math.max(LABELLED_SCALE, smallest) <= width;
  const result = isLabelled ? labelled : placed({ boxes, links: plain }, isVertical);
  return { ...result, scale: Math.max(smallest, Math.min(1, width / result.width)) };
}

function Drawing({ width, height, scale, boxes, links, selected, total, onSelect }) {
  const steps = boxes.filter((box) => box.kind === "step").map((box) => box.title);
  return html`
    <svg viewBox="0 0 ${width} ${height}" width=${width * scale} height=${height * scale} role="group" aria-label="From the request: ${steps.join(", then ")}">
      <defs>
        ${["plain", "exit", "selected"].map((name) => html`<${Arrowhead} key=${name} name=${name} />`)}
      </defs>
      ${links.map((link) => html`<${Link} key=${link.id} link=${link} isSelected=${link.id === selected} onSelect=${onSelect} />`)}
      ${boxes.map((box) => html`<${Box} key=${box.id} box=${box} isSelected=${box.id === selected} total=${total} onSelect=${onSelect} />`)}
    </svg>
  `;
}

function Arrowhead({ name }) {
  return html`
    <marker id="arrow-${name}" class="arrow ${name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">
      <path d="M0 0L8 4L0 8Z" />
    </marker>
  `;
}

/** The attributes of an SVG group that works as a button. `label`: null if its text says what it is. */
function button(id, label, isSelected, onSelect) {
  const onKeyDown = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    onSelect(id);
  };
  return { role: "button", tabindex: 0, "aria-label": label, "aria-pressed": isSelected, onClick: () => onSelect(id), onKeyDown };
}

const tensorText = ({ tensor, datatype, shape }) => `${tensor} ${datatype} [${shape.join(", ")}]`;

function Link({ link, isSelected, onSelect }) {
  const arrow = `url(#arrow-${isSelected ? "selected" : link.kind === "exit" ? "exit" : "plain"})`;
  const what = { exit: "early exit", order: "order" }[link.kind] ?? link.tensors.map(tensorText).join(", ");
  const label = [link.label?.text, `${nameOf(link.from)} to ${nameOf(link.to)}: ${what}`].filter(Boolean).join(", ");
  return html`
    <g class="link ${link.kind}" ...${button(link.id, label, isSelected, onSelect)}>
      <path class="hit" d=${link.path} />
      <path class="line" d=${link.path} data-from=${link.from} data-to=${link.to} marker-end=${arrow} />
      ${link.label && html`<${LinkLabel} link=${link} />`}
    </g>
  `;
}

const nameOf = (id) => id.replace(/^(step|exit) /, "");

function LinkLabel({ link: { label, labelX, labelY } }) {
  return html`
    <rect class="label" x=${labelX - label.width / 2} y=${labelY - label.height / 2} width=${label.width} height=${label.height} rx="4" />
    <text class="note" x=${labelX} y=${labelY + 4}>${label.text}</text>
  `;
}

function Box({ box, isSelected, total, onSelect }) {
  const { id, kind, title, note, condition, state, x, y, width, height } = box;
  const isFixed = id === REQUEST || id === RESPONSE;
  const radius = kind === "step" ? 9 : Math.min(height / 2, 20);
  const attributes = isFixed ? {} : button(id, null, isSelected, onSelect);
  return html`
    <g class="node ${kind}" data-state=${state} data-id=${id} ...${attributes}>
      <rect class="box" x=${x} y=${y} width=${width} height=${height} rx=${radius} />
      <text x=${x + width / 2} y=${y + (note ? 20 : height / 2 + 5)}>${title}</text>
      ${note && html`<text class="note" x=${x + width / 2} y=${y + 36}>${note}</text>`}
      ${condition && html`<text class="note condition" x=${x + width / 2} y=${y + 52}>${condition}</text>`}
      ${box.calls.map((call, index) => html`<${Call} key=${index} call=${call} x=${x + 8} y=${y + (condition ? 60 : 44) + index * CALL_HEIGHT} width=${width - 16} />`)}
      ${total && box.ms !== null && html`<${Share} box=${box} share=${box.ms / total} />`}
    </g>
  `;
}

function Call({ call: { model, note, state }, x, y, width }) {
  return html`
    <g class="call" data-state=${state}>
      <rect x=${x} y=${y} width=${width} height=${CALL_HEIGHT - 4} rx="5" />
      <text class="note name" x=${x + 7} y=${y + 13}>${model}</text>
      <text class="note time" x=${x + width - 7} y=${y + 13}>${note}</text>
    </g>
  `;
}

/** A line under a step whose length is the step's share of the request's time. */
function Share({ box: { x, y, width, height }, share }) {
  const length = Math.max(2, (width - 20) * Math.min(1, share));
  return html`<rect class="share" x=${x + 10} y=${y + height - 4} width=${length} height="3" rx="1.5" />`;
}
