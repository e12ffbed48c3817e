/**
 * The runs of models in an explained request, from Triton's spans, and the steps that the gateway ran itself. Times are in milliseconds since the gateway received the
 * request.
 *
 * Triton's tree of spans may be deep, so no function here recurses. A run is one run of a model: `span`, `above` (the run that it
 * belongs to, or null), `kind` (`ensemble`, `step`, or `bls` for a model that a script called), `name` (of the step in the graph,
 * otherwise of the model), and `compute`, the times of its phases, empty for an ensemble and for a model that did not begin.
 */

const CALL = "InferRequest";
const COMPUTE = "compute";
const PARTS = {
  queue_ms: ["QUEUE_START", "COMPUTE_START"],
  compute_input_ms: ["COMPUTE_START", "COMPUTE_INPUT_END"],
  compute_ms: ["COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"],
  compute_output_ms: ["COMPUTE_OUTPUT_START", "COMPUTE_END"],
};
/** The clocks differ if Triton's call lies outside of the phase by more than this. */
const CLOCKS_DIFFER_MS = 1;
const SHOWN_CUT_MS = 0.1;
/** The gateway did not wait for Triton's answer, or got none. */
const CUT_SHORT = new Set(["timeout", "cancelled", "internal", "unavailable", "rejected"]);
const RUNNING = "The request is still running.";
const NOT_CALLED = "The request ended before the gateway called Triton.";
const NO_SPANS = "Triton has sent no spans yet. If none come, send the request again: Triton may lose them, or does not trace.";

/**
 * Returns the answer of `GET /v1/requests/{id}/explain` with `gateway` and `spans` as the waterfall shows them, `steps_not_run`,
 * `steps_skipped`, and `notes`: sentences about what the trace cannot tell. `graph`: as in the description of the pipeline.
 */
export function explained(answer, graph) {
  const gateway = phasesOf(answer.gateway);
  const found = { ...answer, gateway, spans: [], steps_not_run: [], steps_skipped: [], notes: [] };
  const phase = gateway.find(({ name }) => name === "triton");
  if (answer.outcome === null) return { ...found, notes: [RUNNING] };
  if (!phase) return { ...found, notes: [NOT_CALLED] };
  const calls = callsOf(answer.spans, graph);
  if (answer.steps.length) return { ...found, ...runsOfSteps(calls, answer, graph) };
  if (!calls.length) return { ...found, notes: [...notesOfSharing(answer), NO_SPANS] };
  const { span, runs } = calls.at(-1);
  const window = { start: phase.start_ms, end: phase.start_ms + phase.duration_ms };
  const shift = shiftOf(span ?? runs[0].span, window);
  const states = answer.is_complete ? statesOf(runs, graph, answer) : new Map();
  const shown = calls.flatMap((call) => shownRuns(call.runs, window, shift, states));
  const spans = shown.map(({ run }) => run);
  const cut = Math.max(...shown.map((each) => each.cut));
  return {
    ...found,
    spans,
    steps_not_run: answer.is_complete ? notRun(runs, graph) : [],
    notes: [
      ...notesOfSharing(answer),
      ...(answer.is_complete ? [] : ["Some of Triton's spans have not arrived yet."]),
      ...(calls.length > 1 ? [`The gateway called Triton ${calls.length} times; the states are those of the last call.`] : []),
      ...(shift ? [`The clocks differ: Triton's times are moved by ${shift.toFixed(1)} ms.`] : []),
      ...(cut >= SHOWN_CUT_MS ? [`Triton ended spans up to ${cut.toFixed(1)} ms after their answers; that part is not shown.`] : []),
      ...(answer.dropped ? [`${answer.dropped} spans over the limit are not shown.`] : []),
      ...(["timeout", "cancelled"].includes(answer.outcome) ? ["The gateway ended the request; Triton may have continued."] : []),
      ...notesOfSteps(runs, graph),
    ],
  };
}

const STATES = { ok: "ok", failed: "failed", cancelled: "cancelled", exit: "early_exit" };

