/** Calls the public API. Every failure becomes a Problem with the gateway's error message. */

import { keyHeaders } from "./key.js";

/** `answer` is the whole HTTP answer, undefined if there was none. */
export class Problem extends Error {
  constructor(problem, answer) {
    super(problem.detail || problem.title);
    this.problem = problem;
    this.answer = answer;
  }
}

export const get = (path) => request("GET", path);
export const post = (path, body, headers) => request("POST", path, body, headers);
export const remove = (path) => request("DELETE", path);

/** Returns the problem object of any error. */
export const problemIn = (error) => (error instanceof Problem ? error.problem : { title: error.message });

/** Returns the answer: `values` from its JSON, and `status`, `text`, `headers`, `requestId` and `tookMs`. */
async function request(method, path, body, headers = {}) {
  const started = performance.now();
  const options = { method, headers: { Accept: "application/json", ...keyHeaders(), ...headers }, keepalive: method === "DELETE" };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await reached(path, options);
  if (response.status === 401) dispatchEvent(new Event("unauthenticated"));
  const text = await response.text();
  const { status, headers: received } = response;
  const answer = { status, text, headers: received, requestId: received.get("X-Request-ID"), tookMs: performance.now() - started };
  if (!response.ok) throw new Problem(problemOfText(text, status), answer);
  return { ...answer, values: text ? JSON.parse(text) : null };
}

async function reached(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Problem({ title: "The gateway does not answer", detail: "Is it running, and is the network up?" });
  }
}

export async function problemOf(response) {
  return new Problem(problemOfText(await response.text(), response.status));
}

function problemOfText(text, status) {
  try {
    return JSON.parse(text);
  } catch {
    return { title: `The answer is ${status}`, status };
  }
}
