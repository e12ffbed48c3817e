/** The API key that the user enters. It is stored while this tab is open, and sent only to this gateway. */

const STORED = "triton-gateway-key";

const key = () => sessionStorage.getItem(STORED) ?? "";

export const hasKey = () => key() !== "";

/** Returns the headers with the key; none without a key. */
export const keyHeaders = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

/** Returns the subprotocols of a WebSocket, which cannot have headers; none without a key. */
export const keyProtocols = () => (key() ? ["triton-gateway", `bearer.${key()}`] : []);

/** `text`: empty to forget the key. */
export function keepKey(text) {
  if (text) sessionStorage.setItem(STORED, text);
  else sessionStorage.removeItem(STORED);
}
