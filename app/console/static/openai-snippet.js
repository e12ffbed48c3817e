/** The request of the form as a call of OpenAI's client for Python. */

import { pythonOf } from "./snippets.js";

const CLIENT_PARAMETERS = new Set(["max_tokens", "temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"]);

/** Returns code, or null for a pipeline without `openai`. Other fields of the pipeline are sent in `extra_body`. */
export function openaiSnippet({ pipeline, base, values, isStream, withKey }) {
  const [kind, form] = ["chat", "completions", "embeddings"].map((each) => [each, pipeline.openai?.[each]]).find(([, each]) => each) ?? [];
  if (!form || (kind === "embeddings" && isStream)) return null;
  const key = withKey ? `os.environ["API_KEY"]` : `"unused"`;
  const start = `${withKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${pythonOf(`${base}/v1`)}, api_key=${key})\n`;
  const { path, input, text } = { chat, completions, embeddings }[kind](values[form.input]);
  const sent = [`model=${pythonOf(pipeline.name)}`, input, ...parametersOf(form, values), isStream && "stream=True"].filter(Boolean).join(", ");
  const call = `client.${path}.create(${sent})`;
  if (!isStream) return `${start}answer = ${call}\nprint(answer.${text})`;
  const piece = kind === "chat" ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${start}for chunk in ${call}:\n    print(${piece} or "", end="", flush=True)`;
}

const chat = (text) => ({ path: "chat.completions", input: `messages=[{"role": "user", "content": ${pythonOf(text)}}]`, text: "choices[0].message.content" });
const completions = (text) => ({ path: "completions", input: `prompt=${pythonOf(text)}`, text: "choices[0].text" });
const embeddings = (text) => ({ path: "embeddings", input: `input=${pythonOf(text)}, encoding_format="float"`, text: "data[0].embedding" });

function parametersOf({ parameters }, values) {
  const named = Object.entries(parameters).filter(([name, field]) => field in values && name !== "max_completion_tokens");
  const own = named.filter(([name]) => CLIENT_PARAMETERS.has(name)).map(([name, field]) => `${name}=${pythonOf(values[field])}`);
  const extra = named.filter(([name]) => !CLIENT_PARAMETERS.has(name)).map(([name, field]) => [name, values[field]]);
  return extra.length ? [...own, `extra_body=${pythonOf(Object.fromEntries(extra))}`] : own;
}
