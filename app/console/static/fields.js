/** The fields of a pipeline's form, from its JSON Schema, and the values of a draft. A draft has what the controls hold, by field name. */

import { faultIn } from "./checks.js";
import { base64UrlOf } from "./image.js";

const UNITS = { _s: "seconds", _ms: "milliseconds", _bytes: "bytes" };
const INTEGERS = /^U?INT/;

/** A draft with values that cannot be sent. `errors`: texts by field name. */
export class InvalidDraft extends Error {
  constructor(errors) {
    super(Object.entries(errors).map(([name, text]) => `${name}: ${text}`).join(" "));
    this.errors = errors;
  }
}

/** Returns fields: `name`, `control`, `schema`, `input` (undefined for a parameter), `isRequired`, `note`, `description`, and `initial` for a draft. */
export function fieldsOf(pipeline) {
  const { properties, required = [] } = pipeline.schemas.request;
  const inputs = Object.fromEntries(pipeline.inputs.map((input) => [input.name, input]));
  const descriptions = Object.fromEntries([...pipeline.inputs, ...pipeline.parameters].map(({ name, description }) => [name, description]));
  return Object.entries(properties).map(([name, described]) => {
    const schema = described.anyOf ? { ...described, ...described.anyOf[0] } : described;
    const field = { name, schema, input: inputs[name], isRequired: required.includes(name), description: descriptions[name] };
    const control = controlOf(field);
    return { ...field, control, note: noteOf(field, control), initial: heldOf(control, pipeline.sample[name] ?? schema.default) };
  });
}

export const draftOf = (fields) => Object.fromEntries(fields.map(({ name, initial }) => [name, initial]));

/** Returns the draft of a request body. `files`: names by field. */
export function draftOfValues(fields, values, files) {
  const heldBy = ({ name, control, schema }) => {
    if (control !== "file") return heldOf(control, values[name] ?? schema.default);
    return name in files ? { name: files[name], url: base64UrlOf(values[name]) } : null;
  };
  return Object.fromEntries(fields.map((field) => [field.name, heldBy(field)]));
}

/** Returns the draft of a link: its texts replace the initial ones. */
export function linkedDraft(fields, texts) {
  const named = fields.filter(({ name, control }) => name in texts && control !== "file");
  const held = named.map(({ name, control }) => [name, control === "toggle" ? texts[name] === "true" : texts[name]]);
  return { ...draftOf(fields), ...Object.fromEntries(held) };
}

/** Returns the request body. Raises InvalidDraft. */
export function valuesOf(fields, draft) {
  const errors = errorsOf(fields, draft);
  if (Object.keys(errors).length) throw new InvalidDraft(errors);
  const values = fields.map((field) => [field.name, valueOf(field, draft[field.name])]);
  return Object.fromEntries(values.filter(([, value]) => value !== undefined));
}

/** Returns texts by field name: what is missing, is not JSON, or is outside of its range. */
export function errorsOf(fields, draft) {
  const found = fields.map((field) => [field.name, errorOf(field, draft[field.name])]);
  return Object.fromEntries(found.filter(([, text]) => text));
}

function errorOf(field, held) {
  const { control, schema, isRequired } = field;
  if (isRequired && (held === null || held === "")) return control === "file" ? "Choose a file." : "Enter a value.";
  try {
    const fault = control === "file" ? undefined : faultIn(schema, valueOf(field, held));
    return fault && `The value ${fault}.`;
  } catch (error) {
    return `This is not JSON: ${error.message}.`;
  }
}

/** Returns JSON text for the tensor of a field: `fill` is zeros, ones, counting or random. A variable dimension has one element. */
export function filled({ input }, fill) {
  const isWhole = INTEGERS.test(input.datatype);
  let index = 0;
  const element = () => {
    const number = { zeros: 0, ones: 1, counting: index++, random: isWhole ? Math.floor(Math.random() * 10) : Number(Math.random().toFixed(4)) }[fill];
    return input.datatype === "BOOL" ? number >= 0.5 : number;
  };
  const nested = ([size, ...rest]) => Array.from({ length: Math.max(1, size) }, () => (rest.length ? nested(rest) : element()));
  return JSON.stringify(input.shape.length ? nested(input.shape) : element());
}

function controlOf({ input, schema }) {
  if (input?.kind === "image" || input?.kind === "binary") return "file";
  if (schema.enum) return "choice";
  if (schema.type === "boolean") return "toggle";
  if (schema.type === "integer" || schema.type === "number") return "number";
  if (schema.type === "string") return "text";
  if (schema.type === "array" && schema.items?.type === "string") return "lines";
  return input?.kind === "number" ? "tensor" : "json";
}

/** Returns the type, shape, range and unit of a field. */
function noteOf({ name, input, schema, isRequired }, control) {
  const unit = UNITS[Object.keys(UNITS).find((suffix) => name.endsWith(suffix))];
  const words = {
    file: input?.kind === "image" ? "image" : "file",
    lines: `texts, one a line [${input?.shape.join(", ")}]`,
    tensor: `${input?.datatype} [${input?.shape.join(", ")}]`,
    number: input?.datatype ?? schema.type,
    json: "JSON",
  };
  return [words[control] ?? (control === "text" ? "text" : schema.type), rangeOf(schema), unit, isRequired ? "" : "optional"].filter(Boolean).join(" · ");
}

/** Returns the range, unless it is only that of the datatype. */
function rangeOf({ minimum, maximum }) {
  const isNamed = (bound) => Number.isSafeInteger(bound) || (Number.isFinite(bound) && Math.abs(bound) < 1e9);
  if (isNamed(minimum) && isNamed(maximum)) return `${minimum} to ${maximum}`;
  if (isNamed(minimum)) return `at least ${minimum}`;
  return isNamed(maximum) ? `at most ${maximum}` : "";
}

function heldOf(control, value) {
  if (control === "file") return null;
  if (control === "toggle") return value === true;
  if (value === undefined || value === null) return "";
  if (control === "lines") return value.join("\n");
  return control === "text" || control === "number" ? String(value) : JSON.stringify(value);
}

function valueOf({ control, isRequired }, held) {
  if (control === "file") return held?.url;
  if (control === "toggle") return held;
  if (control === "text") return isRequired || held ? held : undefined;
  if (!held.trim()) return undefined;
  if (control === "lines") return held.split("\n").filter((line) => line.trim());
  return control === "number" ? Number(held) : JSON.parse(held);
}
