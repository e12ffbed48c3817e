/**
 * Reads one resumable stream to its terminal event, and reconnects after disconnects.
 *
 * The browser's EventSource reads the stream and resumes it after network failures. It cannot start after a given
 * event. After a deliberate disconnect, or an error without details, fetch continues from the last id instead.
 */

import { problemOf } from "./api.js";
import { eventsIn } from "./sse.js";

const RETRY_MS = 1000;
const TERMINAL = new Set(["done", "error"]);

export class StreamReader {
  #url;
  #on;
  #lastId = "";
  #source = null;
  #fetching = null;
  #timer = 0;
  #ended = false;

  /** Calls `on.event(name, data)`, `on.state("live" | "lost")`, and at most once, at the end, `on.problem(Problem)`. */
  constructor(url, on) {
    this.#url = url;
    this.#on = on;
  }

  open() {
    const source = (this.#source = new EventSource(this.#url));
    source.onopen = () => this.#on.state("live");
    for (const name of ["output", "done", "error"]) {
      source.addEventListener(name, (event) => {
        if (event.data === undefined) this.#failed(source);
        else this.#take(name, event.lastEventId, event.data);
      });
    }
  }

  /** Disconnects for a while, to show that the stream resumes. */
  drop(forMs) {
    this.#disconnect();
    this.#on.state("lost");
    this.#timer = setTimeout(() => this.#resume(), forMs);
  }

  close() {
    this.#ended = true;
    this.#disconnect();
  }

  #failed(source) {
    if (source !== this.#source || this.#ended) return;
    this.#on.state("lost");
    if (source.readyState === EventSource.CLOSED) this.#resume();
  }

  async #resume() {
    this.#disconnect();
    const fetching = (this.#fetching = new AbortController());
    try {
      const headers = this.#lastId ? { "Last-Event-ID": this.#lastId } : {};
      const response = await fetch(this.#url, { headers, signal: fetching.signal });
      if (!response.ok) return this.#refused(await problemOf(response));
      this.#on.state("live");
      for await (const event of eventsIn(response.body)) this.#take(event.event, event.id, event.data);
    } catch (error) {
      if (error.name !== "AbortError") console.info("the connection was lost", error);
    }
    if (!this.#ended && fetching === this.#fetching) this.#retry();
  }

  #retry() {
    this.#on.state("lost");
    this.#timer = setTimeout(() => this.#resume(), RETRY_MS);
  }

  #refused(problem) {
    this.close();
    this.#on.problem(problem);
  }

  #take(name, id, data) {
    if (this.#ended) return;
    this.#lastId = id;
    if (TERMINAL.has(name)) this.close();
    this.#on.event(name, JSON.parse(data));
  }

  #disconnect() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#fetching?.abort();
    this.#source = this.#fetching = null;
  }
}
