/** A conversation with a pipeline that declares `openai: {chat: ...}`, over `POST /v1/chat/completions`. */

import { Problem, problemIn } from "./api.js";
import { draftOf, errorsOf, fieldsOf, valuesOf } from "./fields.js";
import { Fields } from "./form.js";
import { keyHeaders } from "./key.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { ProblemNotice } from "./problem.js";
import { eventsIn } from "./sse.js";

const PARAMETERS = ["max_tokens", "temperature", "top_p", "seed"];
const FINISHES = { length: "ended at max_tokens", stop: "complete", stopped: "stopped" };

/** Another address, and leaving the pipeline, stop a running answer. */
export function Chat({ pipeline }) {
  const fields = useMemo(() => parametersOf(pipeline), [pipeline]);
  const [settings, setSettings] = useState(() => draftOf(fields));
  const [errors, setErrors] = useState({});
  const [messages, setMessages] = useState([]);
  const [text, setText] = useState("");
  const [isBusy, setBusy] = useState(false);
  const running = useRef(null);
  useEffect(() => {
    const stop = () => running.current?.abort();
    addEventListener("hashchange", stop);
    return () => {
      removeEventListener("hashchange", stop);
      stop();
    };
  }, []);
  const change = (name, held) => {
    const field = fields.find((each) => each.name === name);
    setSettings((before) => ({ ...before, [name]: held }));
    setErrors(({ [name]: _, ...others }) => ({ ...others, ...errorsOf([field], { [name]: held }) }));
  };
  const send = async (event) => {
    event.preventDefault();
    if (isBusy || !text.trim() || Object.keys(errors).length) return;
    const asked = [...messages, { role: "user", content: text }];
    setText("");
    setBusy(true);
    running.current = new AbortController();
    const sent = { model: pipeline.name, messages: asked.map(({ role, content }) => ({ role, content })), ...valuesOf(fields, settings) };
    const usage = pipeline.openai.chat.counts_tokens ? { stream_options: { include_usage: true } } : {};
    await answered(pipeline.streams ? { ...sent, stream: true, ...usage } : sent, running.current.signal, (answer) => setMessages([...asked, answer]));
    setBusy(false);
  };
  return html`
    <div class="panels chat">
      <section class="card" aria-label="Chat">
        <h2>Chat</h2>
        <${Messages} messages=${messages} />
        <form class="compose" aria-label="Message" onSubmit=${send} onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && send(event)}>
          <textarea name="message" rows="2" aria-label="Message" placeholder="Enter sends, Shift+Enter starts a line" value=${text} onInput=${(event) => setText(event.currentTarget.value)} />
          ${isBusy
            ? html`<button key="stop" type="button" id="stop" onClick=${() => running.current.abort()}>Stop</button>`
            : html`<button key="send" class="primary" id="send">Send</button>`}
        </form>
      </section>
      <section class="card" aria-label="Parameters">
        <h2>Parameters</h2>
        ${fields.length ? html`<${Fields} fields=${fields} draft=${settings} errors=${errors} onChange=${change} />` : html`<p class="empty">This pipeline has none.</p>`}
        <p class="actions"><button type="button" class="quiet" disabled=${isBusy} onClick=${() => setMessages([])}>New chat</button></p>
      </section>
    </div>`;
}

/** Returns the fields of OpenAI's parameters that the pipeline has, by OpenAI's names and without the values of its sample. */
function parametersOf(pipeline) {
  const { parameters } = pipeline.openai.chat;
  const own = new Map(fieldsOf(pipeline).map((field) => [field.name, field]));
  const found = PARAMETERS.map((name) => ({ ...own.get(parameters[name]), name, id: `chat-${name}` }));
  return found.filter(({ control }) => control === "number").map((field) => ({ ...field, initial: String(field.schema.default ?? "") }));
}

function Messages({ messages }) {
  const list = useRef(null);
  useEffect(() => {
    list.current.scrollTop = list.current.scrollHeight;
  }, [messages]);
  return html`
    <div class="messages" role="log" aria-label="Conversation" tabindex="0" ref=${list}>
      ${messages.length === 0 && html`<p class="empty">The conversation appears here. The gateway keeps nothing of it: each message sends all of it.</p>`}
      ${messages.map((message, index) => html`<${Message} key=${index} ...${message} />`)}
    </div>`;
}

function Message({ role, content, figures, problem }) {
  return html`
    <div class="message" data-role=${role} data-state=${figures?.finish ?? "live"}>
      <p class="text">${content}</p>
      ${problem && html`<${ProblemNotice} problem=${problem} />`}
      ${figures && html`<p class="small" data-figures>${figuresText(figures)}</p>`}
    </div>`;
}

function figuresText({ first_ms: first, last_ms: last, outputs, usage, finish }) {
  const tokens = usage?.completion_tokens ?? outputs;
  const rate = last > first ? ((tokens - 1) * 1000) / (last - first) : 0;
  return [
    first !== null && `first token after ${Math.round(first)} ms`,
    `${tokens} ${usage ? "tokens" : "outputs"}`,
    usage && `${usage.prompt_tokens} in the prompt`,
    rate && `${rate.toFixed(1)} per second`,
    FINISHES[finish] ?? finish,
  ].filter(Boolean).join(" · ");
}

/** Calls `onAnswer` with the message of the assistant as it grows: `content`, `figures`, and `problem` if it failed. */
async function answered(body, signal, onAnswer) {
  const started = performance.now();
  const figures = { first_ms: null, last_ms: null, outputs: 0, usage: null, finish: null };
  const answer = { role: "assistant", content: "" };
  const show = (changes = {}) => onAnswer({ ...answer, figures: { ...figures }, ...changes });
  show();
  try {
    for await (const { choices: [choice], usage } of chunksOf(body, signal)) {
      const piece = choice?.delta.content ?? "";
      if (piece) {
        figures.last_ms = performance.now() - started;
        figures.first_ms ??= figures.last_ms;
        figures.outputs += 1;
      }
      answer.content += piece;
      figures.finish = choice?.finish_reason ?? figures.finish;
      figures.usage = usage ?? figures.usage;
      show();
    }
  } catch (error) {
    figures.finish = signal.aborted ? "stopped" : "failed";
    show(signal.aborted ? {} : { problem: problemIn(error) });
  }
}

/** Yields the chunks of a stream, or a whole answer as one chunk. Raises Problem. */
async function* chunksOf(body, signal) {
  const headers = { "Content-Type": "application/json", ...keyHeaders() };
  const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.status === 401) dispatchEvent(new Event("unauthenticated"));
  if (!response.ok) throw problemOf((await response.json()).error);
  if (!body.stream) {
    const { choices: [{ message, finish_reason }], usage } = await response.json();
    yield { choices: [{ delta: message, finish_reason }], usage };
    return;
  }
  for await (const { data } of eventsIn(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw problemOf(chunk.error);
    yield chunk;
  }
}

const problemOf = ({ message, code }) => new Problem({ title: message, code, type: `/docs/errors/${code}` });
