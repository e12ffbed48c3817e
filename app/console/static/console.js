/** The page: the list of pipelines, the open pipeline, and the gateway's health. */

import { get, problemIn } from "./api.js";
import { hasKey, KeyForm } from "./key.js";
import { lazy } from "./lazy.js";
import { html, render } from "./lib.js";
import { OPERATION, openLink } from "./link.js";
import { PipelineList } from "./pipeline-list.js";
import { ProblemNotice } from "./problem.js";
import { Workbench } from "./workbench.js";

const HEALTH_MS = 5000;

const Operation = lazy(async () => (await import("./operation.js")).Operation);
const NOT_READY = html`<a href=${`#${OPERATION}`}>Operation</a> shows what is missing.`;
const work = document.getElementById("work");
const list = document.getElementById("pipelines");
const operation = document.getElementById("operation");
const health = document.getElementById("health");
let pipelines = [];
let mayExplain = false;
let last = "";

const showList = (open) => render(html`<${PipelineList} pipelines=${pipelines} open=${open} />`, list);

async function show() {
  const { name, inputs } = openLink();
  showList(name);
  if (name === OPERATION) operation.setAttribute("aria-current", "page");
  else operation.removeAttribute("aria-current");
  if (name === OPERATION) {
    render(html`<${Operation} pipelines=${pipelines} last=${last} />`, work);
    document.title = "Operation · triton-gateway";
    return;
  }
  last = name;
  const { values } = await get(`/v1/pipelines/${encodeURIComponent(name)}`);
  if (name !== openLink().name) return;
  const isReady = Boolean(values.inputs);
  const notReady = html`<h1>${name}</h1><p class="empty">${name} is not ready. ${values.state_detail} ${NOT_READY}</p>`;
  render(isReady ? html`<${Workbench} key=${location.hash} pipeline=${values} linked=${inputs} mayExplain=${mayExplain} />` : notReady, work);
  document.title = `${name} · triton-gateway`;
}

async function watchHealth() {
  const isReady = await fetch("/health/ready").then((response) => response.ok, () => null);
  health.textContent = isReady === null ? "unreachable" : isReady ? "ready" : "not ready";
  health.className = isReady ? "chip good" : "chip bad";
  setTimeout(watchHealth, HEALTH_MS);
}

function KeyPrompt({ refused }) {
  return html`
    <h1>Enter your API key</h1>
    <p>This gateway answers requests with an API key. Enter yours at the top of the page; it is kept until you close this tab.</p>
    ${refused && html`<${ProblemNotice} problem=${refused} />`}`;
}

function failed(error) {
  const problem = problemIn(error);
  const needsKey = problem.status === 401;
  render(needsKey ? html`<${KeyPrompt} refused=${hasKey() && problem} />` : html`<${ProblemNotice} problem=${problem} />`, work);
}

async function load() {
  render(null, work);
  ({ pipelines, may_explain: mayExplain } = (await get("/v1/pipelines")).values);
  const first = pipelines.find(({ state }) => state === "ready") ?? pipelines[0];
  if (!first && !openLink().name) {
    render(html`<p class="empty">No model is ready yet. ${NOT_READY}</p>`, work);
    return;
  }
  if (!openLink().name) history.replaceState(null, "", `#${encodeURIComponent(first.name)}`);
  await show();
}

addEventListener("hashchange", () => (openLink().name ? show() : load()).catch(failed));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  work.focus();
});
addEventListener("pagehide", () => render(null, work));
addEventListener("pageshow", (event) => {
  if (event.persisted) load().catch(failed);
});
const keyForm = new KeyForm(document.getElementById("key"), () => load().catch(failed));
addEventListener("unauthenticated", () => keyForm.ask());
watchHealth();
load().catch(failed);
