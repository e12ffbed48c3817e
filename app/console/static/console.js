/** The page: the list of pipelines, the open pipeline (its name is the URL fragment), and the gateway's health. */

import { Problem, get } from "./api.js";
import { element } from "./dom.js";
import { KeyForm } from "./key.js";
import { html, render } from "./lib.js";
import { Overview } from "./overview.js";
import { problemNode } from "./result.js";
import { Workbench } from "./workbench.js";

const HEALTH_MS = 5000;

const work = document.getElementById("work");
const list = document.getElementById("pipelines");
const health = document.getElementById("health");
let open = null;

async function showList() {
  const { values } = await get("/v1/pipelines");
  list.replaceChildren(...values.pipelines.map(entryOf));
  return values.pipelines;
}

function entryOf({ name, description, state, streams }) {
  const note = state === "ready" ? (streams ? "streams" : "") : state;
  const title = element("span", { class: "title" }, name, note ? element("small", {}, note) : null);
  return element("li", {}, element("a", { href: `#${name}`, "data-name": name }, title, element("span", {}, description || "")));
}

async function show(name) {
  open?.close();
  open = null;
  mark(name);
  const { values } = await get(`/v1/pipelines/${encodeURIComponent(name)}`);
  if (name !== named()) return;
  if (values.inputs) {
    open = new Workbench(values);
    work.replaceChildren(open.node);
  } else work.replaceChildren(element("p", { class: "empty" }, `${name} is not ready. ${values.state_detail}`));
  document.title = `${name} · triton-gateway`;
}

function mark(name) {
  for (const link of list.querySelectorAll("a")) {
    if (link.dataset.name === name) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "center" });
    } else link.removeAttribute("aria-current");
  }
}

const named = () => decodeURIComponent(location.hash.slice(1));

async function watchHealth() {
  const isReady = await fetch("/health/ready").then((response) => response.ok, () => null);
  health.textContent = isReady === null ? "unreachable" : isReady ? "ready" : "not ready";
  health.className = isReady ? "chip good" : "chip bad";
  setTimeout(watchHealth, HEALTH_MS);
}

function failed(error) {
  work.replaceChildren(problemNode(error instanceof Problem ? error : { problem: { title: error.message } }));
}

async function load() {
  work.replaceChildren();
  const pipelines = await showList();
  const first = pipelines.find(({ state }) => state === "ready") ?? pipelines[0];
  if (!first) {
    work.append(element("p", { class: "empty" }, "No model is ready yet."));
    return;
  }
  if (!named()) history.replaceState(null, "", `#${first.name}`);
  await show(named());
}

addEventListener("hashchange", () => {
  if (named()) show(named()).catch(failed);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  work.focus();
});
addEventListener("pagehide", () => open?.close());
const keyForm = new KeyForm(document.getElementById("key"), () => load().catch(failed));
addEventListener("unauthenticated", () => keyForm.ask());
render(html`<${Overview} />`, document.getElementById("overview"));
watchHealth();
load().catch(failed);
