/** Two sections that are closed at first and cost nothing then: what the pipelines do now, and what needs attention. */

import { html, useEffect, useState } from "./lib.js";

export function Overview() {
  return html`
    <${Section} title="Live" load=${async () => (await import("./live-panel.js")).LivePanel} />
    <${Section} title="Findings" load=${async () => (await import("./findings.js")).Findings} />
  `;
}

/** `load` returns the component of the content, which is loaded and shown only while the section is open. */
function Section({ title, load }) {
  const [isOpen, setOpen] = useState(false);
  const [Content, setContent] = useState(null);
  useEffect(() => {
    if (isOpen && Content === null) load().then((loaded) => setContent(() => loaded));
  }, [isOpen]);
  return html`
    <details class="overview" data-section=${title.toLowerCase()} onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary><h2>${title}</h2></summary>
      ${isOpen && Content !== null ? html`<${Content} />` : null}
    </details>
  `;
}
