/** Which pipelines hear, and what their outputs mean. */

/** Returns the names of the input and the outputs of a pipeline that hears; null for other pipelines. Without an output, its name is undefined. */
export function partsOf({ sessions, inputs, parameters, outputs }) {
  const required = [...inputs, ...parameters].filter((each) => each.required);
  const [input] = required;
  if (!sessions || required.length !== 1 || input.kind !== "binary" || !/audio|sound/i.test(`${input.name} ${input.tensor}`)) return null;
  const isPartial = ({ name }) => /partial/i.test(name);
  const texts = outputs.filter(({ kind }) => kind === "text");
  const numbers = outputs.filter(({ kind }) => kind === "number");
  return {
    input: input.name,
    text: texts.find((each) => !isPartial(each))?.name,
    partial: texts.find(isPartial)?.name,
    scores: numbers.find(({ shape }) => shape.length === 1)?.name,
    segments: numbers.find(({ shape }) => shape.length === 2 && shape[1] === 2)?.name,
  };
}
