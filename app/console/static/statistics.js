/**
 * Rates and percentiles from the answers of `GET /v1/statistics`, whose counters only grow.
 *
 * Each number is the difference of two answers: rates of one poll and the next, percentiles of the last WINDOW polls,
 * because a single poll has too few requests.
 */

const WINDOW = 5;
const TRANSPORTS = ["unary", "stream"];
const ANSWERED = new Set(["ok", "early_exit"]);

/** The last answers. A gateway that was restarted counts from 0: then the history starts again. */
export class History {
  #answers = [];
  #limit;

  constructor(limit) {
    this.#limit = limit;
  }

  add(answer) {
    const last = this.#answers.at(-1);
    if (last && hasRestarted(last, answer)) this.#answers = [];
    this.#answers = [...this.#answers, answer].slice(-this.#limit);
  }

  /** Seconds before the newest answer, for every rate. */
  get times() {
    const [, ...later] = this.#answers;
    return later.map(({ time_s: time }) => time - this.#answers.at(-1).time_s);
  }

  /** One row for each pipeline and transport that had requests since the start of the gateway. */
  get rows() {
    const pipelines = this.#answers.at(-1)?.pipelines ?? {};
    return Object.entries(pipelines).flatMap(([name, numbers]) =>
      TRANSPORTS.filter((transport) => isUsed(numbers, transport)).map((transport) => this.#row(name, transport)),
    );
  }

  #row(name, transport) {
    const now = this.#answers.at(-1).pipelines[name];
    const answers = this.#answers.map(({ pipelines, ...rest }) => ({ ...rest, numbers: pipelines[name] ?? now }));
    const counted = answers.map(({ numbers }) => numbers[transport].outcomes);
    return {
      name,
      transport,
      rate: ratesOf(answers, counted.map((outcomes) => sumOf(outcomes, () => true))),
      errors: ratesOf(answers, counted.map((outcomes) => sumOf(outcomes, (outcome) => !ANSWERED.has(outcome)))),
      exits: ratesOf(answers, counted.map((outcomes) => outcomes.early_exit ?? 0)),
      p50: percentilesOf(answers, transport, 0.5),
      p95: percentilesOf(answers, transport, 0.95),
      outcomes: countedIn(counted[0], counted.at(-1)),
      running: transport === "stream" ? now.active_streams : now.in_flight,
      waiting: now.waiting,
    };
  }
}

const isUsed = (numbers, transport) =>
  Object.keys(numbers[transport].outcomes).length > 0 || numbers[transport === "stream" ? "active_streams" : "in_flight"] > 0;

const sumOf = (outcomes, isCounted) =>
  Object.entries(outcomes).reduce((sum, [outcome, count]) => sum + (isCounted(outcome) ? count : 0), 0);

const hasRestarted = (before, after) =>
  Object.entries(before.pipelines).some(([name, numbers]) =>
    TRANSPORTS.some((transport) => {
      const later = after.pipelines[name]?.[transport].outcomes;
      return later && sumOf(later, () => true) < sumOf(numbers[transport].outcomes, () => true);
    }),
  );

function ratesOf(answers, counts) {
  const pairs = answers.slice(1).map((answer, index) => [answer.time_s - answers[index].time_s, counts[index + 1] - counts[index]]);
  return pairs.map(([seconds, count]) => (seconds > 0 ? count / seconds : 0));
}

/** The requests between two answers, by outcome. */
function countedIn(first, last) {
  const counts = Object.entries(last).map(([outcome, count]) => [outcome, count - (first[outcome] ?? 0)]);
  return Object.fromEntries(counts.filter(([, count]) => count > 0));
}

function percentilesOf(answers, transport, share) {
  const durations = answers.map(({ numbers }) => numbers[transport].durations);
  return durations.slice(1).map((after, index) => percentile(answers.at(-1).bounds_s, durations[Math.max(0, index + 1 - WINDOW)], after, share));
}

/**
 * Estimates a percentile in seconds from the cumulative counts of two answers; null without requests between them.
 * As in Prometheus, durations are assumed to be spread evenly within a bucket; above the last bound it is that bound.
 */
export function percentile(bounds, before, after, share) {
  const counts = after.map((count, index) => count - before[index]);
  const wanted = share * counts.at(-1);
  if (counts.at(-1) <= 0) return null;
  const bucket = counts.findIndex((count) => count >= wanted);
  if (bucket >= bounds.length) return bounds.at(-1);
  const [lower, below] = bucket === 0 ? [0, 0] : [bounds[bucket - 1], counts[bucket - 1]];
  return lower + ((bounds[bucket] - lower) * (wanted - below)) / (counts[bucket] - below);
}
