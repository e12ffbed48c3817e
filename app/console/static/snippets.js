/** The request of the form as calls that work as pasted: curl, Python and JavaScript, for one answer or a stream. */

/** Where a key comes from, in each language, if the gateway asks for keys. */
const KEYS = {
  curl: ` -H "Authorization: Bearer $API_KEY"`,
  python: `headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}`,
  javascript: "Authorization: `Bearer ${process.env.API_KEY}`",
};

/** Returns code by title. `files`: names by field, sent as parts of a form. `values`: the other fields. */
export function snippetsOf({ url, values, files, streams, withKey }) {
  const call = { url, values, files, withKey, isForm: Object.keys(files).length > 0 };
  const whole = { curl: curl(call), Python: python(call), JavaScript: javascript(call) };
  if (!streams) return whole;
  const stream = { ...call, url: `${url}/stream`, isStream: true };
  return { ...whole, "curl, as a stream": curl(stream), "Python, as a stream": python(stream), "JavaScript, as a stream": javascript(stream) };
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const plain = (name) => (/^[\w./-]+$/.test(name) ? name : `"${name.replace(/["\\]/g, "\\$&")}"`);

function curl({ url, values, files, withKey, isForm, isStream }) {
  const start = `curl ${isStream ? "-N " : ""}${quoted(url)}${withKey ? KEYS.curl : ""}`;
  if (!isForm) return `${start} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(values))}`;
  const parts = Object.entries(files).map(([field, name]) => `-F ${quoted(`${field}=@${plain(name)}`)}`);
  const texts = Object.entries(values).map(([field, value]) => `--form-string ${quoted(`${field}=${textOf(value)}`)}`);
  return [start, ...parts, ...texts].join(" ");
}

function python({ url, values, files, withKey, isForm, isStream }) {
  const opened = Object.entries(files).map(([field, name]) => `${pythonOf(field)}: open(${pythonOf(name)}, "rb")`);
  const texts = Object.fromEntries(Object.entries(values).map(([field, value]) => [field, textOf(value)]));
  const body = isForm ? `files={${opened.join(", ")}}, data=${pythonOf(texts)}` : `json=${pythonOf(values)}`;
  const sent = [pythonOf(url), body, withKey && KEYS.python].filter(Boolean).join(", ");
  const imports = withKey ? "import os\n\nimport httpx\n\n" : "import httpx\n\n";
  if (!isStream) return `${imports}print(httpx.post(${sent}, timeout=60).raise_for_status().json())`;
  return `${imports}with httpx.stream("POST", ${sent}, timeout=60) as response:\n    for line in response.iter_lines():\n        if line.startswith("data: "):\n            print(line.removeprefix("data: "))`;
}

/** Returns a JSON value as a Python literal. */
function pythonOf(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pythonOf).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${pythonOf(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

function javascript({ url, values, files, withKey, isForm, isStream }) {
  const headers = [!isForm && `"Content-Type": "application/json"`, withKey && KEYS.javascript].filter(Boolean);
  const body = isForm ? "form" : `JSON.stringify(${JSON.stringify(values)})`;
  const options = [`method: "POST"`, headers.length && `headers: {${headers.join(", ")}}`, `body: ${body}`].filter(Boolean);
  const call = `const response = await fetch(${JSON.stringify(url)}, {\n  ${options.join(",\n  ")},\n});\n`;
  const read = isStream
    ? "for await (const text of response.body.pipeThrough(new TextDecoderStream())) process.stdout.write(text);"
    : "console.log(await response.json());";
  return `${isForm ? javascriptForm(values, files) : ""}${call}${read}`;
}

function javascriptForm(values, files) {
  const named = Object.entries(files).map(
    ([field, name]) => `form.append(${JSON.stringify(field)}, await openAsBlob(${JSON.stringify(name)}), ${JSON.stringify(name)});\n`,
  );
  const texts = Object.entries(values).map(([field, value]) => `form.append(${JSON.stringify(field)}, ${JSON.stringify(textOf(value))});\n`);
  return `import { openAsBlob } from "node:fs";\n\nconst form = new FormData();\n${[...named, ...texts].join("")}`;
}
