/** One pipeline: its description, its form, its answer, and its history. */

import { Problem, post, problemIn, remove } from "./api.js";
import { Answer } from "./answer.js";
import { kept } from "./drafts.js";
import { Gallery, sampleDraft, useExamples, withFiles } from "./examples.js";
import { EXPLAIN } from "./explain.js";
import { InvalidDraft, draftOf, errorsOf, fieldsOf, linkedDraft, valuesOf } from "./fields.js";
import { Fields } from "./form.js";
import { Graph } from "./graph.js";
import { History } from "./history.js";
import { decoded } from "./image.js";
import { lazy } from "./lazy.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { linkTo } from "./link.js";
import { partsOf } from "./hearing.js";
import { LiveStream } from "./live.js";
import { useNarrow } from "./narrow.js";
import { ProblemNotice } from "./problem.js";
import { Copy, Samples } from "./samples.js";
import { SessionButtons, onlyStep, useSession } from "./session.js";
import { Tabs } from "./tabs.js";

const MOST_RUNS = 20;
const Chat = lazy(async () => (await import("./chat.js")).Chat);
const Speak = lazy(async () => (await import("./speak.js")).Speak);
const Explanation = lazy(async () => (await import("./waterfall.js")).Explanation);

let lastRun = 0;

/** `linked`: texts by field name, from a link. `mayExplain`: whether the gateway explains requests of this caller. */
export function Workbench({ pipeline, linked, mayExplain }) {
  const fields = useMemo(() => fieldsOf(pipeline), [pipeline]);
  const initial = kept.get(pipeline.name) ?? { runs: [], draft: draftOf(fields) };
  const hasLink = Object.keys(linked).length > 0;
  const [draft, setDraft] = useState(() => (hasLink ? linkedDraft(fields, linked) : { ...draftOf(fields), ...initial.draft }));
  const [runs, setRuns] = useState(initial.runs);
  const [errors, setErrors] = useState({});
  const [view, setView] = useState(null);
  const [isExplained, setExplained] = useState(false);
  const [explanations, setExplanations] = useState({});
  const form = useRef(null);
  const loaded = useExamples(pipeline, fields, (sample) => setDraft((before) => withFiles(before, sample)));
  const [chosen, setChosen] = useState(0);
  useEffect(() => {
    if (chosen && !pipeline.sessions) submitForm(form.current); // a step cannot be taken back
  }, [chosen]);
  const isLeft = useRef(false);
  useEffect(() => () => {
    isLeft.current = true;
  }, []);
  useEffect(() => {
    kept.set(pipeline.name, { draft, runs });
  }, [draft, runs]);

  const change = (name, held) => {
    setDraft((before) => ({ ...before, [name]: held }));
    const field = fields.find((each) => each.name === name);
    const found = field.control === "number" ? errorsOf([field], { [name]: held }) : {}; // others are checked when they are sent
    setErrors(({ [name]: _, ...others }) => ({ ...others, ...found }));
    if (field.control === "file") setChosen((count) => count + 1);
  };
  const replace = (found) => {
    setDraft(found);
    setErrors({});
  };
  const keep = (run) => setRuns((before) => [run, ...before].slice(0, MOST_RUNS));
  const showAtFields = (error) => {
    const found = errorsIn(error, fields);
    setErrors(found);
    form.current?.elements[Object.keys(found)[0]]?.focus();
  };
  const failed = (error, request) => {
    const run = { ...request, problem: problemIn(error), answer: error.answer, requestId: error.answer?.requestId };
    if (!(error instanceof InvalidDraft)) keep(run);
    setView(error instanceof InvalidDraft ? null : { run });
    showAtFields(error);
  };
  const session = useSession(pipeline);
  const send = session.url ? session.step(false) : pipeline.sessions ? onlyStep : post;
  /** `sending`: how the request is sent, see answered; null: as a stream. */
  const start = async (used, sending) => {
    const isUnary = sending !== null;
    const request = { id: ++lastRun, at: new Date(), draft: used, isUnary, isExplained, sent: {} };
    setErrors({});
    setView({ isBusy: true });
    try {
      request.sent = valuesOf(fields, used);
      if (isUnary) {
        const run = await answered(pipeline, fields, request, sending);
        keep(run);
        setView({ run });
      } else show(await streamed(pipeline, request));
    } catch (error) {
      failed(error, request);
    }
  };
  const show = (stream) => (isLeft.current ? remove(stream.url).catch(() => undefined) : setView({ stream }));
  const ended = (request) => ({ state, outputs, ...answer }) => {
    const run = { ...request, ...answer, ending: `stream · ${state} · ${outputs} outputs` };
    keep(run);
    setView((now) => ({ ...now, run }));
  };
  const openSession = async () => {
    setView({ isBusy: true });
    try {
      await session.open();
      setView(null);
    } catch (error) {
      failed(error, { id: ++lastRun, at: new Date(), draft, sent: {}, isUnary: true });
    }
  };
  const submit = (event) => {
    event.preventDefault();
    const id = event.submitter?.id;
    if (id === "open") openSession();
    else if (id === "last-step") start(draft, session.step(true));
    else start(draft, id === "stream" ? null : send);
  };
  const rerun = (run) => {
    setDraft(run.draft);
    start(run.draft, run.isUnary ? send : null);
  };
  const explainedId = view?.run?.isExplained ? view.run.requestId : null;
  const explain = explanations[explainedId] ?? null;
  const found = (values) => setExplanations((before) => ({ ...before, [values.request_id]: values }));
  const isNarrow = useNarrow();
  const graph = html`<${Graph} key="graph" pipeline=${pipeline} explain=${explain} />`;
  const isBusy = Boolean(view?.isBusy || (view?.stream && !view.run));
  return html`
    <${Tabbed} heading=${html`<${Heading} pipeline=${pipeline} />`} pipeline=${pipeline}>
      ${!isNarrow && graph}
      <div class="panels" key="panels">
        <form class="card" aria-label="Request" noValidate ref=${form} onSubmit=${submit}>
          <h2>Request</h2>
          <${Gallery} pipeline=${pipeline} fields=${fields} loaded=${loaded} draft=${draft} onChoose=${replace} />
          <${Fields} fields=${fields} draft=${draft} errors=${errors} onChange=${change} />
          ${mayExplain && html`<${ExplainOption} isChecked=${isExplained} onChange=${setExplained} />`}
          ${pipeline.sessions ? html`<${SessionButtons} session=${session} isBusy=${isBusy} />` : html`<${Buttons} pipeline=${pipeline} isBusy=${isBusy} />`}
          <p class="actions">
            <button type="button" class="quiet" onClick=${() => replace(sampleDraft(fields, loaded))}>Reset</button>
            <${Copy} text=${() => linkTo(pipeline.name, fields, draft)} label="Copy a link" isQuiet />
            <small class="hint">Ctrl+Enter sends</small>
          </p>
        </form>
        <div class="stack">
          <section class="card" aria-label="Answer">
            <h2>Answer</h2>
            <div class="answer"><${View} pipeline=${pipeline} view=${view} draft=${draft} onEnd=${ended} /></div>
            ${explainedId && html`<${Explanation} key=${explainedId} requestId=${explainedId} graph=${pipeline.graph} explain=${explain} onFound=${found} />`}
            <${History} fields=${fields} runs=${runs} shown=${view?.run ?? null} onShow=${(run) => setView({ run })} onRerun=${rerun} />
          </section>
          <${Samples} samples=${pipeline.samples} />
        </div>
      </div>
      ${isNarrow && graph}
    <//>`;
}

