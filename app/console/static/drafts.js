/** The forms of the pipelines as the user left them. */

import { get } from "./api.js";
import { SAMPLE, loadedExample, withFiles } from "./examples.js";
import { draftOf, fieldsOf, valuesOf } from "./fields.js";

/** `{draft, runs}` by the name of the pipeline, for when the user opens it again. */
export const kept = new Map();

/** Returns `{url, body}` of a pipeline's request as its form has it, or of its sample. Raises Problem and InvalidDraft. */
export async function requestIn(name) {
  const { values: pipeline } = await get(`/v1/pipelines/${encodeURIComponent(name)}`);
  const fields = fieldsOf(pipeline);
  const example = pipeline.examples.find((each) => each.name === SAMPLE);
  const { draft: sample = draftOf(fields) } = example ? await loadedExample(pipeline, fields, example) : {};
  return { url: pipeline.url, body: valuesOf(fields, withFiles(kept.get(name)?.draft ?? sample, sample)) };
}
