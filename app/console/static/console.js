/** The page: the list of pipelines, and the open pipeline, "Operation", or the question for an API key. */

import { get, problemIn } from "./api.js";
import { hasKey } from "./key.js";
import { KeyPrompt, forgetKey, showForget } from "./key-prompt.js";
import { lazy } from "./lazy.js";
import { html, render } from "./lib.js";
import { OPERATION, openLink } from "./link.js";
import { PipelineList } from "./pipeline-list.js";
import { ProblemNotice } from "./problem.js";
import { Workbench } from "./workbench.js";

const Operation = lazy(async () => (await import("./operation.js")).Operation);
const NOT_READY = html`<a href=${`#${OPERATION}`}>Operation</a> shows what is missing.`;
const work = document.getElementById("work");
const list = document.getElementById("pipelines");
const operation = document.getElementById("operation");
const forget = document.getElementById("forget");
let pipelines = [];
let mayExplain = false;
let last = "";
let isWaiting = false;

const showList = (open) => render(html`<${PipelineList} pipelines=${pipelines} open=${open} />`, list);

async function show() {
  const { name, inputs } = openLink();
  showList(name);
  operation.removeAttribute("aria-current");
  if (name === OPERATION) {
    operation.setAttribute("aria-current", "page");
    render(html`<${Operation} pipelines=${pipelines} last=${last} />`, work);
    document.title = "Operation · triton-gateway";
    return;
  }
  last = name;
  const { values } = await get(`/v1/pipelines/${encodeURIComponent(name)}`);
  if (name !== openLink().name) return;
  const isReady = Boolean(values.inputs);
  isWaiting = !isReady;
  const notReady = html`<h1>${name}</h1><p class="empty">${name} is not ready. ${values.state_detail} ${NOT_READY}</p>`;
  render(isReady ? html`<${Workbench} key=${location.hash} pipeline=${values} linked=${inputs} mayExplain=${mayExplain} />` : notReady, work);
  document.title = `${name} · triton-gateway`;
}

function failed(error) {
  const problem = problemIn(error);
  isWaiting = problem.status !== 401;
  if (problem.status === 401) askForKey(hasKey() && problem);
  else render(html`<${ProblemNotice} problem=${problem} />`, work);
}

/** `refused`: the problem of the key that was used last; false if there was none. */
function askForKey(refused) {
  render(null, list);
  render(html`<${KeyPrompt} refused=${refused} onKey=${reload} />`, work);
}

async function load() {
  render(null, work);
  ({ pipelines, may_explain: mayExplain } = (await get("/v1/pipelines")).values);
  const first = pipelines.find(({ state }) => state === "ready") ?? pipelines[0];
  isWaiting = !first;
  if (!first && !openLink().name) {
    render(html`<p class="empty">No model is ready yet. ${NOT_READY}</p>`, work);
    return;
  }
  if (!openLink().name) history.replaceState(null, "", `#${encodeURIComponent(first.name)}`);
  await show();
}

function reload() {
  showForget();
  load().catch(failed);
}

/** Ctrl+Enter presses the button that sends, wherever the focus is: of the form, the chat, Speak or the load test. */
function sendOnEnter(event) {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.defaultPrevented) return;
  const button = [...work.querySelectorAll("button.primary:enabled")].find((each) => each.checkVisibility());
  event.preventDefault(); // also without a button: a link that has the focus would open a new tab
  button?.click();
}

addEventListener("hashchange", () => (openLink().name ? show() : load()).catch(failed));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  work.focus();
});
addEventListener("pagehide", () => render(null, work));
addEventListener("pageshow", (event) => {
  if (event.persisted) reload();
});
addEventListener("ready", () => {
  if (isWaiting) reload();
});
addEventListener("unauthenticated", () => askForKey(false));
forget.addEventListener("click", () => {
  forgetKey();
  reload();
});
addEventListener("keydown", sendOnEnter);
reload();
