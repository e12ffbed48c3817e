/** The sample and the examples of a pipeline: loaded with their files when it is opened, and a gallery that fills the form. */

import { get, problemIn } from "./api.js";
import { draftOf, draftOfValues } from "./fields.js";
import { html, useEffect, useState } from "./lib.js";

export const SAMPLE = "sample";

/** Returns `{draft}` or `{problem}` by name, of the examples that are loaded. `onSample(draft)` is called once, first. */
export function useExamples(pipeline, fields, onSample) {
  const [loaded, setLoaded] = useState({});
  useEffect(() => {
    let isOpen = true;
    const loadAll = async () => {
      for (const example of pipeline.examples) {
        const found = await loadedExample(pipeline, fields, example);
        if (!isOpen) return;
        setLoaded((before) => ({ ...before, [example.name]: found }));
        if (example.name === SAMPLE && found.draft) onSample(found.draft);
      }
    };
    loadAll();
    return () => {
      isOpen = false;
    };
  }, []);
  return loaded;
}

/** Returns the draft that the form begins with. */
export const sampleDraft = (fields, loaded) => loaded[SAMPLE]?.draft ?? draftOf(fields);

/** Returns the draft with the files of the sample where it has no file. */
export const withFiles = (draft, sample) => Object.fromEntries(Object.entries(draft).map(([name, held]) => [name, held ?? sample[name]]));

/** Returns `{draft}` or `{problem}`. The description already has the values of a sample without files. */
export async function loadedExample({ url }, fields, { name, files }) {
  if (name === SAMPLE && !Object.keys(files).length) return { draft: draftOf(fields) };
  try {
    const { values } = await get(`${url}/examples/${name}`);
    return { draft: draftOfValues(fields, values, files) };
  } catch (error) {
    return { problem: problemIn(error) };
  }
}

/** `loaded`: see useExamples. `onChoose(draft)`. */
export function Gallery({ pipeline, fields, loaded, draft, onChoose }) {
  const hasOthers = pipeline.examples.some(({ name }) => name !== SAMPLE);
  const failed = Object.entries(loaded).filter(([, { problem }]) => problem);
  return html`
    ${hasOthers && html`
      <div class="gallery" role="group" aria-label="Examples">
        ${pipeline.examples.map(({ name }) => html`<${Example} key=${name} name=${name} fields=${fields} found=${loaded[name]?.draft} draft=${draft} onChoose=${onChoose} />`)}
      </div>`}
    ${failed.map(([name, { problem }]) => html`<p key=${name} class="field-error" role="alert">The example ${name} cannot be loaded: ${problem.detail ?? problem.title}</p>`)}`;
}

function Example({ name, fields, found, draft, onChoose }) {
  const picture = found && fields.find((field) => field.input?.kind === "image" && found[field.name]);
  return html`
    <button type="button" class="quiet" disabled=${!found} aria-pressed=${found && isSame(found, draft) ? "true" : "false"} onClick=${() => onChoose(found)}>
      ${picture && html`<img src=${found[picture.name].url} alt="" />`}${name}
    </button>`;
}

/** Files are the same if their content is, because an example is loaded again when its pipeline is opened again. */
const isSame = (found, draft) => Object.keys(found).every((name) => (found[name]?.url ?? found[name]) === (draft[name]?.url ?? draft[name]));
