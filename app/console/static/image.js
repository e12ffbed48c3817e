/** Shows an image of a request or an answer, and draws the boxes that a pipeline found on it. */

import { html } from "./lib.js";

const MAGIC = { iVBORw: "image/png", "/9j/": "image/jpeg", R0lGOD: "image/gif", UklGR: "image/webp" };

/** Returns the data URL of an image in base64, or null for other bytes. */
export function imageUrlOf(base64) {
  const magic = Object.keys(MAGIC).find((start) => base64.startsWith(start));
  return magic ? `data:${MAGIC[magic]};base64,${base64}` : null;
}

/** Returns the data URL of any bytes in base64. */
export const base64UrlOf = (base64) => imageUrlOf(base64) ?? `data:application/octet-stream;base64,${base64}`;

/** Returns an image with its size in pixels, once the browser has decoded it. */
export async function decoded(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return { url, width: image.naturalWidth, height: image.naturalHeight };
}

const FORMS = {
  xyxy: ([left, top, right, bottom]) => [left, top, right, bottom],
  xywh: ([left, top, width, height]) => [left, top, left + width, top + height],
  cxcywh: ([x, y, width, height]) => [x - width / 2, y - height / 2, x + width / 2, y + height / 2],
};

/**
 * Returns the four corners of each box of an output in pixels of the image, or null if its values are no boxes. An output
 * of shape [N, 4, 2] has the corners. One of shape [N, 4] has `xyxy`, or the form that its description names; numbers
 * from 0 to 1 are shares of the width and the height.
 */
export function cornersOf({ kind, shape, description }, values, { width, height }) {
  if (kind !== "number" || !values?.length) return null;
  if (shape.slice(-2).join() === "4,2") return values;
  if (shape.length !== 2 || shape[1] !== 4) return null;
  const edges = values.map(FORMS[/\b(cxcywh|xywh)\b/i.exec(description)?.[0].toLowerCase() ?? "xyxy"]);
  if (!edges.every(([left, top, right, bottom]) => left < right && top < bottom)) return null;
  const [x, y] = edges.flat().every((each) => each <= 1) ? [width, height] : [1, 1];
  return edges.map(([left, top, right, bottom]) => [[left * x, top * y], [right * x, top * y], [right * x, bottom * y], [left * x, bottom * y]]);
}

/** `boxes`: four points each, in pixels of the image. `texts`: one for each box. */
export function BoxedImage({ image, boxes, texts }) {
  const { url, width, height } = image;
  return html`
    <figure class="boxes">
      <img src=${url} alt="the image that was sent" width=${width} height=${height} />
      <svg viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${texts.join("; ")}>
        ${boxes.map((points, index) => html`<${Box} points=${points} text=${texts[index] ?? ""} index=${index} imageWidth=${width} />`)}
      </svg>
    </figure>`;
}

function Box({ points, text, index, imageWidth }) {
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const size = Math.max(imageWidth / 40, Math.min((Math.max(...ys) - Math.min(...ys)) * 0.45, imageWidth / 20));
  return html`
    <g class="box" data-box=${index}>
      <polygon points=${points.map((point) => point.join(",")).join(" ")}><title>${text}</title></polygon>
      <text x=${Math.min(...xs)} y=${Math.max(size, Math.min(...ys) - size / 4)} font-size=${size}>${text}</text>
    </g>`;
}
