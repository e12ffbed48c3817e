/** A chart of lines over time with a scale, drawn by uPlot on a canvas. */

import { html, useEffect, useRef, useState } from "./lib.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT_PX = 92;
const FONT = "11px system-ui, sans-serif";

/**
 * `times` in seconds, the newest is 0. `lines`: `{ values, colour }`, where `colour` is the name of a CSS variable and a
 * value may be null. `label` says what the chart shows, for those who do not see it. `spanS`: the time that the chart covers.
 * `textOf`: the text of a value.
 */
export function Chart({ times, lines, label, spanS, textOf }) {
  const place = useRef(null);
  const plot = useRef(null);
  const look = useLook(place);
  useEffect(() => {
    if (!look.width) return undefined;
    plot.current = new uPlot(optionsOf(lines, look.width, spanS, textOf), dataOf(times, lines), place.current);
    return () => plot.current.destroy();
  }, [look.width, look.isDark, lines.length, spanS]);
  useEffect(() => plot.current?.setData(dataOf(times, lines)), [times, lines]);
  return html`<div class="chart" ref=${place} role="img" aria-label=${label}></div>`;
}

const dataOf = (times, lines) => [times, ...lines.map(({ values }) => values)];

function optionsOf(lines, width, spanS, textOf) {
  return {
    width,
    height: HEIGHT_PX,
    cursor: { show: false },
    legend: { show: false },
    padding: [8, 14, 0, 0],
    axes: [
      { ...axisOf(20), splits: [-spanS, -spanS / 2, 0], values: [`-${spanS / 60} min`, `-${spanS / 120} min`, "now"] },
      { ...axisOf(52), splits: (_plot, _axis, low, high) => [low, high / 2, high], values: (_plot, splits) => splits.map((value) => (value === 0 ? "0" : textOf(value))) },
    ],
    scales: { x: { time: false, range: [-spanS, 0] }, y: { range: (_plot, _low, high) => [0, topOf(high)] } },
    series: [{}, ...lines.map(({ colour, isFilled }) => lineOf(colour, isFilled))],
  };
}

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** `size`: its place in pixels. */
const axisOf = (size) => ({ size, gap: 4, font: FONT, stroke: colourOf("--quiet"), grid: { stroke: colourOf("--line"), width: 1 }, ticks: { show: false } });

/** Returns 1, 2 or 5 times a power of ten that is not below the value; 1 for 0, and for no value. */
export function topOf(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

const lineOf = (name, isFilled) => {
  const colour = colourOf(name);
  return { stroke: colour, width: 1.5, fill: isFilled ? `${colour}22` : undefined, points: { show: false }, spanGaps: false };
};

/** The width of the place and whether the page is dark: a canvas does not follow either by itself. */
function useLook(place) {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const [look, setLook] = useState({ width: 0, isDark: scheme.matches });
  useEffect(() => {
    const element = place.current; // its observer may be called once more after the row has gone
    const changed = () => setLook({ width: Math.floor(element.clientWidth), isDark: scheme.matches });
    const observer = new ResizeObserver(changed);
    observer.observe(element);
    scheme.addEventListener("change", changed);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", changed);
    };
  }, []);
  return look;
}
