/** What the graph draws: boxes for request, steps, response and early exits, and links for their tensors and their order. */

import { msText, stepsOf } from "./explain.js";

const TITLE = "600 13px system-ui, sans-serif";
const NOTE = "400 11px system-ui, sans-serif";
const PADDING = 28;
const STEP_HEIGHT = 46;
const END_HEIGHT = 34;
export const CALL_HEIGHT = 22;
const LABEL_HEIGHT = 16;
const CONDITION_HEIGHT = 16;
const MOST_CHARACTERS = 44;

export const REQUEST = "request";
export const RESPONSE = "response";

/** `graph`: as in the description of a pipeline. `explain`: an explanation of a request, or null. */
export function drawingOf(graph, explain) {
  const times = explain ? stepsOf(explain) : new Map();
  const exits = Map.groupBy(graph.exits, (exit) => exit.reason);
  const tensors = tensorLinks(graph.edges);
  const known = new Set(tensors.map((link) => link.id));
  return {
    boxes: [
      endBox(REQUEST, "end", REQUEST),
      ...graph.steps.map((step) => stepBox(step, times.get(step.name) ?? ofPart(times.get(step.part_of)))),
      endBox(RESPONSE, "end", RESPONSE),
      ...[...exits].map(([reason, ways]) => exitBox(reason, ways, explain?.early_exit === reason)),
    ],
    links: [...tensors, ...orderLinks(graph).filter((link) => !known.has(link.id)), ...distinct(graph.exits.map(exitLink))],
  };
}

/** Without Triton's spans, only the state of the step is known for the models of its ensemble. */
const ofPart = (time) => time && { ...time, ms: null, count: 0 };

const stepId = (name) => `step ${name}`;
const exitId = (reason) => `exit ${reason}`;

const distinct = (items) => [...new Map(items.map((item) => [item.id, item])).values()];

function endBox(id, kind, title) {
  return { id, kind, title, note: "", condition: "", calls: [], ms: null, width: textWidth(title, TITLE) + PADDING, height: END_HEIGHT, state: "" };
}

/** `ways`: the exits with this reason. */
function exitBox(reason, ways, isTaken) {
  const conditions = [...new Set(ways.filter((exit) => exit.when).map((exit) => conditionText(exit.when)))];
  const steps = ways.map((exit) => exit.step).filter(Boolean).join("|"); // whose links show that the tensors are theirs
  const condition = shortened(conditions.join(" or ").replace(new RegExp(`(?<![\\w-])(${steps})\\.`, "g"), ""));
  const width = Math.max(textWidth(reason, TITLE), textWidth("early exit", NOTE), textWidth(condition, NOTE)) + PADDING;
  const height = STEP_HEIGHT + (condition ? CONDITION_HEIGHT : 0);
  return { ...endBox(exitId(reason), "exit", reason), note: "early exit", condition, conditions, width, height, state: isTaken ? "early_exit" : "" };
}

const shortened = (condition) => (condition.length > MOST_CHARACTERS ? `if ${condition.slice(0, MOST_CHARACTERS)}…` : condition && `if ${condition}`);

const OPERATORS = { equals: "=", in: "in", below: "<", at_least: "≥" };

/** A condition in words. `when`: as in gateway.yaml. */
export function conditionText(when, isInner = false) {
  const [[key, value]] = Object.entries(when);
  if (key in OPERATORS) return `${value[0]} ${OPERATORS[key]} ${JSON.stringify(value[1])}`;
  if (key === "empty" || key === "not_empty") return `${value} is ${key.replace("_", " ")}`;
  if (key === "any" || key === "all") return `${key} ${conditionText(value)}`;
  if (key === "not") return `not (${conditionText(value)})`;
  const text = value.map((each) => conditionText(each, true)).join(key === "any_of" ? " or " : " and ");
  return isInner ? `(${text})` : text;
}

/** The tensors and fields that a condition reads. */
function namesIn(when) {
  return Object.entries(when ?? {}).flatMap(([key, value]) => {
    if (key in OPERATORS) return [value[0]];
    return typeof value === "string" ? [value] : [value].flat().flatMap(namesIn);
  });
}

function stepBox(step, time) {
  const calls = callsOf(step, time);
  const note = noteOf(step, time);
  const condition = step.when ? shortened(conditionText(step.when)) : "";
  const widths = [textWidth(step.name, TITLE), textWidth(note, NOTE), textWidth(condition, NOTE), ...calls.map((call) => textWidth(`${call.model}   ${call.note}`, NOTE) + 12)];
  return {
    id: stepId(step.name),
    kind: "step",
    title: step.name,
    note,
    condition,
    calls,
    step,
    ms: time?.ms ?? null,
    state: time?.state ?? "",
    width: Math.max(96, ...widths) + PADDING,
    height: STEP_HEIGHT + (condition ? CONDITION_HEIGHT : 0) + calls.length * CALL_HEIGHT + (calls.length ? 6 : 0),
  };
}

const STATE_TEXT = { failed: "failed", early_exit: "early exit", cancelled: "cancelled", skipped: "skipped", "not run": "not run" };

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
  const [{ tensor, from }] = tensors;
  const isOwn = tensor.split(" or ").includes(`${from.step}.${from.tensor}`); // of a step that the gateway runs
  const text = tensors.length > 1 ? `${tensors.length} tensors` : isOwn ? from.tensor : tensor;
  return { text, width: textWidth(text, NOTE) + 10, height: LABEL_HEIGHT };
}

/** Links to the steps that wait for another step without reading its tensors: its condition does, or its `after`. */
function orderLinks({ steps, exits }) {
  const boxes = Map.groupBy(steps, (step) => step.part_of ?? step.name); // several for an ensemble
  const before = (name) => [boxes.get(name)?.at(-1).name, ...exits.filter((exit) => exit.name === name).map((exit) => exit.step)].filter(Boolean);
  const links = [...boxes.values()].flatMap(([step]) => {
    const found = [...(step.after ?? []), ...namesIn(step.when).map((name) => name.split(".")[0])].flatMap(before);
    return found.map((each) => ({ id: `${stepId(each)} > ${stepId(step.name)}`, kind: "order", from: stepId(each), to: stepId(step.name), tensors: [], label: null }));
  });
  return distinct(links);
}

function exitLink({ step, reason, when }) {
  const [from, to] = [boxIdOf(step, REQUEST), exitId(reason)];
  return { id: `${from} > ${to}`, kind: "exit", from, to, tensors: [], label: null, conditions: when ? [conditionText(when)] : [] };
}

const canvas = document.createElement("canvas").getContext("2d");

function textWidth(text, font) {
  canvas.font = font;
  return Math.ceil(canvas.measureText(text).width);
}
