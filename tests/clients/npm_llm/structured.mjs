// node structured.mjs URL TEXTS: tools and formats with OpenAI's client and with the AI SDK; TEXTS: what each model writes.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const [url, texts] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "gateway", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const written = '{"city": "Lima"}';
const weather = { type: "function", function: { name: "weather", parameters: city } };
const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: city } };

async function outcome(call) {
  try {
    return await call();
  } catch (error) {
    return { error: error.name, status: error.status ?? error.statusCode ?? null, message: error.message };
  }
}

async function openai(model) {
  const asked = (text, options) => ({ model, messages: [{ role: "user", content: `Please write: ${text}` }], ...options });
  const called = (message) => ({
    text: message.content,
    calls: (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]),
  });
  const create = async (text, options) =>
    called((await client.chat.completions.create(asked(text, options))).choices[0].message);
  return {
    call: await outcome(async () => await create(written_by[model], { tools: [weather] })),
    callStream: await outcome(async () =>
      called(await client.chat.completions.stream(asked(written_by[model], { tools: [weather] })).finalMessage()),
    ),
    object: await outcome(async () => {
      const answer = await client.chat.completions.parse(asked(written, { response_format: format }));
      return JSON.parse(answer.choices[0].message.content);
    }),
    objectStream: await outcome(async () => {
      const stream = client.chat.completions.stream(asked(written, { response_format: format }));
      return JSON.parse((await stream.finalMessage()).content);
    }),
    mismatch: await outcome(async () => await create("No.", { response_format: format, tools: [weather] })),
  };
}

async function aiSdk(name) {
  const execute = async ({ city }) => `31 degrees in ${city}`;
  const tools = { weather: tool({ description: "Tells it.", inputSchema: jsonSchema(city), execute }) };
  const ask = (text, options) => ({ model: provider(name), prompt: `Please write: ${text}`, maxRetries: 0, ...options });
  const called = (text, calls) => ({ text, calls: calls.map((call) => [call.toolName, call.input]) });
  return {
    call: await outcome(async () => {
      const answer = await generateText(ask(written_by[name], { tools }));
      return called(answer.text, answer.toolCalls);
    }),
    callStream: await outcome(async () => {
      const stream = streamText(ask(written_by[name], { tools, onError: () => {} }));
      return called(await stream.text, await stream.toolCalls);
    }),
    object: await outcome(async () => (await generateObject(ask(written, { schema: jsonSchema(city) }))).object),
    objectStream: await outcome(async () => {
      const stream = streamText(ask(written, { output: Output.object({ schema: jsonSchema(city) }), onError: () => {} }));
      return await stream.output;
    }),
    mismatch: await outcome(async () => {
      const output = Output.object({ schema: jsonSchema(city) });
      return (await generateText(ask("No.", { output, tools, stopWhen: stepCountIs(1) }))).output;
    }),
  };
}

const written_by = JSON.parse(texts);
const found = { openai: {}, aiSdk: {} };
for (const model of Object.keys(written_by)) {
  found.openai[model] = await openai(model);
  found.aiSdk[model] = await aiSdk(model);
}
console.log(JSON.stringify(found));
