/** An input for a file to drop, paste or choose. Shows images, and draws the boxes that a pipeline found. */

import { element, svg } from "./dom.js";

export function imageField({ name, kind, isRequired }) {
  const accept = kind === "image" ? "image/*" : null;
  const control = element("input", { type: "file", id: `field-${name}`, name, accept, required: isRequired });
  const text = element("span", {}, element("strong", {}, kind === "image" ? "Drop an image" : "Drop a file"), " or choose one");
  const zone = element("label", { class: "drop", for: control.id }, control, text);
  let chosen = null;
  const choose = async (file) => {
    if (!file) return;
    chosen = { file, url: await dataUrlOf(file) };
    text.replaceChildren(kind === "image" ? element("img", { src: chosen.url, alt: file.name }) : file.name);
    control.required = false;
    zone.dispatchEvent(new CustomEvent("chosen", { bubbles: true }));
  };
  control.addEventListener("change", () => choose(control.files[0]));
  droppable(zone, choose);
  const heading = element("span", { class: "name" }, name);
  return {
    node: element("div", { class: "field" }, heading, zone),
    value: () => chosen?.url,
    imageUrl: () => (kind === "image" ? chosen?.url : undefined),
  };
}

function droppable(zone, choose) {
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    zone.addEventListener(name, (event) => {
      event.preventDefault();
      zone.classList.toggle("over", name === "dragenter" || name === "dragover");
    });
  }
  zone.addEventListener("drop", (event) => choose(event.dataTransfer.files[0]));
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Draws the image with each box (four points, in pixels of the image) and its text. */
export async function boxesOn(imageUrl, boxes, texts) {
  const image = element("img", { src: imageUrl, alt: "the image that was sent" });
  await image.decode();
  const { naturalWidth: width, naturalHeight: height } = image;
  const drawn = boxes.map((box, index) => boxOf(box, texts[index] ?? "", index, width));
  const layer = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": texts.join("; ") }, ...drawn);
  return element("figure", { class: "boxes" }, image, layer);
}

function boxOf(points, text, index, imageWidth) {
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const size = Math.max(imageWidth / 40, Math.min((Math.max(...ys) - Math.min(...ys)) * 0.45, imageWidth / 20));
  return svg(
    "g",
    { class: "box", "data-box": index },
    svg("polygon", { points: points.map((point) => point.join(",")).join(" ") }, svg("title", {}, text)),
    svg("text", { x: Math.min(...xs), y: Math.max(size, Math.min(...ys) - size / 4), "font-size": size }, text),
  );
}
