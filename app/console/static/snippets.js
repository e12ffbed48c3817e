/** The request of the form as calls that work as pasted: curl, Python, JavaScript and OpenAI's client for Python. */

import { openaiSnippet } from "./openai-snippet.js";

/** Where a key comes from, in each language, if the gateway asks for keys. */
const KEYS = {
  curl: ` -H "Authorization: Bearer $API_KEY"`,
  python: `headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}`,
  javascript: "Authorization: `Bearer ${process.env.API_KEY}`",
};

/**
 * Returns code by title.
 *
 * `pipeline`: its description. `base`: the address of the gateway. `values`: the request without its files. `files`: names by
 * field, sent as parts of a form. `example`: the name of an example, whose body the call then reads from the gateway, or null.
 */
export function snippetsOf({ pipeline, base, values, files, example, isStream, withKey }) {
  const url = `${base}${pipeline.url}`;
  const isForm = example === null && Object.keys(files).length > 0;
  const call = { url: isStream ? `${url}/stream` : url, from: example && `${url}/examples/${example}`, values, files, withKey, isForm, isStream };
  const openai = openaiSnippet({ pipeline, base, values, isStream, withKey });
  return { curl: curl(call), Python: python(call), JavaScript: javascript(call), ...(openai ? { openai } : {}) };
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const plain = (name) => (/^[\w./-]+$/.test(name) ? name : `"${name.replace(/["\\]/g, "\\$&")}"`);

function curl({ url, from, values, files, withKey, isForm, isStream }) {
  const key = withKey ? KEYS.curl : "";
  const start = `curl ${isStream ? "-N " : ""}${quoted(url)}${key}`;
  const json = `${start} -H 'Content-Type: application/json' -d`;
  if (from) return `curl -s ${quoted(from)}${key} |\n  ${json} @-`;
  if (!isForm) return `${json} ${quoted(JSON.stringify(values))}`;
  const parts = Object.entries(files).map(([field, name]) => `-F ${quoted(`${field}=@${plain(name)}`)}`);
  const texts = Object.entries(values).map(([field, value]) => `--form-string ${quoted(`${field}=${textOf(value)}`)}`);
  return [start, ...parts, ...texts].join(" ");
}

function python({ url, from, values, files, withKey, isForm, isStream }) {
  const opened = Object.entries(files).map(([field, name]) => `${pythonOf(field)}: open(${pythonOf(name)}, "rb")`);
  const texts = Object.fromEntries(Object.entries(values).map(([field, value]) => [field, textOf(value)]));
  const key = withKey && KEYS.python;
  const form = [`files={${opened.join(", ")}}`, Object.keys(texts).length && `data=${pythonOf(texts)}`];
  const body = from ? ["json=body"] : isForm ? form : [`json=${pythonOf(values)}`];
  const sent = [pythonOf(url), ...body, key, "timeout=60"].filter(Boolean).join(", ");
  const read = from ? `body = httpx.get(${[pythonOf(from), key].filter(Boolean).join(", ")}).raise_for_status().json()\n` : "";
  const start = `${withKey ? "import os\n\n" : ""}import httpx\n\n${read}`;
  if (!isStream) return `${start}print(httpx.post(${sent}).raise_for_status().json())`;
  return `${start}with httpx.stream("POST", ${sent}) as response:\n    for line in response.iter_lines():\n        if line.startswith("data: "):\n            print(line.removeprefix("data: "))`;
}

/** Returns a JSON value as a Python literal. */
export function pythonOf(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pythonOf).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${pythonOf(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

function javascript({ url, from, values, files, withKey, isForm, isStream }) {
  const key = withKey && KEYS.javascript;
  const headers = [!isForm && `"Content-Type": "application/json"`, key].filter(Boolean);
  const body = from ? "await example.text()" : isForm ? "form" : `JSON.stringify(${JSON.stringify(values)})`;
  const options = [`method: "POST"`, headers.length && `headers: {${headers.join(", ")}}`, `body: ${body}`].filter(Boolean);
  const example = from ? `const example = await fetch(${JSON.stringify(from)}${key ? `, { headers: {${key}} }` : ""});\n` : "";
  const call = `const response = await fetch(${JSON.stringify(url)}, {\n  ${options.join(",\n  ")},\n});\n`;
  const read = isStream
    ? "for await (const text of response.body.pipeThrough(new TextDecoderStream())) process.stdout.write(text);"
    : "console.log(await response.json());";
  return `${isForm ? javascriptForm(values, files) : example}${call}${read}`;
}

function javascriptForm(values, files) {
  const named = Object.entries(files).map(
    ([field, name]) => `form.append(${JSON.stringify(field)}, await openAsBlob(${JSON.stringify(name)}), ${JSON.stringify(name)});\n`,
  );
  const texts = Object.entries(values).map(([field, value]) => `form.append(${JSON.stringify(field)}, ${JSON.stringify(textOf(value))});\n`);
  return `import { openAsBlob } from "node:fs";\n\nconst form = new FormData();\n${[...named, ...texts].join("")}`;
}
