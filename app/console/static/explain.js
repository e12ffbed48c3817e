/** Where the time of a traced request went: steps, lines and shares of an explanation, as `runs.js` makes it. */

import { get } from "./api.js";

const PART_NAMES = { queue: "queue", compute_input: "read input", compute: "compute", compute_output: "write output" };
const RETRY_MS = 250;
const TRIES = 12;

/** Headers that ask the gateway to trace a request. */
export const EXPLAIN = { "X-Explain": "1" };

/** Returns the answer of `GET /v1/requests/{id}/explain` as soon as it is complete, or after three seconds the incomplete one. */
export async function explanationOf(requestId) {
  for (let left = TRIES; ; left--) {
    const { values } = await get(`/v1/requests/${encodeURIComponent(requestId)}/explain`);
    if (values.is_complete || left <= 0) return values;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Returns `{ ms, count, state, calls }` of each step by its name: all its runs together, and the calls of its script. */
export function stepsOf(explain) {
  const runs = Map.groupBy(explain.spans.filter((span) => span.kind === "step"), (span) => span.name);
  const steps = [...runs].map(([name, spans]) => [name, { ...totals(spans), calls: callsOf(explain, spans) }]);
  const others = (names, state) => names.map((name) => [name, { ms: null, count: 0, state, calls: [] }]);
  return new Map([...steps, ...others(explain.steps_not_run, "not run"), ...others(explain.steps_skipped, "skipped")]);
}

/** Returns `{ model, ms, count, state }` of each model that the script called. */
function callsOf({ spans }, parents) {
  const ids = new Set(parents.map((span) => span.id));
  for (const span of spans) if (span.kind === "run" && ids.has(span.parent)) ids.add(span.id);
  const calls = spans.filter((span) => span.kind === "bls" && ids.has(span.parent));
  return [...Map.groupBy(calls, (span) => span.model)].map(([model, each]) => ({ model, ...totals(each) }));
}

function totals(spans) {
  const states = spans.map((span) => span.state);
  const state = ["failed", "early_exit"].find((each) => states.includes(each)) ?? states[0];
  return { ms: sum(spans.map((span) => span.duration_ms)), count: spans.length, state };
}

/**
 * Returns the spans as lines in the order of a tree, with their depth. Spans of the same name and parent share a line:
 * `runs`, `count`, `ms` of all, `wholes` (the time of each) and `parts` (queue and compute of each), as `{ kind, start, ms }`.
 */
export function rowsOf(explain) {
  const spans = spansOf(explain);
  const below = (parents, depth) => {
    const children = spans.filter((span) => parents.has(span.parent));
    const lines = Map.groupBy(children, (span) => `${span.kind} ${span.name}`);
    return [...lines.values()].flatMap((runs) => [lineOf(runs, depth), ...below(new Set(runs.map((span) => span.id)), depth + 1)]);
  };
  return below(new Set([null]), 0);
}

function lineOf(runs, depth) {
  const [{ id, name, kind, model, version }] = runs;
  const wholes = runs.map((span) => ({ kind: "whole", start: span.start_ms, ms: span.duration_ms }));
  return { id, name, kind, model, version, depth, runs, ...totals(runs), wholes, parts: runs.flatMap((span) => span.parts) };
}

/** Returns the spans in the order of their start, with their parts; `parent` is null if the parent is missing. */
function spansOf({ spans }) {
  const known = new Set(spans.map((span) => span.id));
  return spans
    .map((span) => ({ ...span, parent: known.has(span.parent) ? span.parent : null, parts: partsOf(span) }))
    .toSorted((a, b) => a.start_ms - b.start_ms);
}

/** A step waits in Triton's queue, then its input is read, its model computes, and its output is written. */
function partsOf(span) {
  let start = span.start_ms;
  const parts = [];
  for (const [kind, ms] of [
    ["queue", span.queue_ms],
    ["compute", sum([span.compute_input_ms, span.compute_ms, span.compute_output_ms])],
  ]) {
    if (!ms) continue;
    parts.push({ kind, start, ms });
    start += ms;
  }
  return parts;
}

/** Returns the details of a line of spans as `[name, text]`. An ensemble has no queue and no model of its own. */
export function factsOf(row) {
  const { model, version, runs } = row;
  const start = Math.min(...runs.map((span) => span.start_ms));
  const end = Math.max(...runs.map((span) => span.start_ms + span.duration_ms));
  const facts = [...(model ? [["model", version ? `${model}, version ${version}` : model]] : []), ["start", msText(start)], ["end", msText(end)]];
  if (!row.parts.length) return facts;
  const waiting = Math.max(0, row.ms - sum(row.parts.map((part) => part.ms)));
  const timed = ["queue", "compute_input", "compute", "compute_output"].map((name) => [PART_NAMES[name], sum(runs.map((span) => span[`${name}_ms`]))]);
  return [...facts, ...[...timed, ["waiting", waiting]].map(([name, ms]) => [name, msText(ms)])];
}

/**
 * Divides the request's time into `{ kind, ms }` for gateway, gateway-queue, network, queue, compute and other. The sum is
 * the total.
 *
 * Parallel steps count once: while any step computes, the time is compute; else while any step waits in Triton's
 * queue, it is queue; else it is other, time of Triton itself.
 */
export function sharesOf(explain) {
  const phases = new Map(explain.gateway.map((phase) => [phase.name, phase.duration_ms]));
  const total = totalOf(explain);
  const called = phases.get("triton") ?? 0;
  const queued = phases.get("queue") ?? 0;
  const inside = coverOf(spansOf(explain).filter((span) => !span.isOwn));
  const spent = sum(Object.values(inside));
  return [
    { kind: "gateway", ms: Math.max(0, total - called - queued) },
    { kind: "gateway-queue", ms: queued },
    { kind: "network", ms: spent ? Math.max(0, called - spent) : 0 },
    ...(spent ? Object.entries(inside).map(([kind, ms]) => ({ kind, ms })) : [{ kind: "other", ms: called }]),
  ];
}

export function totalOf({ total_ms: total, gateway, spans }) {
  return total ?? Math.max(0, ...[...gateway, ...spans].map((each) => each.start_ms + each.duration_ms));
}

function coverOf(spans) {
  const cover = { queue: 0, compute: 0, other: 0 };
  const bounds = spans.flatMap((span) => [startAndEnd(span.start_ms, span.duration_ms), ...span.parts.map((part) => startAndEnd(part.start, part.ms))]);
  const times = [...new Set(bounds.flat())].toSorted((a, b) => a - b);
  for (let i = 1; i < times.length; i++) {
    const middle = (times[i - 1] + times[i]) / 2;
    const active = spans.filter((span) => holds(span.start_ms, span.duration_ms, middle));
    const outer = new Set(active.map((span) => span.parent));
    const kinds = active.filter((span) => !outer.has(span.id)).map((span) => partAt(span, middle));
    if (kinds.length > 0) cover[["compute", "queue"].find((kind) => kinds.includes(kind)) ?? "other"] += times[i] - times[i - 1];
  }
  return cover;
}

const startAndEnd = (start, ms) => [start, start + ms];
const holds = (start, ms, time) => start <= time && time < start + ms;
const partAt = (span, time) => span.parts.find((part) => holds(part.start, part.ms, time))?.kind;
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

/** Writes milliseconds; an unknown number is a dash. */
export const msText = (ms) => (ms === null || ms === undefined ? "– ms" : `${ms.toFixed(ms >= 100 ? 0 : ms >= 1 ? 1 : 2)} ms`);

/** A share of the total; a share that is not zero is never shown as zero. */
export function percentText(ms, total) {
  const share = (100 * ms) / total;
  return share > 0 && share < 1 ? "<1 %" : `${Math.round(share) || 0} %`;
}

/** Returns three to six round times in milliseconds, from zero, for a time axis. */
export function ticksOf(total) {
  if (!(total > 0)) return [0, 1];
  const unit = 10 ** Math.floor(Math.log10(total / 3));
  const step = unit * [5, 2, 1].find((each) => each * unit <= total / 2.5);
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, index) => Number((index * step).toPrecision(6)));
}
