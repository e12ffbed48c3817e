/** The request of the form as calls that work when pasted, beside the answer. */

import { exampleOf } from "./examples.js";
import { valuesOf } from "./fields.js";
import { hasKey } from "./key.js";
import { html, useState } from "./lib.js";
import { snippetsOf } from "./snippets.js";
import { Tabs } from "./tabs.js";

/** `loaded`: see useExamples. */
export function Samples({ pipeline, fields, draft, loaded }) {
  const [language, setLanguage] = useState("curl");
  const [isStream, setStream] = useState(false);
  const example = exampleOf(loaded, draft);
  const files = fields.filter(({ name, control }) => control === "file" && draft[name]);
  const snippets = snippetsOfDraft({ pipeline, fields, draft, example, files, isStream });
  const title = language in (snippets ?? {}) ? language : "curl";
  return html`
    <section class="card samples" aria-label="Call this pipeline">
      <h2>Call this pipeline</h2>
      ${snippets === null
        ? html`<p class="empty">The form has a value that is missing or cannot be sent.</p>`
        : html`
          <div class="languages">
            <${Tabs} names=${Object.keys(snippets)} chosen=${title} label="Language" panel="code" onChoose=${setLanguage} />
            ${pipeline.streams && html`<${StreamOption} isChecked=${isStream} onChange=${setStream} />`}
          </div>
          <div class="sample" id="code" role="tabpanel" aria-label=${title}><${Copy} key=${title} text=${snippets[title]} /><pre tabindex="0">${snippets[title]}</pre></div>
          ${!example && !pipeline.sessions && files.map(({ name }) => html`<${FileNote} key=${name} file=${draft[name]} />`)}`}
    </section>`;
}

/** Returns null if the form has a value that cannot be sent. For a pipeline with sessions, the calls of its sample. */
function snippetsOfDraft({ pipeline, fields, draft, example, files, isStream }) {
  if (pipeline.sessions) return { curl: pipeline.samples.curl, Python: pipeline.samples.python, JavaScript: pipeline.samples.javascript };
  const names = Object.fromEntries(files.map(({ name }) => [name, baseOf(draft[name].name)]));
  try {
    const sent = Object.entries(valuesOf(fields, draft)).filter(([name]) => !(name in names));
    return snippetsOf({ pipeline, base: location.origin, values: Object.fromEntries(sent), files: names, example, isStream, withKey: hasKey() });
  } catch {
    return null;
  }
}

const baseOf = (path) => path.split("/").at(-1);

function StreamOption({ isChecked, onChange }) {
  return html`<label class="explain"><input type="checkbox" checked=${isChecked} onChange=${(event) => onChange(event.currentTarget.checked)} />as a stream</label>`;
}

/** The user has a chosen file. A file of an example or of the clipboard can be saved. */
function FileNote({ file: { name, url, isOwn } }) {
  const base = baseOf(name);
  return html`<p class="small">The call reads ${base} in the current folder. ${!isOwn && html`<a href=${url} download=${base}>Save ${base}</a>`}</p>`;
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
