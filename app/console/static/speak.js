/** Speak to a pipeline: the microphone or a file, a picture of the sound, and the text that grows meanwhile. */

import { get, problemIn } from "./api.js";
import { partsOf } from "./hearing.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { Listening, PEAK_SAMPLES } from "./listening.js";
import { ProblemNotice } from "./problem.js";
import { RATE_HZ, openMicrophone, samplesOf } from "./sound.js";

const SPAN_S = 12;
const [WIDTH, HEIGHT] = [720, 96];
const STATES = {
  opening: "Opening…",
  live: "Listening. What you say is sent while you speak.",
  ending: "Waiting for the rest of the text…",
  ended: "Ended.",
};
/** One button, so that it keeps the focus. */
const BUTTONS = { opening: "Stop", live: "Stop", ending: "End now" };

/** Another address, and leaving the pipeline, end the session. */
export function Speak({ pipeline }) {
  const { input } = useMemo(() => partsOf(pipeline), [pipeline]);
  const [heard, setHeard] = useState(null);
  const running = useRef(null);
  useEffect(() => {
    const close = () => running.current?.close();
    addEventListener("hashchange", close);
    return () => {
      removeEventListener("hashchange", close);
      close();
    };
  }, []);
  const start = (source) => {
    running.current?.close();
    running.current = new Listening(pipeline, setHeard);
    running.current.run(source);
  };
  const startWith = (content) =>
    start(async (push, finish) => {
      push(await samplesOf(await content()));
      finish();
      return () => undefined;
    });
  const pick = ({ currentTarget }) => {
    const [file] = currentTarget.files;
    if (file) startWith(() => file.arrayBuffer());
    currentTarget.value = ""; // so that the same file can be chosen again
  };
  const hasSample = pipeline.examples.some(({ name, files }) => name === "sample" && input in files);
  const isRunning = heard !== null && heard.state !== "ended";
  const press = () => {
    if (!isRunning) start(openMicrophone);
    else if (heard.state === "ending") running.current.close();
    else running.current.finish();
  };
  return html`
    <section class="card speak" aria-label="Speak to your Triton" data-state=${heard?.state ?? "idle"}>
      <h2>Speak to your Triton</h2>
      <div class="actions">
        <button type="button" class="primary" id="speak" onClick=${press}>${BUTTONS[heard?.state] ?? "Speak"}</button>
        <label class="pick">Use a file<input type="file" name="sound" accept="audio/*" disabled=${isRunning} onChange=${pick} /></label>
        ${hasSample && html`<button type="button" id="use-sample" disabled=${isRunning} onClick=${() => startWith(() => sampleOf(pipeline, input))}>Use the sample</button>`}
      </div>
      <p class="small" role="status">${heard === null ? "The microphone is opened when you press Speak, and closed when you press Stop." : STATES[heard.state]}</p>
      ${heard?.problem && html`<${ProblemNotice} problem=${heard.problem} />`}
      ${heard !== null && html`<${Picture} ...${heard} />`}
      <div class="written" role="group" aria-label="Text" tabindex="0">
        <span class="final" aria-live="polite">${heard?.text}</span>${" "}<span class="partial">${heard?.partial}</span>
        ${!heard?.text && !heard?.partial && html`<span class="empty">The text appears here.</span>`}
      </div>
    </section>`;
}

/** Returns the bytes of the pipeline's sample. Raises Problem. */
async function sampleOf(pipeline, input) {
  const { values } = await get(`${pipeline.url}/examples/sample`);
  return Uint8Array.from(atob(values[input]), (each) => each.charCodeAt(0)).buffer;
}

/** The newest seconds of the sound: its loudness, the segments with speech, and a line for the score of speech. See Listening. */
function Picture({ peaks, scores, segments, sent_s: sent, answered_s: answered }) {
  const from = Math.max(0, sent - SPAN_S);
  const x = (time) => (((time - from) / SPAN_S) * WIDTH).toFixed(1);
  const points = (values, each_s) => {
    const first = Math.max(0, Math.floor(from / each_s));
    return values.slice(first).map((value, index) => [x((first + index) * each_s), value]);
  };
  const bars = points(peaks, PEAK_SAMPLES / RATE_HZ).map(([at, peak]) => `M${at} ${(HEIGHT / 2 - half(peak)).toFixed(1)}v${(2 * half(peak)).toFixed(1)}`);
  const line = points(scores, answered / scores.length).map(([at, score], index) => `${index ? "L" : "M"}${at} ${((1 - score) * (HEIGHT - 4) + 2).toFixed(1)}`);
  const shown = segments.filter(([, end]) => end > from).map(([start, end]) => [Math.max(start, from), end]);
  return html`
    <figure class="sound">
      <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${labelOf(sent, segments)}>
        ${shown.map(([start, end], index) => html`<rect key=${index} x=${x(start)} y="0" width=${x(end) - x(start)} height=${HEIGHT} />`)}
        <path class="wave" d=${bars.join("")} />
        <path class="score" d=${line.join("")} />
      </svg>
      <figcaption class="small"><span class="heard">speech</span> <span class="line accent">score of speech, from 0 to 1</span> <span class="seconds">${sent.toFixed(1)} s sent, ${answered.toFixed(1)} s answered</span></figcaption>
    </figure>`;
}

/** Half the height of a bar. The root makes quiet speech visible. */
const half = (peak) => Math.max(0.01, Math.sqrt(peak)) * (HEIGHT / 2 - 2);

function labelOf(sent, segments) {
  const spans = segments.slice(-10).map(([start, end]) => `${start.toFixed(1)} to ${end.toFixed(1)} s`);
  return `${sent.toFixed(0)} seconds of sound; ${spans.length ? `speech from ${spans.join(", ")}` : "no speech yet"}`;
}