/** The tab "Requests" has the children; without other tabs they are shown alone. A tab that was shown once is kept while it is hidden. */
function Tabbed({ heading, pipeline, children }) {
  const hears = partsOf(pipeline) !== null;
  const [tab, setTab] = useState(hears ? "Speak" : "Requests");
  const [seen, setSeen] = useState([tab]);
  const choose = (name) => {
    setTab(name);
    setSeen((before) => [...new Set([...before, name])]);
  };
  const panels = {
    ...(hears ? { Speak: html`<${Speak} pipeline=${pipeline} />` } : {}),
    Requests: children,
    ...(pipeline.openai?.chat ? { Chat: html`<${Chat} pipeline=${pipeline} />` } : {}),
  };
  const names = Object.keys(panels);
  if (names.length === 1) return html`<div>${heading}${children}</div>`;
  return html`
    <div>
      ${heading}
      <${Tabs} names=${names} chosen=${tab} label="Views" panel="panel" onChoose=${choose} />
      <div id="panel" role="tabpanel" aria-label=${tab}>
        ${Object.entries(panels).map(([name, panel]) => seen.includes(name) && html`<div key=${name} hidden=${name !== tab}>${panel}</div>`)}
      </div>
    </div>`;
}

function View({ pipeline, view, draft, onEnd }) {
  if (view === null) return html`<p class="empty">The answer appears here.</p>`;
  if (view.isBusy) return html`<p class="empty" role="status">…</p>`;
  if (!view.stream) return html`<${Answer} key=${view.run.id} pipeline=${pipeline} run=${view.run} isStale=${view.run.draft !== draft} />`;
  const { url, started, request } = view.stream;
  return html`<${LiveStream} key=${url} pipeline=${pipeline} url=${url} started=${started} onEnd=${onEnd(request)} />`;
}

