/**
 * Places boxes in ranks with dagre, and routes the links between them so that no link crosses a box.
 *
 * Boxes lie in zones, one for each rank. dagre reserves a place in each zone that a long link passes. A link passes a
 * zone straight at that place, and bends only in the gaps between zones, where no box lies.
 */

import { Graph, layout } from "./vendor/dagre.js";

const RANK_GAP = 46;
const BOX_GAP = 20;
const LINK_GAP = 14;
const MARGIN = 4;
const PAD = 5;

/**
 * Returns `{ width, height, boxes, links }` with the boxes' `x`, `y` (top left), the links' `path` (of an SVG path)
 * and, for links with a label, the label's center as `labelX`, `labelY`.
 *
 * `boxes`: `{ id, width, height }`. `links`: `{ id, from, to, label: { width, height } | null }`. `isVertical`: whether ranks
 * follow each other from top to bottom.
 */
export function placed({ boxes, links }, isVertical) {
  const graph = new Graph({ multigraph: true });
  graph.setGraph({
    rankdir: isVertical ? "TB" : "LR",
    ranksep: RANK_GAP,
    nodesep: BOX_GAP,
    edgesep: LINK_GAP,
    marginx: MARGIN,
    marginy: MARGIN,
  });
  for (const { id, width, height } of boxes) graph.setNode(id, { width, height });
  for (const { id, from, to, label } of links) {
    graph.setEdge(from, to, { width: 0, height: 0, labelpos: "c", ...label }, id);
  }
  layout(graph);
  const { width, height } = moved(graph);
  const axis = isVertical ? VERTICAL : HORIZONTAL;
  const zones = zonesOf(graph, axis);
  return {
    width,
    height,
    boxes: boxes.map((box) => ({ ...box, ...cornerOf(graph.node(box.id)) })),
    links: links.map((link) => routed(link, graph, zones, axis)),
  };
}

/** Moves everything into view, because dagre ignores the links' bends when it sets the origin. Returns the size. */
function moved(graph) {
  const nodes = graph.nodes().map((id) => graph.node(id));
  const edges = graph.edges().map((edge) => graph.edge(edge));
  const points = edges.flatMap((edge) => edge.points);
  const size = {};
  for (const [axis, length] of [["x", "width"], ["y", "height"]]) {
    const items = [...nodes, ...edges.filter((edge) => edge.width)];
    const starts = [...items.map((item) => item[axis] - item[length] / 2), ...points.map((point) => point[axis])];
    const ends = [...items.map((item) => item[axis] + item[length] / 2), ...points.map((point) => point[axis])];
    const shift = MARGIN - Math.min(...starts);
    for (const item of [...nodes, ...edges, ...points]) item[axis] += shift;
    size[length] = Math.ceil(Math.max(...ends) + shift + MARGIN);
  }
  return size;
}

/** `along`: the coordinate in the direction of the ranks; `across`: the other coordinate. */
const HORIZONTAL = { along: "x", across: "y", length: "width", point: (along, across) => `${round(along)} ${round(across)}` };
const VERTICAL = { along: "y", across: "x", length: "height", point: (along, across) => `${round(across)} ${round(along)}` };

const round = (value) => Math.round(value * 10) / 10;

const cornerOf = ({ x, y, width, height }) => ({ x: x - width / 2, y: y - height / 2 });

/** Returns the half length of each rank's zone, by the rank's center. Labels have zones too. */
function zonesOf(graph, { along, length }) {
  const zones = new Map();
  const labels = graph.edges().map((edge) => graph.edge(edge)).filter((edge) => edge.width);
  for (const item of [...graph.nodes().map((id) => graph.node(id)), ...labels]) {
    const center = Math.round(item[along]);
    zones.set(center, Math.max(zones.get(center) ?? 0, item[length] / 2));
  }
  return zones;
}

function routed(link, graph, zones, axis) {
  const { along, across, length, point } = axis;
  const [from, to] = [graph.node(link.from), graph.node(link.to)];
  const edge = graph.edge(link.from, link.to, link.id);
  const passed = edge.points.slice(1, -1).filter((each) => zones.has(Math.round(each[along])));
  const path = [`M${point(from[along] + from[length] / 2, from[across])}`];
  let [at, beside] = [zoneEnd(zones, from[along]), from[across]];
  path.push(`L${point(at, beside)}`);
  for (const next of [...passed, to]) {
    const enters = next[along] - zones.get(Math.round(next[along])) - PAD;
    const middle = (at + enters) / 2;
    path.push(`C${point(middle, beside)} ${point(middle, next[across])} ${point(enters, next[across])}`);
    [at, beside] = [next === to ? to[along] - to[length] / 2 : zoneEnd(zones, next[along]), next[across]];
    path.push(`L${point(at, beside)}`);
  }
  return { ...link, path: path.join(""), labelX: edge.x, labelY: edge.y };
}

const zoneEnd = (zones, center) => center + zones.get(Math.round(center)) + PAD;
