/** One session of a pipeline at a time: it is opened, each request of the form is a step, and it is ended. */

import { post, remove } from "./api.js";
import { html, useEffect, useRef, useState } from "./lib.js";

const LAST = { "X-Session-End": "true" };
const LOST = new Set([404, 410]);
const NONE = { url: null, steps: null, expires_s: null };

/** Returns the session and what can be done with it. Leaving the pipeline or the page ends it. */
export function useSession(pipeline) {
  const [shown, setShown] = useState(NONE);
  const session = useRef(NONE);
  const isLeft = useRef(false);
  const set = (changes) => {
    session.current = { ...session.current, ...changes };
    setShown(session.current);
  };
  const end = () => {
    const { url } = session.current;
    set({ url: null });
    return url && remove(url).catch(() => undefined); // it may have expired
  };
  useEffect(() => () => {
    isLeft.current = true;
    end();
  }, []);
  const open = async () => {
    const { values } = await post(`${pipeline.url}/sessions`);
    set({ url: values.url, steps: 0, expires_s: values.expires_in_s });
    if (isLeft.current) await end();
  };
  const step = (isLast) => async (_url, body, headers) => {
    try {
      const answer = await post(session.current.url, body, { ...headers, ...(isLast ? LAST : {}) });
      set({ steps: Number(stepOf(answer)), ...(isLast ? { url: null } : {}) });
      return answer;
    } catch (error) {
      if (LOST.has(error.answer?.status)) set({ url: null });
      throw error;
    }
  };
  return { ...shown, open, end, step };
}

/** Runs the request as the only step of a session. Raises Problem. */
export async function onlyStep(url, body, headers) {
  const { values: session } = await post(`${url}/sessions`);
  try {
    return await post(session.url, body, { ...headers, ...LAST });
  } catch (error) {
    remove(session.url).catch(() => undefined);
    throw error;
  }
}

const stepOf = ({ headers }) => headers.get("X-Session-Step");

/** Returns the number of the step that an answer belongs to as a text; an empty one without a session. */
export const stepText = (answer) => (stepOf(answer) ? ` · step ${stepOf(answer)}` : "");

/** The first button opens the session, and then sends a step: it keeps the focus. */
export function SessionButtons({ session: { url, steps, expires_s: expires, end }, isBusy }) {
  return html`
    <p class="actions">
      <button key="first" class="primary" id=${url ? "step" : "open"} disabled=${isBusy}>${url ? `Send step ${steps + 1}` : "Open a session"}</button>
      ${url
        ? html`<button key="last" id="last-step" disabled=${isBusy}>Last step</button><button key="end" type="button" id="end" disabled=${isBusy} onClick=${end}>End</button>`
        : html`<button key="run" id="run" disabled=${isBusy}>Run one step</button>`}
    </p>
    <p class="small" role="status" data-session=${url ? "open" : "none"}>
      ${url ? `The session is open: ${answered(steps)}. It expires after ${Math.round(expires)} s without a step.` : steps === null ? "No session is open." : `The session has ended: ${answered(steps)}.`}
    </p>`;
}

const answered = (steps) => `${steps} ${steps === 1 ? "step" : "steps"} answered`;
