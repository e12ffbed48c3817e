/** An app on another origin than the gateway: uploads, reads streams, and resumes after a reload. It needs no library. */

const asked = new URLSearchParams(location.search);
const GATEWAY = asked.get("gateway");
const KEY = asked.get("key");

class GatewayError extends Error {
  constructor(problem, response) {
    super(problem.detail);
    Object.assign(this, { code: problem.code, status: response.status, retryAfter: response.headers.get("Retry-After") });
  }
}

async function call(path, options = {}) {
  const response = await fetch(GATEWAY + path, { ...options, headers: { ...options.headers, Authorization: `Bearer ${KEY}` } });
  if (response.ok) return response;
  const isJson = response.headers.get("Content-Type")?.includes("json");
  throw new GatewayError(isJson ? await response.json() : { code: `http_${response.status}` }, response);
}

const post = (path, body, options) =>
  call(path, { ...options, method: "POST", headers: { ...options?.headers, "Content-Type": "application/json" }, body: JSON.stringify(body) });

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
    const blocks = (rest + chunk.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      if (fields.data) yield { id: Number(fields.id), name: fields.event, data: JSON.parse(fields.data) };
    }
  }
}

async function upload(size) {
  const form = new FormData();
  const image = size ? new Blob([new Uint8Array(Number(size))]) : await (await fetch("sign.png")).blob();
  form.append("image", image, "sign.png");
  return (await call("/v1/pipelines/ocr", { method: "POST", body: form })).json();
}

/** Reads a stream until its end, or stops it after `count` outputs. More outputs may have arrived together with the last. */
async function read(script, count) {
  const stop = new AbortController();
  const names = [];
  try {
    const response = await post("/v1/pipelines/scripted_patient/stream", { script }, { signal: stop.signal });
    for await (const { name } of eventsOf(response)) {
      if (!stop.signal.aborted) names.push(name);
      if (names.length === Number(count)) stop.abort();
    }
  } catch (error) {
    names.push(error.name);
  }
  return names;
}

/** Starts a stream, and reads its first three events. */
async function start(script) {
  const started = await post("/v1/streams", { pipeline: "scripted_kept", inputs: { script } });
  sessionStorage.setItem("stream", JSON.stringify({ path: started.headers.get("Location"), id: 0 }));
  return resume("3");
}

/** Reads the events after the last one that this tab has received, also before a reload. */
async function resume(count) {
  const kept = JSON.parse(sessionStorage.getItem("stream"));
  const stop = new AbortController();
  const options = { signal: stop.signal, headers: { "Last-Event-ID": String(kept.id) } };
  const events = [];
  for await (const { id, name } of eventsOf(await call(kept.path, options))) {
    events.push([id, name]);
    sessionStorage.setItem("stream", JSON.stringify({ ...kept, id }));
    if (events.length === Number(count)) {
      stop.abort();
      break;
    }
  }
  return events;
}

const errorOf = (work) =>
  work.then(
    () => null,
    ({ name, status, code, message, retryAfter }) => ({ name, status, code, message, retryAfter }),
  );

const protocolOf = (path) => performance.getEntriesByType("resource").findLast(({ name }) => name === GATEWAY + path)?.nextHopProtocol;

/** Asks with a header that a library adds, or that is not allowed. */
const withHeader = async (name) => (await call("/v1/pipelines", { headers: { [name]: "x" } })).status;

Object.assign(window, { gateway: GATEWAY, key: KEY, call, post, upload, read, start, resume, errorOf, protocolOf, withHeader });
