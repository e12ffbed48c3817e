/** The API key that the user enters. It is stored while this tab is open, and sent only to this gateway. */

const STORED = "triton-gateway-key";

const key = () => sessionStorage.getItem(STORED) ?? "";

export const hasKey = () => key() !== "";

/** Returns the headers with the key; none without a key. */
export const keyHeaders = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

/** Returns the subprotocols of a WebSocket, which cannot have headers; none without a key. */
export const keyProtocols = () => (key() ? ["triton-gateway", `bearer.${key()}`] : []);

/** The form for the key. `onChange` is called after the key was changed or removed. */
export class KeyForm {
  #form;
  #forget;

  constructor(form, onChange) {
    this.#form = form;
    this.#forget = form.querySelector("[type=button]");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#keep(form.elements.key.value.trim());
      onChange();
    });
    this.#forget.addEventListener("click", () => {
      this.#keep("");
      onChange();
    });
    this.#show(Boolean(key()));
  }

  /** Call this when the gateway has refused a request because of its key. */
  ask() {
    this.#show(true);
    this.#form.elements.key.focus();
  }

  #keep(text) {
    this.#form.elements.key.value = "";
    if (text) sessionStorage.setItem(STORED, text);
    else sessionStorage.removeItem(STORED);
    this.#show(true);
  }

  #show(isShown) {
    this.#form.hidden = !isShown;
    this.#forget.hidden = !key();
    this.#form.elements.key.placeholder = key() ? "another API key" : "API key";
  }
}
