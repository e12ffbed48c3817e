// A React hook over client.ts: outputs, state, start and stop of one resumable stream, which survives a reload of the page.
import { useCallback, useEffect, useRef, useState } from "react";
import type { Gateway, Outputs, Requests, Stream, Streaming } from "./client";

/** `storageKey`: where the page remembers the address of the stream, in `sessionStorage`. */
export function useStream<P extends Streaming>(gateway: Gateway, pipeline: P, storageKey = `stream:${String(pipeline)}`) {
  const [stream, setStream] = useState<Stream<Outputs[P]>>();
  const [outputs, setOutputs] = useState<Outputs[P][]>([]);
  const [state, setState] = useState<"idle" | "running" | "done" | "stopped" | "failed">("idle");
  const [error, setError] = useState<Error>();
  const latest = useRef(0); // of the starts and stops

  const fail = useCallback((caught: Error) => (setError(caught), setState("failed")), []);
  const follow = useCallback((followed: Stream<Outputs[P]>) => (setStream(followed), setState("running")), []);
  useEffect(() => {
    const url = sessionStorage.getItem(storageKey);
    if (url) follow(gateway.open(pipeline, url));
  }, [gateway, pipeline, storageKey, follow]);

  useEffect(() => {
    if (!stream) return;
    const reading = new AbortController();
    const read = async () => {
      const again = gateway.open(pipeline, stream.url);
      const seen: Outputs[P][] = [];
      for await (const output of again.outputs(reading.signal)) seen.push(output), setOutputs([...seen]);
      setState("done");
    };
    const ended = () => reading.signal.aborted || sessionStorage.removeItem(storageKey);
    read().catch((caught) => reading.signal.aborted || fail(caught)).finally(ended);
    return () => reading.abort();
  }, [gateway, pipeline, storageKey, stream, fail]);

  const start = async (inputs: Requests[P]) => {
    const own = ++latest.current;
    setOutputs([]), setError(undefined), setState("running");
    const started = await gateway.start(pipeline, inputs);
    if (own !== latest.current) return started.cancel();
    sessionStorage.setItem(storageKey, started.url);
    follow(started);
  };
  const stop = () => {
    latest.current++;
    setStream(undefined), setState("stopped"), sessionStorage.removeItem(storageKey);
    stream?.cancel().catch(fail);
  };
  return { outputs, state, error, start: (inputs: Requests[P]) => start(inputs).catch(fail), stop };
}
