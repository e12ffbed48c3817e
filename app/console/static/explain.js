/** Reads where the time of a traced request went: `GET /v1/requests/{id}/explain`. Times are in milliseconds. */

import { get } from "./api.js";

const RETRY_MS = 250;
const TRIES = 12;

/** Headers that ask the gateway to trace a request. */
export const EXPLAIN = { "X-Explain": "1" };

/** Returns the explanation of a request as soon as it is complete, or after three seconds the incomplete one. */
export async function explanationOf(requestId) {
  for (let left = TRIES; ; left--) {
    const { values } = await get(`/v1/requests/${encodeURIComponent(requestId)}/explain`);
    if (values.is_complete || left <= 0) return values;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Returns the time and the state of each step, by the step's name: `{ ms, state, calls }`, and the calls of its script. */
export function stepsOf(explain) {
  const steps = new Map();
  for (const span of explain.spans) {
    if (span.kind === "step") steps.set(span.name, { ms: span.duration_ms, state: span.state, calls: callsOf(explain, span) });
  }
  for (const name of explain.steps_not_run) steps.set(name, { ms: null, state: "not run", calls: [] });
  return steps;
}

function callsOf({ spans }, parent) {
  return spans.filter((span) => span.kind === "bls" && span.parent === parent.id);
}

/** Returns the spans in the order of a tree, with their depth and the parts of each: `{ kind, start, ms }`. */
export function rowsOf({ spans }) {
  const known = new Set(spans.map((span) => span.id));
  const below = (parent, depth) =>
    spans
      .filter((span) => (known.has(span.parent) ? span.parent : null) === parent)
      .toSorted((a, b) => a.start_ms - b.start_ms)
      .flatMap((span) => [{ ...span, depth, parts: partsOf(span) }, ...below(span.id, depth + 1)]);
  return below(null, 0);
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

/** The time of a span that is neither queue nor compute; null for an ensemble, whose steps have it. */
export function waitingOf(span) {
  if (span.parts.length === 0) return null;
  return Math.max(0, span.duration_ms - sum(span.parts.map((part) => part.ms)));
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
  const inside = coverOf(rowsOf(explain));
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

function coverOf(rows) {
  const cover = { queue: 0, compute: 0, other: 0 };
  const parents = new Map(rows.map((row) => [row.id, row.parent]));
  const bounds = rows.flatMap((row) => [...startAndEnd(row.start_ms, row.duration_ms), ...row.parts.flatMap((part) => startAndEnd(part.start, part.ms))]);
  const times = [...new Set(bounds)].toSorted((a, b) => a - b);
  for (let i = 1; i < times.length; i++) {
    const middle = (times[i - 1] + times[i]) / 2;
    const active = rows.filter((row) => holds(row.start_ms, row.duration_ms, middle));
    const outer = new Set(active.map((row) => parents.get(row.id)));
    const kinds = active.filter((row) => !outer.has(row.id)).map((row) => partAt(row, middle));
    if (kinds.length > 0) cover[["compute", "queue"].find((kind) => kinds.includes(kind)) ?? "other"] += times[i] - times[i - 1];
  }
  return cover;
}

const startAndEnd = (start, ms) => [start, start + ms];
const holds = (start, ms, time) => start <= time && time < start + ms;
const partAt = (row, time) => row.parts.find((part) => holds(part.start, part.ms, time))?.kind;
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

/** Writes a number of milliseconds with at most three digits before the unit; an unknown number is a dash. */
export function digits(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms.toFixed(ms >= 100 ? 0 : ms >= 1 ? 1 : 2);
}

export const msText = (ms) => `${digits(ms)} ms`;
