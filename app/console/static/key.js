/** The API key that the user types in. It is kept as long as this tab is open, and sent to this gateway only. */

const STORED = "triton-gateway-key";

const key = () => sessionStorage.getItem(STORED) ?? "";

/** The headers that send the key, none without a key. */
export const keyHeaders = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

/** Asks for the key where the page has its form. `onChange` is called after another key was typed in, or forgotten. */
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

  /** For a request that the gateway refused because of its key. */
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
