/** Preact and its hooks with templates: html`<p class="small">${text}</p>`. Text in a template is never parsed as markup. */

import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export { createRef, render } from "./vendor/preact.js";
export * from "./vendor/hooks.js";

export const html = htm.bind(h);