/** Of a pipeline whose steps the gateway runs: its own time of each step, and below it the runs in the calls of the step. */
function runsOfSteps(calls, { steps, is_complete: isComplete, dropped }, graph) {
  const exits = new Set(graph.exits.map((exit) => exit.name));
  const models = new Map(graph.steps.map((step) => (step.part_of ? [step.part_of, step.ensemble] : [step.name, step.model])));
  const ran = steps.filter((step) => step.outcome !== "skipped");
  const own = ran.map(({ name, outcome, start_ms, total_ms }) => ({
    ...{ id: `step ${name}`, parent: null, name, kind: "step", model: models.get(name) ?? "", version: "", isOwn: true },
    ...{ start_ms, duration_ms: total_ms, state: STATES[outcome], queue_ms: null, compute_input_ms: null, compute_ms: null, compute_output_ms: null },
  }));
  const below = calls.flatMap(({ span, runs }) => {
    const name = runs[0].span.request_id.split(".")[1];
    const step = ran.find((each) => each.name === name);
    if (!step) return [];
    const window = { start: step.start_ms, end: step.end_ms };
    const shown = shownRuns(runs, window, shiftOf(span ?? runs[0].span, window), new Map());
    return shown.map(({ run }) => (run.parent ? run : { ...run, parent: `step ${name}`, ...(run.kind === "step" && { kind: "run", name: run.model }) }));
  });
  const seen = new Set([...steps, ...below.filter((run) => run.kind === "step")].map((each) => each.name));
  return {
    spans: [...own, ...below],
    steps_not_run: graph.steps.filter((step) => !seen.has(step.name) && !seen.has(step.part_of)).map((step) => step.name),
    steps_skipped: steps.filter(({ name, outcome }) => outcome === "skipped" && !exits.has(name)).map((step) => step.name),
    notes: [
      ...(calls.length ? [] : [NO_SPANS]),
      ...(calls.length && !isComplete ? ["Some of Triton's spans have not arrived yet."] : []),
      ...(dropped ? [`${dropped} spans over the limit are not shown.`] : []),
    ],
  };
}

/** Returns the gateway's phases one after the other. They add up to the total. */
function phasesOf(durations) {
  let start = 0;
  return Object.entries(durations).map(([name, duration_ms]) => {
    const phase = { name, start_ms: rounded(start), duration_ms };
    start += duration_ms;
    return phase;
  });
}

/** Returns `{ span, runs }` of each call of Triton in order: its span if it has arrived, and its runs, each before those below it. */
function callsOf(spans, { steps }) {
  const ordered = spans.toSorted((a, b) => a.start_ms - b.start_ms);
  const byId = new Map(ordered.map((span) => [span.id, span]));
  const below = new Map(ordered.map((span) => [span.parent, []]));
  for (const span of ordered) below.get(span.parent).push(span);
  const models = new Set(steps.map((step) => step.model));
  const seen = new Map();

  const runOf = (span, above) => {
    const children = below.get(span.id) ?? [];
    const compute = children.find((each) => each.name === COMPUTE && !each.model)?.moments ?? {};
    const run = { span, above, compute, kind: "step", name: span.model };
    if (above && isFilled(above.compute)) run.kind = "bls";
    else if (!isFilled(compute) && (!models.has(span.model) || children.some((each) => each.model))) run.kind = "ensemble";
    else run.name = nameOf(span.model, above?.span.model ?? "");
    return run;
  };
  /** A model that occurs more than once is named in the order of its runs. */
  const nameOf = (model, ensemble) => {
    const names = steps.filter((step) => step.model === model && (step.ensemble ?? "") === ensemble).map((step) => step.name);
    const place = seen.get(`${ensemble} ${model}`) ?? 0;
    seen.set(`${ensemble} ${model}`, place + 1);
    return names[Math.min(place, names.length - 1)] ?? model;
  };
  const runsOf = (first) => {
    const runs = [];
    const waiting = [[first, null]];
    while (waiting.length) {
      const [span, above] = waiting.pop();
      const run = runOf(span, above);
      runs.push(run);
      const models = (below.get(span.id) ?? []).filter((each) => each.model);
      waiting.push(...models.reverse().map((each) => [each, run]));
    }
    return runs;
  };
  const firsts = ordered.filter((span) => span.model && !byId.get(span.parent)?.model);
  return firsts.map((first) => {
    const above = byId.get(first.parent);
    return { span: above?.name === CALL ? above : null, runs: runsOf(first) };
  });
}

/** Returns what to add to Triton's times: if the call lies outside of the phase, it moves to the middle of it. */
function shiftOf(span, { start, end }) {
  const answered = span.moments.INFER_RESPONSE_COMPLETE ?? span.end_ms;
  if (span.start_ms >= start - CLOCKS_DIFFER_MS && answered <= end + CLOCKS_DIFFER_MS) return 0;
  return (start + end) / 2 - (span.start_ms + answered) / 2;
}

/**
 * Returns `{ run, cut }` for each run of a call. Each ends with its answer, but Triton ends it after a clean-up: `cut`.
 *
 * The answer of a call comes at the end of the phase at the latest. The answer of a run below another comes before the end of the
 * run above, except if it still computed then: a script or a failed ensemble did not wait for it.
 */
