/** A session of a pipeline that hears: sound goes up in binary messages of a WebSocket while outputs come back. */

import { post, problemIn, remove } from "./api.js";
import { partsOf } from "./hearing.js";
import { keyProtocols } from "./key.js";
import { RATE_HZ } from "./sound.js";

/** Further sound waits, and is joined to larger messages. */
const MOST_UNANSWERED = 4;
export const PEAK_SAMPLES = 512;
const MOST_SAMPLES = 8 * PEAK_SAMPLES;
/** The pause of a second that ends the last phrase. */
const SILENCE = new Int16Array(32 * PEAK_SAMPLES);

const NOT_OPENED = "The WebSocket cannot be opened";
const PROXY = "Does a proxy in between pass on Upgrade and Connection?";
const CLOSED = {
  1001: ["The gateway shuts down", "Start again in a moment."],
  1002: ["The gateway received an invalid frame", "Does a proxy in between change WebSockets?"],
  1006: ["The connection was lost", "Is the gateway running, and is the network up?"],
  1007: ["The gateway received text that is not UTF-8", "Does a proxy in between change WebSockets?"],
  1009: ["The gateway does not accept a quarter of a second in a message", `Allow ${2 * MOST_SAMPLES} bytes: limits.body_bytes of the pipeline, or GATEWAY_MAX_BODY_BYTES.`],
  1013: ["The gateway has no memory for further requests", "Start again in a moment."],
  4404: ["The session has ended", "It was idle, or open, for longer than the pipeline allows."],
  4410: ["The state of the session is lost", "Triton has restarted, or has forgotten it. Start again."],
};
const CLOSED_FOR = {
  unauthenticated: ["The API key is not valid any more", "Enter another one at the top of the page."],
  forbidden: ["The API key does not allow this pipeline any more", "Enter another one at the top of the page."],
  slow_consumer: ["This page did not read the answers in time", "Is the network slow?"],
  slow_message: ["A message was incomplete for too long", "Is the network slow?"],
  idle: ["The gateway needed the connection for another client", "Connect again."],
  too_many_frames: ["The gateway received too many frames", "Does a proxy in between change WebSockets?"],
  ping_timeout: ["The connection was lost", "The gateway received nothing for too long."],
  internal: ["The gateway failed", "Its log shows the cause."],
};

/** Returns the problem of a close code and its reason; null if this page closed the WebSocket. */
export function problemOfClose(code, reason) {
  if (code === 1000) return null;
  const [title, detail] = CLOSED[code] ?? CLOSED_FOR[reason] ?? ["The connection was closed", `The code is ${code} ${reason}.`];
  return { title, detail };
}

/**
 * `onChange` is called with what was heard: `state` (opening, live, ending or ended), `text` and `partial`, `peaks` (the loudest of
 * each 512 samples, 0 to 1), `scores` and `segments` as received, `sent_s` and `answered_s` (seconds of sound), and `problem` or null.
 */
export class Listening {
  #pipeline;
  #parts;
  #onChange;
  #heard = { state: "opening", text: "", partial: "", peaks: [], scores: [], segments: [], sent_s: 0, answered_s: 0, problem: null };
  #stopSource = () => undefined;
  #socket = null;
  #wasOpen = false;
  #waiting = new Int16Array(0);
  #unanswered = [];

  constructor(pipeline, onChange) {
    this.#pipeline = pipeline;
    this.#parts = partsOf(pipeline);
    this.#onChange = onChange;
  }

  /** `source(push, finish)` returns a function that stops the source. Opens the session when the source is open. */
  async run(source) {
    this.#change({});
    try {
      this.#stopSource = await source((samples) => this.#push(samples), () => this.finish());
    } catch (error) {
      this.#end(problemIn(error));
      return;
    }
    if (this.#isEnded) this.#stopSource();
    else this.#open();
  }

  /** Sends the rest of the sound and a pause, so that the last phrase ends, and ends when all is answered. */
  finish() {
    if (this.#isEnded || this.#isEnding) return;
    this.#stopSource();
    if (!this.#heard.sent_s && !this.#waiting.length) {
      this.close();
      return;
    }
    this.#push(SILENCE);
    this.#change({ state: "ending" });
    this.#send();
  }

  /** Ends at once. */
  close() {
    this.#socket?.close(1000);
    this.#end(null);
  }

  get #isEnding() {
    return this.#heard.state === "ending";
  }

  get #isEnded() {
    return this.#heard.state === "ended";
  }

  #open() {
    const url = new URL(`${this.#pipeline.url}/session`, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    this.#socket = new WebSocket(url, keyProtocols());
    this.#socket.onopen = () => {
      this.#wasOpen = true;
      if (!this.#isEnding) this.#change({ state: "live" });
      this.#send();
    };
    this.#socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    this.#socket.onclose = async ({ code, reason }) => {
      if (!this.#isEnded) this.#end(this.#wasOpen ? problemOfClose(code, reason) : await this.#refusal());
    };
  }

  #push(samples) {
    if (this.#isEnded || this.#isEnding) return;
    const joined = new Int16Array(this.#waiting.length + samples.length);
    joined.set(this.#waiting);
    joined.set(samples, this.#waiting.length);
    this.#waiting = joined;
    this.#send();
  }

  #send() {
    while (this.#socket?.readyState === WebSocket.OPEN && this.#unanswered.length < MOST_UNANSWERED && this.#waiting.length) {
      const sent = this.#waiting.slice(0, MOST_SAMPLES);
      this.#waiting = this.#waiting.slice(MOST_SAMPLES);
      this.#socket.send(sent);
      this.#unanswered.push(sent.length / RATE_HZ);
      this.#change({ sent_s: this.#heard.sent_s + sent.length / RATE_HZ, peaks: [...this.#heard.peaks, ...peaksOf(sent)] });
    }
    if (this.#isEnding && this.#wasOpen && !this.#unanswered.length && !this.#waiting.length) this.close();
  }

  #take({ event, data }) {
    if (event === "output") {
      const { text, partial, scores, segments } = this.#parts;
      this.#change({
        text: data[text] ?? "",
        partial: data[partial] ?? "",
        scores: [...this.#heard.scores, ...(data[scores] ?? [])],
        segments: data[segments] ?? [],
        answered_s: this.#heard.answered_s + this.#unanswered[0],
      });
    } else if (event === "error") {
      this.#socket.close(1000);
      this.#end(data);
    } else {
      this.#unanswered.shift();
      this.#send();
    }
  }

  /** A page is not told why a WebSocket was refused, but opening a session over HTTP is refused for the same reason. */
  async #refusal() {
    try {
      const { values } = await post(`${this.#pipeline.url}/sessions`);
      await remove(values.url);
      return { title: NOT_OPENED, detail: `A session over HTTP can. ${PROXY}` };
    } catch (error) {
      const problem = problemIn(error);
      if (problem.code !== "http_sessions_off") return problem;
      return { title: NOT_OPENED, detail: `All places of the gateway's process that has the connection may be taken: try again. ${PROXY}` };
    }
  }

  #end(problem) {
    if (this.#isEnded) return;
    this.#stopSource();
    this.#change({ state: "ended", problem });
  }

  #change(changes) {
    this.#heard = { ...this.#heard, ...changes };
    this.#onChange(this.#heard);
  }
}

function peaksOf(samples) {
  const starts = Array.from({ length: Math.ceil(samples.length / PEAK_SAMPLES) }, (_, index) => index * PEAK_SAMPLES);
  return starts.map((start) => samples.subarray(start, start + PEAK_SAMPLES).reduce((most, sample) => Math.max(most, Math.abs(sample)), 0) / 32768);
}
