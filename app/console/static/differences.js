/** Compares two JSON values. */

const MOST = 50;

/** Returns the leaves that differ, as `{path, before, after}`; at most 50. An absent value is undefined. */
export function differences(before, after) {
  const found = [];
  collect(before, after, "", found);
  return found;
}

function collect(before, after, path, found) {
  if (found.length >= MOST || Object.is(before, after)) return;
  if (!isNested(before) || !isNested(after) || Array.isArray(before) !== Array.isArray(after)) {
    found.push({ path, before, after });
    return;
  }
  const isList = Array.isArray(before);
  for (const key of new Set([...Object.keys(before), ...Object.keys(after)])) {
    collect(before[key], after[key], isList ? `${path}[${key}]` : path ? `${path}.${key}` : key, found);
  }
}

const isNested = (value) => typeof value === "object" && value !== null;
