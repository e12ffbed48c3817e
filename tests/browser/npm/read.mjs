// node read.mjs URL: reads a stream with two npm packages and prints the events as JSON: {package: [[id, event, data], ...]}.
import { fetchEventSource } from "@microsoft/fetch-event-source";
import { EventSource } from "eventsource";

// fetch-event-source needs the globals of a page.
globalThis.window = globalThis;
globalThis.document = new EventTarget();

function byEventSource(url) {
  return new Promise((resolve) => {
    const events = [];
    const source = new EventSource(url);
    const take = (event) => {
      if (event.data === undefined) return;
      events.push([event.lastEventId, event.type, event.data]);
      if (event.type === "output") return;
      source.close();
      resolve(events);
    };
    for (const name of ["output", "done", "error"]) source.addEventListener(name, take);
  });
}

async function byFetchEventSource(url) {
  const events = [];
  const onmessage = ({ id, event, data }) => data && events.push([id, event, data]);
  await fetchEventSource(url, { openWhenHidden: true, onmessage });
  return events;
}

const [url] = process.argv.slice(2);
console.log(JSON.stringify({ eventsource: await byEventSource(url), "fetch-event-source": await byFetchEventSource(url) }));
