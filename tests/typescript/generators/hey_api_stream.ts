// hey-api's functions for streams send their POST again after a lost connection, with the id of the last event.
import { client } from "./hey-api/client.gen";
import { streamWrite } from "./hey-api";
import { headers, url } from "./page";

const statuses: number[] = [];
const ids: (string | undefined)[] = [];

/** Loses the connection of the first answer before its fourth event. */
const losing: typeof fetch = async (...sent) => {
  const answer = await fetch(...sent);
  if (statuses.push(answer.status) > 1) return answer;
  let isLost = false;
  const fail = () => {
    if (isLost) throw new TypeError("network error");
  };
  const lost = new TransformStream<string, string>({
    transform(chunk, controller) {
      fail();
      isLost = chunk.includes("id: 4\n");
      controller.enqueue(chunk.split("id: 4\n")[0]);
    },
    flush: fail,
  });
  const body = answer.body?.pipeThrough(new TextDecoderStream()).pipeThrough(lost).pipeThrough(new TextEncoderStream());
  return new Response(body, answer);
};

client.setConfig({ baseUrl: url, headers });
const { stream } = await streamWrite({
  body: { prompt: "The for statement", max_tokens: 8 },
  fetch: losing,
  onSseEvent: ({ id }) => ids.push(id),
  sseDefaultRetryDelay: 1,
  sseMaxRetryAttempts: 3,
});
for await (const _ of stream);
console.log(JSON.stringify({ statuses, ids }));
