/** Builds a form from a pipeline's JSON Schema, and a request body from the form's values. */

import { element } from "./dom.js";
import { imageField } from "./image.js";

/** Returns a field: `node`, and `value()`, which is undefined if the field is empty and throws Error for invalid JSON. */
export function fieldsOf(pipeline) {
  const { properties, required } = pipeline.schemas.request;
  const kinds = Object.fromEntries(pipeline.inputs.map((input) => [input.name, input.kind]));
  return Object.entries(properties).map(([name, schema]) => {
    const isRequired = (required || []).includes(name);
    const initial = pipeline.sample[name] ?? schema.default;
    return { name, ...fieldOf({ name, kind: kinds[name], schema: preferred(schema), isRequired, initial }) };
  });
}

export function valuesOf(fields) {
  const values = fields.map((field) => [field.name, field.value()]);
  return Object.fromEntries(values.filter(([, value]) => value !== undefined));
}

/** Returns the schema of the value itself, from the alternatives value, one-element list and null. */
function preferred(schema) {
  return schema.anyOf ? { ...schema, ...schema.anyOf[0] } : schema;
}

function fieldOf(field) {
  if (field.kind === "image" || field.kind === "binary") return imageField(field);
  if (field.schema.enum) return choice(field);
  if (field.schema.type === "boolean") return toggle(field);
  if (field.schema.type === "integer" || field.schema.type === "number") return number(field);
  if (field.schema.type === "string") return text(field);
  if (field.schema.type === "array" && field.schema.items?.type === "string") return lines(field);
  return json(field);
}

function labelled({ name, isRequired }, control, hint = "") {
  control.id = `field-${name}`;
  control.name = name;
  control.required = isRequired;
  const note = hint || (isRequired ? "" : "optional");
  return element("div", { class: "field" }, element("label", { for: control.id }, name, element("small", {}, note)), control);
}

function choice(field) {
  const options = field.schema.enum.map((value) => element("option", { value: JSON.stringify(value) }, String(value)));
  const control = element("select", {}, ...(field.isRequired ? [] : [element("option", { value: "" }, "")]), ...options);
  if (field.initial !== undefined) control.value = JSON.stringify(field.initial);
  return { node: labelled(field, control), value: () => (control.value ? JSON.parse(control.value) : undefined) };
}

function toggle(field) {
  const control = element("input", { type: "checkbox", checked: field.initial === true });
  return { node: labelled({ ...field, isRequired: false }, control), value: () => control.checked };
}

function number(field) {
  const { minimum, maximum, type } = field.schema;
  const isBounded = Number.isSafeInteger(minimum ?? 0) && Number.isSafeInteger(maximum ?? 0);
  const bounds = isBounded ? { min: minimum, max: maximum } : {};
  const step = type === "integer" ? 1 : "any";
  const control = element("input", { type: "number", inputmode: "decimal", step, value: field.initial, ...bounds });
  const range = isBounded && minimum !== undefined && maximum !== undefined ? `${minimum} to ${maximum}` : "";
  return { node: labelled(field, control, range), value: () => (control.value ? Number(control.value) : undefined) };
}

function text(field) {
  const control = element("textarea", { rows: 3, spellcheck: "false" });
  control.value = field.initial ?? "";
  const isGiven = () => field.isRequired || control.value;
  return { node: labelled(field, control), value: () => (isGiven() ? control.value : undefined) };
}

function lines(field) {
  const control = element("textarea", { rows: Math.min(5, field.initial?.length || 3), spellcheck: "false" });
  control.value = (field.initial ?? []).join("\n");
  const value = () => (control.value.trim() ? control.value.split("\n").filter((line) => line.trim()) : undefined);
  return { node: labelled(field, control, "one a line"), value };
}

function json(field) {
  const control = element("textarea", { rows: 3, class: "code", spellcheck: "false" });
  control.value = field.initial === undefined ? "" : JSON.stringify(field.initial);
  return { node: labelled(field, control, "JSON"), value: () => parsed(field.name, control.value.trim()) };
}

function parsed(name, written) {
  if (!written) return undefined;
  try {
    return JSON.parse(written);
  } catch {
    throw new Error(`${name} is not JSON.`);
  }
}
