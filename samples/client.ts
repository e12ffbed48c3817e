// A client of the gateway for browsers and for Node 20 or newer, without dependencies. Copy this file into your app.
// Its types come from your gateway: npx openapi-typescript https://gateway.example.com/openapi.json -o api.ts
import type { components } from "./api";

type Schemas = components["schemas"];
type Named<Kind extends string> = {
  [Name in keyof Schemas as Name extends `${infer Pipeline}_${Kind}` ? Pipeline : never]: Schemas[Name];
};
export type Requests = Named<"request">;
export type Results = Named<"result">;
export type Outputs = Named<"output">;
export type Pipeline = keyof Requests & keyof Results;
export type Streaming = keyof Requests & keyof Outputs;
export type Done = Schemas["Done"];
export type Problem = Schemas["Problem"];
export interface Options {
  /** Headers of every request, such as `Authorization`. */
  headers?: () => Record<string, string>;
  /** How often a request is sent, or a stream is read without a new event, before its error is thrown. */
  attempts?: number;
}

/** An error that the gateway describes. `errors` names the fields, for a form. */
export class GatewayError extends Error {
  readonly errors: NonNullable<Problem["errors"]>;
  constructor(readonly problem: Problem) {
    super(problem.detail);
    this.name = "GatewayError";
    this.errors = problem.errors ?? [];
  }
  get code() {
    return this.problem.code;
  }
  get requestId() {
    return this.problem.request_id;
  }
}

/** An answer that is not the gateway's, such as a proxy's page. */
export class ForeignAnswer extends Error {
  constructor(readonly status: number) {
    super(`A proxy answered ${status}.`);
    this.name = "ForeignAnswer";
  }
}

export class Gateway {
  readonly #url: string;
  readonly #headers: () => Record<string, string>;
  readonly #attempts: number;

  constructor(url: string, { headers = () => ({}), attempts = 6 }: Options = {}) {
    this.#url = url.replace(/\/$/, "");
    this.#headers = headers;
    this.#attempts = attempts;
  }

  /** Runs a pipeline. `body`: the inputs as JSON, a form with files, or the bytes of the one file. */
  async run<P extends Pipeline>(
    pipeline: P,
    body: Requests[P] | FormData | Blob,
    signal?: AbortSignal,
  ): Promise<Results[P]> {
    const sent = { method: "POST", signal, ...contentOf(body) };
    const answer = await this.#retried(() => this.#fetch(`/v1/pipelines/${String(pipeline)}`, sent), signal, isRetryable);
    return answer.json();
  }

  /** Starts a stream that does not depend on a connection, and can be read again from `stream.url`. */
  async start<P extends Streaming>(pipeline: P, inputs: Requests[P], signal?: AbortSignal): Promise<Stream<Outputs[P]>> {
    const { headers, body } = contentOf({ pipeline, inputs });
    const sent = { method: "POST", signal, body, headers: { ...headers, "Idempotency-Key": randomKey() } };
    const answer = await this.#retried(() => this.#fetch("/v1/streams", sent), signal);
    const started: { url: string } = await answer.json();
    return this.open(pipeline, started.url);
  }

  /** Continues a stream after the event `lastId`; without it, from the start. */
  open<P extends Streaming>(_pipeline: P, url: string, lastId = "0"): Stream<Outputs[P]> {
    const retried: Retried = (call, signal) => this.#retried(call, signal);
    return new Stream(url, lastId, (sent) => this.#fetch(url, sent), retried, this.#attempts);
  }

  /** Yields the outputs. Leaving the loop or the signal cancels the stream. */
  async *stream<P extends Streaming>(
    pipeline: P,
    inputs: Requests[P],
    signal?: AbortSignal,
  ): AsyncGenerator<Outputs[P], Done | undefined, void> {
    const stream = await this.start(pipeline, inputs, signal);
    try {
      return yield* stream.outputs(signal);
    } finally {
      if (!stream.hasEnded) await stream.cancel();
    }
  }

  async #fetch(path: string, { headers, ...sent }: RequestInit): Promise<Response> {
    const response = await fetch(this.#url + path, { ...sent, headers: { ...this.#headers(), ...headers } });
    if (response.ok) return response;
    const isProblem = response.headers.get("Content-Type")?.startsWith("application/problem+json");
    if (!isProblem) throw new ForeignAnswer(response.status);
    throw Object.assign(new GatewayError(await response.json()), { waitS: Number(response.headers.get("Retry-After")) });
  }

  async #retried<T>(call: () => Promise<T>, signal?: AbortSignal, may = mayRepeat): Promise<T> {
    for (let attempt = 1; ; attempt++) {
      try {
        return await call();
      } catch (error) {
        if (attempt >= this.#attempts || signal?.aborted || !may(error)) throw error;
        await wait(Math.max(backOff(attempt), 1000 * ((error as { waitS?: number }).waitS ?? 0)), signal);
      }
    }
  }
}

type Retried = <T>(call: () => Promise<T>, signal?: AbortSignal) => Promise<T>;

/** A resumable stream. Store `url` and `lastId` to continue it after a reload of the page. */
export class Stream<Output> {
  done: Done | undefined;
  hasEnded = false;

