/** A chat by the AI SDK's `useChat`, and calls of OpenAI's client, in a page. */

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { useChat } from "@ai-sdk/react";
import { DirectChatTransport, ToolLoopAgent } from "ai";
import OpenAI from "openai";
import { createElement } from "react";
import { createRoot } from "react-dom/client";

const { gateway, key } = window;
const provider = createOpenAICompatible({ name: "gateway", baseURL: `${gateway}/v1`, apiKey: key });
const transport = new DirectChatTransport({ agent: new ToolLoopAgent({ model: provider("scripted_stream"), maxRetries: 0 }) });

function Chat() {
  window.chat = useChat({ transport });
  return createElement("p", null, window.chat.status);
}

const rendered = () => new Promise((resume) => setTimeout(resume, 20));

/** Sends a message; stops the answer when it has `count` characters. */
async function say(text, count) {
  let isRunning = true;
  window.chat.sendMessage({ text }).finally(() => (isRunning = false));
  while (isRunning || !isShown()) {
    if (count && said().length >= Number(count)) window.chat.stop();
    await rendered();
  }
  const { status, error } = window.chat;
  return { status, said: said(), error: error?.message };
}

/** Whether React has rendered the end of the answer. */
function isShown() {
  const { status, messages } = window.chat;
  return status === "error" || (status === "ready" && messages.at(-1)?.role === "assistant");
}

function said() {
  const last = window.chat.messages.at(-1);
  return last?.role === "assistant" ? last.parts.map(({ text }) => text ?? "").join("") : "";
}

let requests = 0;
const counted = (...given) => (requests++, fetch(...given));
const openai = new OpenAI({ baseURL: `${gateway}/v1`, apiKey: key, dangerouslyAllowBrowser: true, fetch: counted });

/** Returns the text of a streamed chat, or the error and the number of requests that OpenAI's client has sent. */
async function complete(content) {
  let text = "";
  requests = 0;
  try {
    const stream = await openai.chat.completions.create({ model: "scripted_stream", messages: [{ role: "user", content }], stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    return { text };
  } catch ({ status, code }) {
    return { status, code, requests };
  }
}

createRoot(document.getElementById("chat")).render(createElement(Chat));
await rendered();
Object.assign(window, { say, complete });
