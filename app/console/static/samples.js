/** Sample calls that work when pasted. */

import { element } from "./dom.js";

const TITLES = { curl: "curl", curl_stream: "curl, as a stream", javascript: "JavaScript", python: "Python" };

export function samplesOf(samples) {
  const blocks = Object.entries(samples).map(([name, code]) => sampleOf(TITLES[name] ?? name, code));
  return blocks.length ? element("section", { class: "samples" }, element("h2", {}, "Call this pipeline"), ...blocks) : null;
}

function sampleOf(title, code) {
  const copy = element("button", { type: "button", class: "copy", click: () => copied(copy, code) }, "Copy");
  return element("details", {}, element("summary", {}, title), element("div", { class: "sample" }, copy, element("pre", {}, code)));
}

async function copied(button, code) {
  await navigator.clipboard.writeText(code);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
