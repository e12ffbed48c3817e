/** A section for development: load. The page shows it only if the gateway offers it. */

import { get } from "./api.js";
import { html, useEffect, useState } from "./lib.js";

/** `url` of a unary request, `body()`: the request of the form as it is now. */
export function TrySection({ url, body }) {
  const [Load, setLoad] = useState(null);
  useEffect(() => {
    offeredLoad().then((found) => setLoad(() => found));
  }, []);
  if (Load === null) return null;
  return html`
    <details class="overview" data-section="load">
      <summary><h2>Load</h2></summary>
      <${Load} url=${url} body=${body} />
    </details>
  `;
}

async function offeredLoad() {
  const { values } = await get("/console/settings").catch(() => ({ values: { may_load: false } }));
  return values.may_load ? (await import("./load.js")).Load : null;
}
