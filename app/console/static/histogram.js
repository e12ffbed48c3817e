/** Durations as bars: how many fell into each of equal intervals. */

import { html } from "./lib.js";

const BARS = 24;
const [WIDTH, HEIGHT] = [480, 90];

/** `values` in milliseconds, at least one. The last bar has the slowest percent, so that one outlier does not flatten the rest. */
export function Histogram({ values, label }) {
  const sorted = values.toSorted((a, b) => a - b);
  const [low, high] = [sorted[0], Math.max(sharePoint(sorted, 0.99), sorted[0] + 1)];
  const counts = new Array(BARS).fill(0);
  for (const value of values) counts[Math.min(BARS - 1, Math.floor(((value - low) / (high - low)) * BARS))] += 1;
  const most = Math.max(...counts);
  const bar = (count, index) => {
    const height = count ? Math.max(2, (count / most) * HEIGHT) : 0;
    const x = (index * WIDTH) / BARS;
    return html`<rect key=${index} x=${x + 1} y=${HEIGHT - height} width=${WIDTH / BARS - 2} height=${height}><title>${titleOf(index, count)}</title></rect>`;
  };
  const titleOf = (index, count) => `${count} from ${Math.round(low + (index * (high - low)) / BARS)} ms`;
  return html`
    <figure class="histogram">
      <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${label}>${counts.map(bar)}</svg>
      <figcaption><span>${short(low)}</span><span>${short((low + high) / 2)}</span><span>≥ ${short(high)}</span></figcaption>
    </figure>
  `;
}

/** The smallest of the sorted values that is not below the given share of them. */
export const sharePoint = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];

const short = (ms) => `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