  constructor(
    readonly url: string,
    public lastId: string,
    private readonly fetchIt: (sent: RequestInit) => Promise<Response>,
    private readonly retried: Retried,
    private readonly attempts: number,
  ) {}

  /** Yields the outputs after `lastId`, and reads on after lost connections. The signal ends only the reading. */
  async *outputs(signal?: AbortSignal): AsyncGenerator<Output, Done | undefined, void> {
    for (let failures = 0; !this.hasEnded; ) {
      const before = this.lastId;
      const sent = { signal, headers: { "Last-Event-ID": before } };
      const response = await this.retried(() => this.fetchIt(sent), signal);
      if (response.status === 204) this.hasEnded = true;
      else yield* this.#read(response, signal);
      failures = this.lastId === before ? failures + 1 : 0;
      if (failures >= this.attempts) throw new TypeError("The stream cannot be read.");
      if (!this.hasEnded) await wait(backOff(failures), signal);
    }
    return this.done;
  }

  /** Ends and deletes the stream: the gateway cancels the work in Triton. Works while the page is left. */
  async cancel(): Promise<void> {
    this.hasEnded = true;
    await this.fetchIt({ method: "DELETE", keepalive: true });
  }

  /** Ends without an error if the connection is lost: `fetch` and its body throw TypeError then. */
  async *#read(response: Response, signal?: AbortSignal): AsyncGenerator<Output, void, void> {
    const events = eventsOf(response);
    const next = () => events.next().catch((error) => (lost(error, signal), { done: true as const, value: undefined }));
    try {
      for (let event = await next(); !event.done; event = await next()) {
        signal?.throwIfAborted();
        this.lastId = event.value.id;
        this.hasEnded = event.value.name !== "output";
        if (event.value.name === "error") throw new GatewayError(event.value.data as Problem);
        if (event.value.name === "done") this.done = event.value.data as Done;
        else yield event.value.data as Output;
      }
    } finally {
      await events.return();
    }
  }
}

function lost(error: unknown, signal?: AbortSignal): void {
  if (signal?.aborted || !(error instanceof TypeError)) throw error;
}

/** The complete events of an answer. */
async function* eventsOf(response: Response): AsyncGenerator<{ id: string; name: string; data: unknown }, void, void> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
      const blocks = (rest + chunk.value).split("\n\n");
      rest = blocks.pop()!;
      for (const block of blocks) {
        const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
        if (fields.data) yield { id: fields.id, name: fields.event, data: JSON.parse(fields.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function contentOf(body: object): { headers: Record<string, string>; body: BodyInit } {
  if (body instanceof FormData) return { headers: {}, body };
  if (body instanceof Blob) return { headers: { "Content-Type": body.type || "application/octet-stream" }, body };
  return { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

/** The gateway says that a repeated request can succeed. A proxy's problem object says nothing about it. */
const isRetryable = (error: unknown) =>
  error instanceof GatewayError && (error.problem.retryable ?? error.problem.status > 501);

/** Also after a lost connection (TypeError of fetch) and a proxy's 502, 503 or 504, when a repeated call does no harm. */
const mayRepeat = (error: unknown) =>
  isRetryable(error) || error instanceof TypeError || (error instanceof ForeignAnswer && error.status > 501);

/** Milliseconds: twice as long each time, up to 10 s, at random, so that the pages of many users do not return at once. */
const backOff = (attempt: number) => Math.random() * Math.min(10_000, 500 * 2 ** attempt);

/** `crypto.randomUUID` exists only on pages with https. */
const randomKey = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (each) => each.toString(16)).join("-");

function wait(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = () => (clearTimeout(timer), reject(signal?.reason));
    const timer = setTimeout(() => (signal?.removeEventListener("abort", stop), resolve()), ms);
    signal?.addEventListener("abort", stop, { once: true });
    if (signal?.aborted) stop();
  });
}
