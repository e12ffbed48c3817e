// openapi-typescript types a file as a string. openapi-fetch sends what the serializer returns.
import createClient from "openapi-fetch";
import type { components, paths } from "./openapi-typescript";
import { base64, headers, image, url } from "./page";

type Result = components["schemas"]["ocr_result"];

const client = createClient<paths>({ baseUrl: url, headers });
const asString = (file: Blob) => file as unknown as string;

function formOf(fields: object | string): FormData {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  return form;
}

const json = await client.POST("/v1/pipelines/ocr", { body: { image: await base64() } });
const form = await client.POST("/v1/pipelines/ocr", { body: { image: asString(await image()) }, bodySerializer: formOf });
const raw = await client.POST("/v1/pipelines/ocr", {
  body: asString(await image()),
  bodySerializer: (bytes) => bytes,
  headers: { "Content-Type": "image/png" },
});
const results = [json, form, raw].map(({ data }) => data satisfies Result | undefined);
const exits: ("no_text" | null | undefined)[] = results.map((result) => result?.early_exit);

const written = await client.POST("/v1/pipelines/write", { body: { prompt: "The for statement", max_tokens: 12, temperature: 0 } });
const refused = await client.POST("/v1/pipelines/write", { body: { prompt: "x", max_tokens: 9999 } });
console.log(JSON.stringify([...exits, written.data?.finish_reason, refused.error?.code]));
