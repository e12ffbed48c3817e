/** Asks for the API key, and removes it again. */

import { hasKey, keepKey } from "./key.js";
import { html, useEffect, useRef } from "./lib.js";
import { ProblemNotice } from "./problem.js";

const forget = document.getElementById("forget");

export const forgetKey = () => keepKey("");

/** Shows the button that removes the key if there is one. */
export const showForget = () => {
  forget.hidden = !hasKey();
};

/** `refused`: the problem of the key that was used last, or false. `onKey` is called when the user has entered one. */
export function KeyPrompt({ refused, onKey }) {
  const form = useRef(null);
  useEffect(() => form.current.elements.key.focus(), []);
  const use = (event) => {
    event.preventDefault();
    keepKey(form.current.elements.key.value.trim());
    form.current.reset();
    onKey();
  };
  return html`
    <section class="card key-prompt">
      <h1>Enter your API key</h1>
      <p>This gateway answers requests with an API key. Yours is kept until you close this tab.</p>
      <form id="key" class="actions" aria-label="API key" ref=${form} onSubmit=${use}>
        <input type="password" name="key" required autocomplete="off" spellcheck=${false} aria-label="API key" />
        <button class="primary">Use</button>
      </form>
      ${refused && html`<${ProblemNotice} problem=${refused} />`}
    </section>`;
}
