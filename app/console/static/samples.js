/** Sample calls that work when pasted. */

import { html, render, useState } from "./lib.js";

const TITLES = { curl: "curl", curl_stream: "curl, as a stream", javascript: "JavaScript", python: "Python" };

export function samplesOf(samples) {
  const section = document.createElement("div");
  render(html`<${Samples} samples=${samples} />`, section);
  return section;
}

function Samples({ samples }) {
  const blocks = Object.entries(samples).map(([name, code]) => html`<${Sample} key=${name} title=${TITLES[name] ?? name} code=${code} />`);
  return blocks.length ? html`<section class="samples"><h2>Call this pipeline</h2>${blocks}</section>` : null;
}

function Sample({ title, code }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(code);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`
    <details>
      <summary>${title}</summary>
      <div class="sample">
        <button type="button" class="copy" onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button>
        <pre>${code}</pre>
      </div>
    </details>`;
}
