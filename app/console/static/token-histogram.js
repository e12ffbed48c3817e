/** The times between the outputs of a stream. */

import { msText } from "./explain.js";
import { Histogram, sharePoint } from "./histogram.js";
import { html } from "./lib.js";

/** `times_ms`: the times between outputs. Shows nothing for fewer than two. */
export function TokenHistogram({ times_ms: times }) {
  if (times.length < 2) return null;
  const sorted = times.toSorted((a, b) => a - b);
  const figures = { median: sharePoint(sorted, 0.5), p95: sharePoint(sorted, 0.95), longest: sorted.at(-1) };
  const text = Object.entries(figures).map(([name, ms]) => `${name} ${msText(ms)}`).join(" · ");
  return html`
    <section class="token-times" aria-label="Time between outputs">
      <h3>Time between outputs <small>${text}</small></h3>
      <${Histogram} values=${times} label="Histogram of ${times.length} times: ${text}" />
    </section>
  `;
}
