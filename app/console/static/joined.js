/** Joins the outputs of a stream to one answer, as the gateway joins them for a unary request. */

export class JoinedAnswer {
  values;
  #outputs;
  #schemas;

  constructor({ outputs, schemas }) {
    this.#outputs = outputs;
    this.#schemas = schemas;
    this.values = Object.fromEntries(outputs.map(({ name }) => [name, emptyOf(schemas.result.properties[name])]));
  }

  /** `values`: the outputs of one event. */
  add(values) {
    for (const { name, join } of this.#outputs) {
      if (values[name] !== null) this.values[name] = this.#joined(name, join, values[name]);
    }
  }

  /** `reason` of an early exit, or null. */
  end(reason) {
    if ("early_exit" in this.#schemas.result.properties) this.values.early_exit = reason;
  }

  #joined(name, join, value) {
    const before = this.values[name];
    if (join === null || join === "last") return value;
    if (typeof before === "string") return before + value;
    for (const item of this.#schemas.output_event.properties[name].type === "array" ? value : [value]) before.push(item);
    return before;
  }
}

const emptyOf = ({ type }) => ({ string: "", array: [] })[type] ?? null;
