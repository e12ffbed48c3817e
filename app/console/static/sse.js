/** Parses Server-Sent Events from a fetch body (WHATWG HTML, "Server-sent events"): the subset that the gateway uses. */

export async function* eventsIn(body) {
  let rest = "";
  for await (const text of chunksOf(body)) {
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = eventOf(block);
      if (event.data !== undefined) yield event;
    }
  }
}

async function* chunksOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) yield chunk.value;
}

function eventOf(block) {
  const event = {};
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
  }
  return event;
}
