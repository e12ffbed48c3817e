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
    if ("index" in this.#schemas.output_event.properties) return this.#addItem(values);
    for (const { name, join } of this.#outputs) {
      if (values[name] !== null) this.values[name] = this.#joined(name, join, this.values[name], values[name]);
    }
  }

  /** Of a batch: the rows of a part, or an output of one item of a decoupled model. */
  #addItem({ index, ...values }) {
    for (const { name, join } of this.#outputs) {
      const all = this.values[name];
      if (join === null) values[name].forEach((row, number) => { all[index + number] = row; });
      else {
        const before = all[index] ?? emptyOf(this.#schemas.result.properties[name].items);
        all[index] = values[name] === null ? before : this.#joined(name, join, before, values[name]);
      }
    }
  }

  /** `reason` of an early exit, or null. */
  end(reason) {
    if ("early_exit" in this.#schemas.result.properties) this.values.early_exit = reason;
  }

  #joined(name, join, before, value) {
    if (join === null || join === "last") return value;
    if (typeof before === "string") return before + value;
    for (const item of this.#schemas.output_event.properties[name].type === "array" ? value : [value]) before.push(item);
    return before;
  }
}

const emptyOf = ({ type }) => ({ string: "", array: [] })[type] ?? null;
