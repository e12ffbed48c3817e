// hey-api's functions send JSON. For files, the generated client sends a form or bytes, with the types of the operation.
import { client } from "./hey-api/client.gen";
import { formDataBodySerializer } from "./hey-api/client";
import { type RunOcrErrors, type RunOcrResponses, runOcr, runWrite } from "./hey-api";
import { base64, headers, image, url } from "./page";

client.setConfig({ baseUrl: url, headers });

const ocr = { url: "/v1/pipelines/ocr" };
const json = await runOcr({ body: { image: await base64() } });
const form = await client.post<RunOcrResponses, RunOcrErrors>({
  ...ocr,
  ...formDataBodySerializer,
  body: { image: await image() },
  headers: { "Content-Type": null },
});
const raw = await client.post<RunOcrResponses, RunOcrErrors>({
  ...ocr,
  body: await image(),
  bodySerializer: null,
  headers: { "Content-Type": "image/png" },
});
const exits: ("no_text" | null | undefined)[] = [json, form, raw].map(({ data }) => data?.early_exit);

const written = await runWrite({ body: { prompt: "The for statement", max_tokens: 12, temperature: 0 } });
const refused = await runWrite({ body: { prompt: "x", max_tokens: 9999 } });
console.log(JSON.stringify([...exits, written.data?.finish_reason, refused.error?.code]));
