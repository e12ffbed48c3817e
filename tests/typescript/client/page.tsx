// A page with one stream, as an app has it: with StrictMode, which runs each effect twice.
import { StrictMode, useMemo } from "react";
import { createRoot } from "react-dom/client";
import { Gateway } from "./client";
import { useStream } from "./useStream";

function Writer({ url }: { url: string }) {
  const gateway = useMemo(() => new Gateway(url), [url]);
  const { outputs, state, error, start, stop } = useStream(gateway, "write");
  const write = (prompt: string) => start({ prompt, max_tokens: 512, temperature: 0 });
  return (
    <main>
      <button id="start" onClick={() => write("The for statement")}>Start</button>
      <button id="wrong" onClick={() => start({ prompt: "x", max_tokens: 9999 })}>Wrong</button>
      <button id="stop" onClick={stop}>Stop</button>
      <p id="state">{state}</p>
      <p id="error">{error?.message}</p>
      <p id="count">{outputs.length}</p>
      <p id="tokens">{outputs.flatMap((output) => output.token_id).join(" ")}</p>
    </main>
  );
}

const url = new URLSearchParams(location.search).get("gateway")!;
createRoot(document.querySelector("#root")!).render(<StrictMode><Writer url={url} /></StrictMode>);
