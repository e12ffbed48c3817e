// orval sends one kind of body for each operation, so JSON and forms have outputs of their own.
interface Operation {
  requestBody?: { content: Record<string, unknown> };
}
interface Document {
  paths: Record<string, Record<string, Operation>>;
}

const withOnly = (mediaType: string) => (document: Document) => {
  for (const { requestBody } of Object.values(document.paths).flatMap((path) => Object.values(path))) {
    if (requestBody && mediaType in requestBody.content) {
      requestBody.content = { [mediaType]: requestBody.content[mediaType] };
    }
  }
  return document;
};
const generated = (name: string, override = {}) => ({
  input: { target: "openapi.json", override },
  output: { target: `orval/${name}.ts`, client: "fetch" },
});

export default {
  json: generated("json", { transformer: withOnly("application/json") }),
  form: generated("form", { transformer: withOnly("multipart/form-data") }),
  every: generated("every"),
};
