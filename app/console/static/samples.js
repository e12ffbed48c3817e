/** Calls of the pipeline that work when pasted, as the API tells them, beside the answer. */

import { html, useState } from "./lib.js";
import { Tabs } from "./tabs.js";

const TITLES = { curl: "curl", python: "Python", javascript: "JavaScript", curl_stream: "stream" };

/** `samples`: code by language. */
export function Samples({ samples }) {
  const [chosen, setChosen] = useState(TITLES.curl);
  const calls = Object.fromEntries(Object.entries(TITLES).flatMap(([language, title]) => (samples[language] ? [[title, samples[language]]] : [])));
  return html`
    <section class="card samples" aria-label="Call this pipeline">
      <h2>Call this pipeline</h2>
      <div class="languages"><${Tabs} names=${Object.keys(calls)} chosen=${chosen} label="Language" panel="code" onChoose=${setChosen} /></div>
      <div class="sample" id="code" role="tabpanel" aria-label=${chosen}><${Copy} key=${chosen} text=${calls[chosen]} /><pre tabindex="0"><${Words} text=${calls[chosen]} /></pre></div>
    </section>`;
}

/** Lines break only between words, and never between an option such as `-F` and its value. */
const Words = ({ text }) => text.match(/--?[A-Za-z-]+ \S+|\S+|\s+/g).map((part) => (part.trim() ? html`<span class="word">${part}</span>` : part));

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