function Heading({ pipeline }) {
  const { name, description, model, decoupled, streams, sessions, early_exit: exits } = pipeline;
  const words = [`model ${model}`, decoupled ? "decoupled" : "", decoupled && streams ? "streams" : "", sessions ? "sessions" : ""].filter(Boolean);
  const chips = [...words, ...exits.map((reason) => `may exit early: ${reason}`)];
  return html`
    <div class="heading">
      <h1>${name}</h1>
      <p>${description || ""}</p>
      <p class="chips">
        ${chips.map((text) => html`<span class="chip">${text}</span>`)}
        <a class="small" href=${`/docs#/${name}/run_${name}`}>API of ${name}</a>
      </p>
    </div>`;
}

function ExplainOption({ isChecked, onChange }) {
  return html`
    <label class="explain">
      <input type="checkbox" id="explain" checked=${isChecked} onChange=${(event) => onChange(event.currentTarget.checked)} />
      Explain where the time goes
    </label>`;
}

/** The first button is what Enter does: a stream for a model that sends more than one response. */
function Buttons({ pipeline: { streams, decoupled }, isBusy }) {
  const isStream = streams && decoupled;
  const stream = streams && html`<button key="stream" class=${isStream ? "primary" : ""} id="stream" disabled=${isBusy}>Stream</button>`;
  const run = html`<button key="run" class=${isStream ? "" : "primary"} id="run" disabled=${isBusy}>${isStream ? "Run at once" : "Run"}</button>`;
  return html`<p class="actions">${isStream ? [stream, run] : [run, stream]}</p>`;
}

/** Sends the request with `send(url, body, headers)`. Raises Problem. */
async function answered(pipeline, fields, request, send) {
  const picture = fields.find(({ input, name }) => input?.kind === "image" && request.draft[name]);
  const answer = await send(pipeline.url, request.sent, explainHeaders(request));
  const image = picture ? await decoded(request.draft[picture.name].url).catch(() => null) : null;
  return { ...request, values: answer.values, answer, requestId: answer.requestId, image };
}

/** Starts a resumable stream. Raises Problem. */
async function streamed(pipeline, request) {
  const started = performance.now();
  const body = { pipeline: pipeline.name, inputs: request.sent };
  const { values, requestId } = await post("/v1/streams", body, explainHeaders(request));
  return { url: values.url, started, request: { ...request, requestId } };
}

const explainHeaders = ({ isExplained }) => (isExplained ? EXPLAIN : {});

/** Returns the texts of an error by the field that they are about. */
function errorsIn(error, fields) {
  if (error instanceof InvalidDraft) return error.errors;
  const named = error instanceof Problem ? (error.problem.errors ?? []) : [];
  const found = named.map(({ field, problem }) => [fields.find(({ name }) => isWithin(field, name))?.name, problem]);
  return Object.fromEntries(found.filter(([name]) => name));
}

/** Whether an error's field, for example `inputs.topics[2]`, is that field or a part of it. */
const isWithin = (path, name) => path.replace(/^inputs\./, "").split(/[.[]/)[0] === name;

/** Sends the form as its first button does, unless a request runs. */
function submitForm(form) {
  const button = form.querySelector("button:not([type])");
  if (!button.disabled) form.requestSubmit(button);
}
