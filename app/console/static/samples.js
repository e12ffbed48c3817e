/** The request of the form as calls that work when pasted. */

import { valuesOf } from "./fields.js";
import { hasKey } from "./key.js";
import { html, useState } from "./lib.js";
import { snippetsOf } from "./snippets.js";

export function Samples({ pipeline, fields, draft }) {
  const snippets = snippetsOfDraft(pipeline, fields, draft);
  return html`
    <section class="samples" aria-label="Call this pipeline">
      <h2>Call this pipeline</h2>
      ${snippets === null
        ? html`<p class="empty">The form has a value that cannot be sent.</p>`
        : Object.entries(snippets).map(([title, code]) => html`<${Sample} key=${title} title=${title} code=${code} />`)}
    </section>`;
}

/** A file that is not chosen yet has the name of its field. */
function snippetsOfDraft(pipeline, fields, draft) {
  const isFile = ({ name, control, isRequired }) => control === "file" && (isRequired || draft[name]);
  const files = Object.fromEntries(fields.filter(isFile).map(({ name }) => [name, draft[name]?.name ?? name]));
  const others = fields.filter(({ control }) => control !== "file");
  try {
    const values = valuesOf(others, draft);
    return snippetsOf({ url: location.origin + pipeline.url, values, files, streams: pipeline.streams, withKey: hasKey() });
  } catch {
    return null;
  }
}

function Sample({ title, code }) {
  return html`
    <details>
      <summary>${title}</summary>
      <div class="sample"><${Copy} text=${code} /><pre>${code}</pre></div>
    </details>`;
}

/** `label`: "Copy" if absent. */
export function Copy({ text, label = "Copy", isQuiet = false }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button type="button" class=${isQuiet ? "quiet" : "copy"} onClick=${copy}>${isCopied ? "Copied" : label}</button>`;
}
