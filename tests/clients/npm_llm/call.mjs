// node call.mjs URL MODEL...: calls each model with OpenAI's client and with the AI SDK, and prints the results as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const [url, ...models] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "gateway", baseURL: `${url}/v1`, includeUsage: true });

async function outcome(call) {
  try {
    return await call();
  } catch (error) {
    return { error: error.name, status: error.status ?? error.statusCode ?? null, message: error.message };
  }
}

async function openai(model) {
  const chat = (content, options = {}) =>
    client.chat.completions.create({ model, messages: [{ role: "user", content }], ...options });
  return {
    answer: await outcome(async () => (await chat("Hi")).choices[0].message.content),
    stream: await outcome(async () => {
      let text = "";
      for await (const chunk of await chat("Hi", { stream: true })) text += chunk.choices[0]?.delta.content ?? "";
      return text;
    }),
    usage: await outcome(async () => {
      const { usage } = await chat("Hi");
      return usage && { input_tokens: usage.prompt_tokens, output_tokens: usage.completion_tokens };
    }),
    wrong: await outcome(async () => await chat("Hi", { max_tokens: 0 })),
  };
}

async function aiSdk(name) {
  const ask = (prompt, options = {}) => ({ model: provider(name), prompt, maxRetries: 0, ...options });
  return {
    answer: await outcome(async () => (await generateText(ask("Hi"))).text),
    stream: await outcome(async () => {
      let text = "";
      for await (const piece of streamText(ask("Hi")).textStream) text += piece;
      return text;
    }),
    usage: await outcome(async () => {
      const { usage } = await generateText(ask("Hi"));
      return { input_tokens: usage.inputTokens, output_tokens: usage.outputTokens };
    }),
    wrong: await outcome(async () => (await generateText(ask("Hi", { topP: 0 }))).text),
  };
}

const found = { openai: {}, aiSdk: {} };
for (const model of models) {
  found.openai[model] = await openai(model);
  found.aiSdk[model] = await aiSdk(model);
}
console.log(JSON.stringify(found));
