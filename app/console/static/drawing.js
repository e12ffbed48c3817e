/** What the graph draws: boxes for request, steps, response and early exits, and links between them. */

import { msText, stepsOf } from "./explain.js";

const TITLE = "600 13px system-ui, sans-serif";
const NOTE = "400 11px system-ui, sans-serif";
const PADDING = 28;
const STEP_HEIGHT = 46;
const END_HEIGHT = 34;
export const CALL_HEIGHT = 22;
const LABEL_HEIGHT = 16;

export const REQUEST = "request";
export const RESPONSE = "response";

/** `graph`: as in the description of a pipeline. `explain`: an explanation of a request, or null. */
export function drawingOf(graph, explain) {
  const times = explain ? stepsOf(explain) : new Map();
  const exits = [...new Set(graph.exits.map((exit) => exit.reason))];
  return {
    boxes: [
      endBox(REQUEST, "end", REQUEST),
      ...graph.steps.map((step) => stepBox(step, times.get(step.name))),
      endBox(RESPONSE, "end", RESPONSE),
      ...exits.map((reason) => endBox(exitId(reason), "exit", reason, explain?.early_exit === reason)),
    ],
    links: [...tensorLinks(graph.edges), ...graph.exits.map(exitLink)],
  };
}

const stepId = (name) => `step ${name}`;
const exitId = (reason) => `exit ${reason}`;

function endBox(id, kind, title, isTaken = false) {
  const note = kind === "exit" ? "early exit" : "";
  const width = Math.max(textWidth(title, TITLE), textWidth(note, NOTE)) + PADDING;
  return { id, kind, title, note, calls: [], ms: null, width, height: note ? STEP_HEIGHT : END_HEIGHT, state: isTaken ? "early_exit" : "" };
}

function stepBox(step, time) {
  const calls = callsOf(step, time);
  const note = noteOf(step, time);
  const widths = [textWidth(step.name, TITLE), textWidth(note, NOTE), ...calls.map((call) => textWidth(`${call.model}   ${call.note}`, NOTE) + 12)];
  return {
    id: stepId(step.name),
    kind: "step",
    title: step.name,
    note,
    calls,
    step,
    ms: time?.ms ?? null,
    state: time?.state ?? "",
    width: Math.max(96, ...widths) + PADDING,
    height: STEP_HEIGHT + calls.length * CALL_HEIGHT + (calls.length ? 6 : 0),
  };
}

const STATE_TEXT = { failed: "failed", early_exit: "early exit", "not run": "not run" };

function noteOf({ backend, decoupled }, time) {
  if (!time) return [backend, decoupled ? "decoupled" : ""].filter(Boolean).join(" · ");
  return [STATE_TEXT[time.state], timesText(time)].filter(Boolean).join(" · ");
}

const timesText = ({ ms, count }) => (count > 1 ? `${count} × · ${msText(ms)}` : count ? msText(ms) : "");

/** The calls of a BLS script: those of the traced request, and the declared ones that it did not make. */
function callsOf(step, time) {
  const made = (time?.calls ?? []).map((call) => ({ model: call.model, note: timesText(call), state: call.state }));
  const models = new Set(made.map((call) => call.model));
  const declared = step.calls.filter((call) => !models.has(call.model));
  return [...made, ...declared.map(({ model }) => ({ model, note: time ? "not called" : "", state: time ? "not run" : "" }))];
}

/** One link for all tensors between the same two steps. */
function tensorLinks(edges) {
  const links = new Map();
  for (const edge of edges) {
    const [from, to] = [boxIdOf(edge.from.step, REQUEST), boxIdOf(edge.to.step, RESPONSE)];
    const id = `${from} > ${to}`;
    const link = links.get(id) ?? { id, kind: "tensors", from, to, tensors: [] };
    link.tensors.push(edge);
    links.set(id, link);
  }
  return [...links.values()].map((link) => ({ ...link, label: labelOf(link.tensors) }));
}

const boxIdOf = (step, end) => (step === null ? end : stepId(step));

function labelOf(tensors) {
  const text = tensors.length === 1 ? tensors[0].tensor : `${tensors.length} tensors`;
  return { text, width: textWidth(text, NOTE) + 10, height: LABEL_HEIGHT };
}

function exitLink({ step, reason }) {
  const [from, to] = [stepId(step), exitId(reason)];
  return { id: `${from} > ${to}`, kind: "exit", from, to, tensors: [], label: null };
}

const canvas = document.createElement("canvas").getContext("2d");

function textWidth(text, font) {
  canvas.font = font;
  return Math.ceil(canvas.measureText(text).width);
}
