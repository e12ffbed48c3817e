/** The list of the pipelines, with a filter if there are many. */

import { html, useEffect, useRef, useState } from "./lib.js";

const MANY = 12;

/** `pipelines`: their summaries. `open`: the name of the pipeline that is shown. */
export function PipelineList({ pipelines, open }) {
  const [filter, setFilter] = useState("");
  const words = filter.toLowerCase().split(/\s+/);
  const found = pipelines.filter(({ name, description }) => words.every((word) => `${name} ${description}`.toLowerCase().includes(word)));
  const openFirst = (event) => {
    if (event.key === "Enter" && found.length) location.hash = encodeURIComponent(found[0].name);
  };
  return html`
    ${pipelines.length > MANY && html`
      <div class="filter">
        <input type="search" aria-label="Filter the pipelines" placeholder="Filter" value=${filter} onInput=${(event) => setFilter(event.currentTarget.value)} onKeyDown=${openFirst} />
        <small role="status">${found.length} of ${pipelines.length}</small>
      </div>`}
    <ul>${found.map((each) => html`<${Entry} key=${each.name} pipeline=${each} isOpen=${each.name === open} />`)}</ul>`;
}

function Entry({ pipeline, isOpen }) {
  const { name, description, state, streams, decoupled } = pipeline;
  const link = useRef(null);
  useEffect(() => {
    if (isOpen) link.current.scrollIntoView({ block: "nearest", inline: "center" });
  }, [isOpen]);
  const note = state === "ready" ? (streams && decoupled ? "streams" : "") : state;
  return html`
    <li>
      <a ref=${link} href=${`#${encodeURIComponent(name)}`} aria-current=${isOpen ? "page" : null}>
        <span class="title">${name}${note ? html`<small>${note}</small>` : null}</span>
        <span>${description || ""}</span>
      </a>
    </li>`;
}
