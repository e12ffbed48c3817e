// Calls of samples/client.ts from Node, by name. Each prints one line of JSON.
import { ForeignAnswer, Gateway, GatewayError } from "./client";

declare const process: { argv: string[] };
const [, , name = "", url = "", image = ""] = process.argv;
const gateway = new Gateway(url);
const prompt = { prompt: "The for statement", max_tokens: 12, temperature: 0 };

const calls: Record<string, () => Promise<unknown>> = {
  async bodies() {
    const blob = await (await fetch(image)).blob();
    const form = new FormData();
    form.append("image", blob, "blank.png");
    const answers = [
      await gateway.run("ocr", { image: image.split(",")[1]! }),
      await gateway.run("ocr", form),
      await gateway.run("ocr", blob),
    ];
    return answers.map((answer) => answer.early_exit satisfies "no_text" | null);
  },
  async problem() {
    const caught = await gateway.run("write", { ...prompt, max_tokens: 9999 }).catch((error: unknown) => error);
    if (!(caught instanceof GatewayError)) throw caught;
    return [caught.code, caught.errors, caught.requestId === caught.problem.request_id];
  },
  async crowd() {
    const texts = await Promise.all(Array.from({ length: 6 }, () => gateway.run("write", prompt)));
    return texts.map((text) => text.text === texts[0]?.text);
  },
  async outputs() {
    const tokens: number[] = [];
    const stream = await gateway.start("write", prompt);
    for await (const output of stream.outputs()) tokens.push(...output.token_id);
    return [tokens, stream.lastId, stream.done?.outputs];
  },
  async resumed() {
    const stream = await gateway.start("write", prompt);
    for await (const _ of stream.outputs()) if (stream.lastId === "4") break;
    let count = 0;
    for await (const _ of gateway.open("write", stream.url, stream.lastId).outputs()) count++;
    return [stream.hasEnded, count];
  },
  async left() {
    const stop = new AbortController();
    let count = 0;
    const read = async () => {
      for await (const _ of gateway.stream("write", { ...prompt, max_tokens: 512 }, stop.signal)) {
        if (++count === 3) stop.abort();
      }
    };
    const caught = await read().catch((error: unknown) => error);
    return [count, caught instanceof DOMException && caught.name];
  },
  async foreign() {
    const caught = await gateway.run("write", prompt).catch((error: unknown) => error);
    return [caught instanceof ForeignAnswer && caught.status];
  },
};

console.log(JSON.stringify(await calls[name]?.()));
