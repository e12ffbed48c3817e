/** Draws a pipeline's steps from request to response, in columns by their distance from the request. */

import { element, svg } from "./dom.js";

const WIDTH = 150;
const HEIGHT = 46;
const GAP_X = 44;
const GAP_Y = 18;
const BOW = 66;

const isStep = (name) => name !== null;

export function graphOf({ steps, edges }) {
  const links = linksOf(edges);
  const columns = columnsOf(steps, links);
  const rows = Math.max(...columns.map((column) => column.length));
  const places = placesOf(columns, rows);
  const width = columns.length * (WIDTH + GAP_X) - GAP_X + 4;
  const isBowed = links.some((link) => passesBeneath(places.get(link.from), places.get(link.to)));
  const height = rows * (HEIGHT + GAP_Y) - GAP_Y + 4 + (isBowed ? HEIGHT / 2 + 8 : 0);
  const told = steps.map((step) => step.name).join(", then ");
  return element(
    "div",
    { class: "graph", tabindex: 0, role: "region", "aria-label": "Steps" },
    svg(
      "svg",
      { viewBox: `-2 -2 ${width} ${height}`, width, height, role: "img", "aria-label": `From the request: ${told}` },
      ...links.map((link) => arrow(link, places)),
      ...columns.flat().map((node) => box(node, places.get(node.id))),
    ),
  );
}

/** Draws one link for all tensors between the same two steps. */
function linksOf(edges) {
  const links = new Map();
  for (const edge of edges) {
    const from = isStep(edge.from.step) ? edge.from.step : "request";
    const to = isStep(edge.to.step) ? edge.to.step : "response";
    const link = links.get(`${from} ${to}`) ?? { from, to, tensors: [] };
    link.tensors.push(`${edge.tensor} ${edge.datatype} [${edge.shape.join(", ")}]`);
    links.set(`${from} ${to}`, link);
  }
  return [...links.values()];
}

function columnsOf(steps, links) {
  const depth = new Map([["request", 0], ...steps.map((step) => [step.name, 1])]);
  for (let round = 0; round < steps.length; round++) {
    for (const { from, to } of links) {
      if (depth.has(to)) depth.set(to, Math.max(depth.get(to), depth.get(from) + 1));
    }
  }
  const columns = [[{ id: "request", title: "request", edge: true }]];
  for (const step of steps) (columns[depth.get(step.name)] ??= []).push(nodeOf(step));
  columns.push([{ id: "response", title: "response", edge: true }]);
  return columns.filter((column) => column);
}

function nodeOf({ name, backend, decoupled }) {
  return { id: name, title: name, note: [backend, decoupled ? "decoupled" : ""].filter(Boolean).join(" · ") };
}

function placesOf(columns, rows) {
  const places = new Map();
  columns.forEach((column, x) => {
    const top = ((rows - column.length) * (HEIGHT + GAP_Y)) / 2;
    column.forEach((node, y) => places.set(node.id, { x: x * (WIDTH + GAP_X), y: top + y * (HEIGHT + GAP_Y) }));
  });
  return places;
}

/** Whether a straight link would cross the steps in between. */
function passesBeneath(start, end) {
  return end.x - start.x > WIDTH + GAP_X && start.y === end.y;
}

function arrow({ from, to, tensors }, places) {
  const [start, end] = [places.get(from), places.get(to)];
  const [x1, y1, x2, y2] = [start.x + WIDTH, start.y + HEIGHT / 2, end.x, end.y + HEIGHT / 2];
  const middle = (x1 + x2) / 2;
  const path = passesBeneath(start, end)
    ? `M${x1} ${y1}C${x1 + GAP_X} ${y1 + BOW} ${x2 - GAP_X} ${y2 + BOW} ${x2} ${y2}`
    : `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return svg("path", { class: "link", d: path }, svg("title", {}, tensors.join("\n")));
}

function box({ title, note, edge }, { x, y }) {
  const lines = [svg("text", { x: x + WIDTH / 2, y: y + (note ? 20 : 28) }, title)];
  if (note) lines.push(svg("text", { class: "note", x: x + WIDTH / 2, y: y + 36 }, note));
  const shape = { x, y, width: WIDTH, height: HEIGHT, rx: edge ? HEIGHT / 2 : 9 };
  return svg("g", { class: edge ? "node edge" : "node" }, svg("rect", shape), ...lines);
}
