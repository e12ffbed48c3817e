/** Checks a value against the JSON Schema of its field, before it is sent. */

const NAMES = { integer: "an integer", number: "a number" };

/** Returns what is wrong with a value, or undefined. */
export function faultIn(schema, value) {
  if (Array.isArray(value)) return value.map((item) => faultIn(schema.items ?? {}, item)).find(Boolean);
  if (schema.enum && !schema.enum.includes(value)) return `must be one of ${schema.enum.join(", ")}`;
  return typeof value === "number" ? faultInNumber(schema, value) : undefined;
}

function faultInNumber({ type, minimum, maximum }, value) {
  const isFitting = Number.isFinite(value) && (type !== "integer" || Number.isInteger(value));
  const isWithin = !(isExact(minimum) && value < minimum) && !(isExact(maximum) && value > maximum);
  return isFitting && isWithin ? undefined : ["must be", NAMES[type] ?? "a number", rangeText(minimum, maximum)].filter(Boolean).join(" ");
}

function rangeText(minimum, maximum) {
  if (isExact(minimum) && isExact(maximum)) return `from ${minimum} to ${maximum}`;
  if (isExact(minimum)) return `of at least ${minimum}`;
  return isExact(maximum) ? `of at most ${maximum}` : "";
}

/** The bounds of a datatype such as INT64 are no exact numbers in JavaScript: the gateway checks them. */
const isExact = (bound) => typeof bound === "number" && (Number.isSafeInteger(bound) || !Number.isInteger(bound));
