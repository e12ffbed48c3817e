/** A small chart of one or two lines over time, drawn by uPlot on a canvas. */

import { html, useEffect, useRef, useState } from "./lib.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT_PX = 44;

/**
 * `times` in seconds, the newest is 0. `lines`: `{ values, colour }`, where `colour` is the name of a CSS variable and a
 * value may be null. `label` says what the chart shows, for those who do not see it. `spanS`: the time that the chart covers.
 */
export function Chart({ times, lines, label, spanS }) {
  const place = useRef(null);
  const plot = useRef(null);
  const look = useLook(place);
  useEffect(() => {
    if (!look.width) return undefined;
    plot.current = new uPlot(optionsOf(lines, look.width, spanS), dataOf(times, lines), place.current);
    return () => plot.current.destroy();
  }, [look.width, look.isDark, lines.length, spanS]);
  useEffect(() => plot.current?.setData(dataOf(times, lines)), [times, lines]);
  return html`<div class="chart" ref=${place} role="img" aria-label=${label}></div>`;
}

const dataOf = (times, lines) => [times, ...lines.map(({ values }) => values)];

function optionsOf(lines, width, spanS) {
  return {
    width,
    height: HEIGHT_PX,
    cursor: { show: false },
    legend: { show: false },
    padding: [4, 2, 2, 2],
    axes: [{ show: false }, { show: false }],
    scales: { x: { time: false, range: [-spanS, 0] }, y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    series: [{}, ...lines.map(({ colour, isFilled }) => lineOf(colour, isFilled))],
  };
}

const lineOf = (name, isFilled) => {
  const colour = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return { stroke: colour, width: 1.5, fill: isFilled ? `${colour}22` : undefined, points: { show: false }, spanGaps: false };
};

/** The width of the place and whether the page is dark: a canvas does not follow either by itself. */
function useLook(place) {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const [look, setLook] = useState({ width: 0, isDark: scheme.matches });
  useEffect(() => {
    const changed = () => setLook({ width: Math.floor(place.current.clientWidth), isDark: scheme.matches });
    const observer = new ResizeObserver(changed);
    observer.observe(place.current);
    scheme.addEventListener("change", changed);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", changed);
    };
  }, []);
  return look;
}
