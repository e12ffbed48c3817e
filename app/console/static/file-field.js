/** An input for a file to drop, paste, choose or photograph. */

import { html, useLayoutEffect, useState } from "./lib.js";
import { Description, FieldError } from "./problem.js";

const IMAGE_URL = /^data:image\/[a-z.+-]+;base64,[A-Za-z0-9+/=]+$/;

/** `held`: the selected file, `{name, url}` with a data URL, or null. */
export function FileField({ field, held, error, onChange }) {
  const { name, isRequired, note, input } = field;
  const [isOver, setOver] = useState(false);
  const id = `field-${name}`;
  const isImage = input.kind === "image";
  const choose = async (file) => {
    if (file) onChange({ name: file.name, url: await dataUrlOf(file) });
  };
  usePasted((clipboard) => {
    const text = clipboard.getData("text").trim();
    if (clipboard.files.length) choose(clipboard.files[0]);
    else if (isImage && IMAGE_URL.test(text)) onChange({ name: "pasted", url: text });
  });
  const over = (isNow) => (event) => {
    event.preventDefault();
    setOver(isNow);
  };
  const drop = (event) => {
    over(false)(event);
    choose(event.dataTransfer.files[0]);
  };
  const pick = ({ currentTarget }) => {
    choose(currentTarget.files[0]);
    currentTarget.value = ""; // so that the same file can be chosen again after an example
  };
  const accept = isImage ? "image/*" : null;
  return html`
    <div class="field">
      <span class="name">${name}<small id=${`${id}-note`}>${note}</small></span>
      <${Description} id=${id} text=${field.description} />
      <label class=${isOver ? "drop over" : "drop"} onDragEnter=${over(true)} onDragOver=${over(true)} onDragLeave=${over(false)} onDrop=${drop}>
        <input type="file" id=${id} name=${name} accept=${accept} required=${isRequired && !held} aria-describedby=${`${id}-note`} onChange=${pick} />
        ${held === null
          ? html`<span><strong>${isImage ? "Drop an image" : "Drop a file"}</strong>, paste it, or choose one</span>`
          : html`<span>${isImage && html`<img src=${held.url} alt="" />`}<small>${held.name}</small></span>`}
      </label>
      ${isImage && html`<label class="camera">Take a photo<input type="file" accept="image/*" capture="environment" onChange=${pick} /></label>`}
      <${FieldError} id=${id} error=${error} />
    </div>`;
}

/** Calls `take` with the clipboard of a paste outside text controls, or of files anywhere, from when the field is in the page. */
function usePasted(take) {
  useLayoutEffect(() => {
    const pasted = (event) => {
      const isWritten = event.target.closest?.("input:not([type=file]), textarea");
      if (event.clipboardData.files.length || !isWritten) take(event.clipboardData);
    };
    document.addEventListener("paste", pasted);
    return () => document.removeEventListener("paste", pasted);
  });
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