function shownRuns(runs, window, shift, states) {
  const within = (ms) => Math.min(Math.max(ms + shift, window.start), window.end);
  const computed = computedUntil(runs);
  const ends = new Map();
  return runs.map((run) => {
    const { span, above } = run;
    const mayEnd = above && computed.get(run) <= ends.get(above) ? ends.get(above) : span.end_ms;
    ends.set(run, Math.min(span.end_ms, mayEnd));
    const [start, end] = [within(span.start_ms), within(ends.get(run))];
    const shown = {
      id: span.id,
      parent: above?.span.id ?? null,
      name: run.name,
      kind: run.kind,
      model: span.model,
      version: span.version,
      start_ms: rounded(start),
      duration_ms: rounded(Math.max(end - start, 0)),
      state: states.get(run) ?? "unknown",
    };
    for (const [part, [first, second]] of Object.entries(PARTS)) {
      const moments = part === "queue_ms" ? { ...span.moments, ...run.compute } : run.compute;
      const isKnown = first in moments && second in moments;
      shown[part] = isKnown ? rounded(Math.max(Math.min(within(moments[second]), end) - within(moments[first]), 0)) : null;
    }
    return { run: shown, cut: span.end_ms + shift - end };
  });
}

/** Returns when each run, or a run below it, last computed; its start if nothing computed. */
function computedUntil(runs) {
  const until = new Map();
  const extend = (run, ms) => until.set(run, Math.max(ms, until.get(run) ?? -Infinity));
  for (const run of runs.toReversed()) {
    extend(run, run.compute.COMPUTE_OUTPUT_START ?? run.span.start_ms);
    if (run.above) extend(run.above, until.get(run));
  }
  return until;
}

/**
 * Returns the state of each run of a call, the pipeline's model first. Triton's spans do not mark the step that failed or that ended
 * the request early: it follows from what ran.
 */
function statesOf(runs, graph, { outcome, failed_model: failedModel }) {
  if (CUT_SHORT.has(outcome)) return new Map();
  const states = new Map(runs.map((run) => [run, "ok"]));
  if (outcome === "ok") return states;
  const ending = outcome === "early_exit" ? "early_exit" : "failed";
  const [root, ...below] = runs;
  states.set(root, ending);
  if (outcome === "contract_violation" && !failedModel) return states; // the gateway refused what the steps had answered
  const named = below.filter((run) => run.span.model === failedModel).slice(-1);
  const guilty = named.length ? named : lastOf(below, graph, ending);
  for (const run of guilty) states.set(run, guilty.length === 1 ? ending : "unknown");
  return states;
}

/** Returns the steps after which nothing ran. An early exit with all steps run was decided from the outputs. */
function lastOf(runs, graph, ending) {
  if (ending === "early_exit" && !notRun(runs, graph).length) return [];
  const steps = runs.filter((run) => run.kind === "step");
  const names = new Set(steps.map((run) => run.name));
  const continued = new Set(graph.edges.filter((edge) => names.has(edge.to.step)).map((edge) => edge.from.step));
  const last = steps.filter((run) => !continued.has(run.name));
  return last.length ? last : runs.filter((run) => run.kind === "bls").slice(-1);
}

function notRun(runs, { steps }) {
  const seen = new Set(runs.filter((run) => run.kind === "step").map((run) => run.name));
  return steps.map((step) => step.name).filter((name) => !seen.has(name));
}

function notesOfSharing({ shared_with: count }) {
  const others = count === 1 ? "1 other" : `${count} others`;
  return count ? [`The gateway sent the request with ${others} in one call; Triton's spans belong to one of them.`] : [];
}

function notesOfSteps(runs, { steps }) {
  const names = new Set(runs.filter((run) => run.kind === "step").map((run) => run.name));
  const streaming = steps.filter((step) => step.decoupled && names.has(step.name));
  const known = new Set([...runs.map((run) => run.span.model), ...steps.map((step) => step.model)]);
  const unseen = new Set(steps.flatMap((step) => step.calls.map((call) => call.model)).filter((model) => !known.has(model)));
  const listed = [...unseen].sort().map((model) => `'${model}'`).join(", ");
  return [
    ...streaming.map(({ name }) => `'${name}' is decoupled: its span ends when its script returns, which may be before its outputs.`),
    ...(listed ? [`A script may call ${listed}: not called here, or called without \`trace=\`.`] : []),
  ];
}

const isFilled = (values) => Object.keys(values).length > 0;
const rounded = (ms) => Math.round(ms * 1000) / 1000;
