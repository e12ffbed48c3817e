// node openai.mjs URL: calls the gateway with OpenAI's JavaScript client and prints the results as JSON.
import OpenAI, { APIError, BadRequestError, NotFoundError } from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const prompt = "The for statement";
const sampling = { model: "write", max_tokens: 24, seed: 7, temperature: 0.8 };
const messages = [{ role: "user", content: "What is a list?" }];

async function streamed(stream, textOf) {
  let text = "";
  let last;
  for await (const chunk of stream) {
    text += chunk.choices.map(textOf).join("");
    last = chunk;
  }
  return { text, usage: last.usage };
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    const kind = [BadRequestError, NotFoundError, APIError].find((each) => error instanceof each);
    return { class: kind.name, status: error.status ?? null, code: error.code, param: error.param };
  }
}

async function disconnect() {
  const stream = await client.completions.create({ ...sampling, prompt, max_tokens: 500, stream: true });
  let seen = 0;
  for await (const chunk of stream) {
    seen += chunk.choices.length;
    if (seen === 5) break;
  }
  return seen;
}

const options = { stream: true, stream_options: { include_usage: true } };
const failing = JSON.stringify({ outputs: 2, interval_s: 0.05, then: "error" });
console.log(
  JSON.stringify({
    models: (await client.models.list()).data.map((model) => model.id),
    completion: await client.completions.create({ ...sampling, prompt }),
    chat: await client.chat.completions.create({ ...sampling, messages }),
    chunks: await streamed(await client.completions.create({ ...sampling, prompt, ...options }), (each) => each.text),
    chatChunks: await streamed(
      await client.chat.completions.create({ ...sampling, messages, ...options }),
      (each) => each.delta.content ?? "",
    ),
    embeddings: (await client.embeddings.create({ model: "embed", input: ["A cat.", "A dog."] })).data,
    badField: await failure(client.completions.create({ ...sampling, prompt, n: 0 })),
    badModel: await failure(client.completions.create({ ...sampling, model: "nobody", prompt })),
    midStream: await failure(
      streamed(await client.completions.create({ model: "scripted_stream", prompt: failing, stream: true }), () => ""),
    ),
    chunksBeforeDisconnect: await disconnect(),
  }),
);
