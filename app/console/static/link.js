/** The fragment of the page's address: the open pipeline, and the inputs of a link, for example `#write?prompt=Hello&seed=7`. */

/** The place of a pipeline's name in the address of the page "Operation"; no pipeline's name has a slash. */
export const OPERATION = "/operation";

/** Returns the pipeline's name, empty if there is none, and the inputs as texts by field name. */
export function openLink() {
  const [name, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
  return { name: decodeURIComponent(name), inputs: Object.fromEntries(new URLSearchParams(query)) };
}

/** Returns the address of a form's inputs. Files are left out, because an address is too short for them. */
export function linkTo(name, fields, draft) {
  const texts = fields.filter(({ control }) => control !== "file").map((field) => [field.name, String(draft[field.name])]);
  return `${location.origin}/#${encodeURIComponent(name)}?${new URLSearchParams(texts)}`;
}
