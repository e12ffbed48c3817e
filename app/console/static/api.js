/** Calls the public API. Every failure becomes a Problem with the gateway's error message. */

import { keyHeaders } from "./key.js";

export class Problem extends Error {
  constructor(problem) {
    super(problem.detail || problem.title);
    this.problem = problem;
  }
}

export const get = (path) => request("GET", path);
export const post = (path, body) => request("POST", path, body);
export const remove = (path) => request("DELETE", path);

async function request(method, path, body) {
  const started = performance.now();
  const options = { method, headers: { Accept: "application/json", ...keyHeaders() }, keepalive: method === "DELETE" };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await reached(path, options);
  if (response.status === 401) dispatchEvent(new Event("unauthenticated"));
  if (!response.ok) throw await problemOf(response);
  const text = await response.text();
  return { values: text ? JSON.parse(text) : null, headers: response.headers, tookMs: performance.now() - started };
}

async function reached(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Problem({ title: "The gateway does not answer", detail: "Is it running, and is the network up?" });
  }
}

export async function problemOf(response) {
  try {
    return new Problem(await response.json());
  } catch {
    return new Problem({ title: `The answer is ${response.status}`, status: response.status });
  }
}
