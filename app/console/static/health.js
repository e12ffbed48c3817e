/**
 * Shows in the header whether the gateway and Triton are ready. It imports nothing, so that it works before the rest of the
 * page does.
 */

const HEALTH_MS = 2000;

const shown = document.getElementById("health");

/** Returns the state as a text; "ready" if all is well. */
async function stateNow() {
  try {
    const { status, triton, pipelines } = await (await fetch("/health/ready")).json();
    if (status === "draining") return "shutting down";
    if (triton === "down") return "Triton does not answer";
    const states = Object.values(pipelines);
    const ready = states.filter((state) => state === "ready").length;
    return status === "ready" || !states.length ? status.replace("_", " ") : `${ready} of ${states.length} pipelines ready`;
  } catch {
    return "unreachable";
  }
}

async function watch() {
  const state = await stateNow();
  if (shown.textContent !== state) {
    shown.textContent = state; // it is read aloud when it changes
    if (state === "ready") dispatchEvent(new Event("ready"));
  }
  shown.className = state === "ready" ? "chip good" : "chip bad";
  setTimeout(watch, HEALTH_MS);
}

watch();
