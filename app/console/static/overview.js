/** The last tab: load test, traffic and configuration check. Its sections are loaded with it, and ask only while it is shown. */

import { get } from "./api.js";
import { html, useEffect, useState } from "./lib.js";

const SECTIONS = {
  traffic: { title: "Traffic", load: async () => (await import("./live-panel.js")).LivePanel },
  check: { title: "Configuration check", load: async () => (await import("./findings.js")).Findings },
};

/** `loadTest`: `{url, body}` of the open pipeline, or null. A load test continues while the tab is hidden. */
export function Overview({ isShown, loadTest }) {
  return html`
    <div class="overviews">
      ${loadTest && html`<${Section} name="load" title="Load test" load=${offeredLoad} ...${loadTest} />`}
      ${isShown && Object.entries(SECTIONS).map(([name, section]) => html`<${Section} key=${name} name=${name} ...${section} />`)}
    </div>`;
}

/** `load` returns the component of the content, or null if the gateway does not offer it. */
function Section({ name, title, load, ...rest }) {
  const [Content, setContent] = useState(null);
  useEffect(() => {
    load().then((loaded) => setContent(() => loaded));
  }, []);
  if (Content === null) return null;
  return html`
    <section class="card" data-section=${name} aria-label=${title}>
      <h2>${title}</h2>
      <${Content} ...${rest} />
    </section>`;
}

async function offeredLoad() {
  const { values } = await get("/console/settings").catch(() => ({ values: { may_load: false } }));
  return values.may_load ? (await import("./load.js")).Load : null;
}
