/** Tabs, after the pattern of the ARIA Authoring Practices Guide: arrows move between them. */

import { html, useRef } from "./lib.js";

/** `names`: the tabs. `chosen`: one of them. `label`: what they choose. `panel`: the id of the element that they change. */
export function Tabs({ names, chosen, label, panel, onChoose }) {
  const list = useRef(null);
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const next = (names.indexOf(chosen) + step + names.length) % names.length;
    onChoose(names[next]);
    list.current.children[next].focus();
  };
  return html`
    <div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${move}>
      ${names.map((name) => html`
        <button type="button" key=${name} role="tab" aria-selected=${String(name === chosen)} aria-controls=${panel} tabindex=${name === chosen ? 0 : -1} onClick=${() => onChoose(name)}>${name}</button>`)}
    </div>`;
}
