// orval's functions call fetch with a path. They cannot send bytes (7.13 writes JSON.stringify for a Blob), so fetch does.
import * as form from "./orval/form";
import * as json from "./orval/json";
import { base64, headers, image, url } from "./page";

const fetched = globalThis.fetch;
globalThis.fetch = (path, init) =>
  fetched(String(path).startsWith("/") ? url + path : path, { ...init, headers: { ...headers, ...init?.headers } });

const answers = [
  await json.runOcr({ image: await base64() }),
  await form.runOcr({ image: await image() }),
];
const raw = await fetch(json.getRunOcrUrl(), {
  method: "POST",
  body: await image(),
  headers: { "Content-Type": "image/png" },
});
const results = answers.map((answer) => (answer.status === 200 ? answer.data : undefined));
const exits = [...results, (await raw.json()) as json.OcrResult].map((result) => result?.early_exit);

const written = await json.runWrite({ prompt: "The for statement", max_tokens: 12, temperature: 0 });
const refused = await json.runWrite({ prompt: "x", max_tokens: 9999 });
const reason = written.status === 200 ? written.data.finish_reason : undefined;
console.log(JSON.stringify([...exits, reason, refused.status === 422 ? refused.data.code : undefined]));
