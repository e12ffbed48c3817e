/** The page "Operation": traffic, configuration check and load test of the gateway. */

import { get } from "./api.js";
import { Findings } from "./findings.js";
import { html } from "./lib.js";
import { lazy } from "./lazy.js";
import { LivePanel } from "./live-panel.js";

const Load = lazy(async () => {
  const { values } = await get("/console/settings").catch(() => ({ values: { may_load: false } }));
  return values.may_load ? (await import("./load.js")).LoadTest : null;
});

/** `pipelines`: their summaries. `last`: the name of the pipeline that was open before, or empty. */
export function Operation({ pipelines, last }) {
  return html`
    <div class="overviews">
      <h1>Operation</h1>
      <${Section} name="traffic" title="Traffic"><${LivePanel} /><//>
      <${Section} name="check" title="Configuration check"><${Findings} /><//>
      <${Load} pipelines=${pipelines} last=${last} />
    </div>`;
}

export function Section({ name, title, children }) {
  return html`
    <section class="card" data-section=${name} aria-label=${title}>
      <h2>${title}</h2>
      ${children}
    </section>`;
}
