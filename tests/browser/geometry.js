// Draws components of the console with the given data, and reports what is drawn.
const [{ graphs = {}, explain = null }, done] = arguments;

const MARGIN = 1;
const STEP = 3;

const load = (...names) => Promise.all(names.map((name) => import(`/console/${name}.js`)));

async function report() {
  const [{ html, render }, { Graph }, { Waterfall }, { explained }] = await load("lib", "graph", "waterfall", "runs");
  const place = document.createElement("div");
  document.body.replaceChildren(place);
  const show = async (component, selector) => {
    render(null, place);
    render(component, place);
    while (!place.querySelector(selector)) await new Promise(requestAnimationFrame);
  };
  const found = { graphs: {} };
  for (const [name, graph] of Object.entries(graphs)) {
    await show(html`<${Graph} pipeline=${{ graph }} />`, ".node");
    found.graphs[name] = drawing(place);
  }
  if (explain) {
    const shown = explained(explain.answer, explain.graph);
    await show(html`<div class="card"><${Graph} pipeline=${{ graph: explain.graph }} explain=${shown} /><${Waterfall} explain=${shown} /></div>`, ".node");
    found.explain = drawnExplanation(place);
  }
  return found;
}

function drawing(place) {
  const boxes = [...place.querySelectorAll(".node")].map((node) => ({ id: node.dataset.id, ...areaOf(node.querySelector(".box")) }));
  const labels = [...place.querySelectorAll("rect.label")].map((node, index) => ({ id: `label ${index}`, ...areaOf(node) }));
  const links = [...place.querySelectorAll(".line")];
  const faults = [...boxes, ...labels].flatMap((area, index, all) =>
    all.slice(index + 1).filter((other) => overlap(area, other)).map((other) => `${area.id} lies on ${other.id}`),
  );
  for (const line of links) faults.push(...crossings(line, boxes));
  return { faults: [...new Set([...faults, ...cropped(place, boxes, links)])], boxes: boxes.length, links: links.length, ...words(place) };
}

function words(place) {
  const order = [...place.querySelectorAll(".link.order .line")].map((line) => `${line.dataset.from} > ${line.dataset.to}`);
  return { conditions: [...place.querySelectorAll(".condition")].map((text) => text.textContent), order };
}

function areaOf(node) {
  const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(node.getAttribute(name)));
  return { left: x, top: y, right: x + width, bottom: y + height };
}

const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

function crossings(line, boxes) {
  const { from, to } = line.dataset;
  const others = boxes.filter((box) => box.id !== from && box.id !== to);
  const points = Array.from({ length: Math.ceil(line.getTotalLength() / STEP) }, (_, at) => line.getPointAtLength(at * STEP));
  return points.flatMap(({ x, y }) => others.filter((box) => holds(box, x, y)).map((box) => `${from} > ${to} crosses ${box.id}`));
}

const holds = (box, x, y) => x > box.left - MARGIN && x < box.right + MARGIN && y > box.top - MARGIN && y < box.bottom + MARGIN;

/** What is outside the picture, and pictures that are wider than their view, which does not scroll. */
function cropped(place, boxes, links) {
  const [svg, view] = [place.querySelector("svg"), place.querySelector(".graph-view")];
  const { width, height } = svg.viewBox.baseVal;
  const outside = boxes.filter((box) => box.left < 0 || box.top < 0 || box.right > width || box.bottom > height).map((box) => box.id);
  for (const line of links) {
    const area = line.getBBox();
    if (area.x < 0 || area.y < 0 || area.x + area.width > width || area.y + area.height > height) outside.push(line.dataset.from);
  }
  if (svg.clientWidth > view.clientWidth && view.scrollWidth < svg.clientWidth) outside.push("the view does not scroll");
  if (document.documentElement.scrollWidth > innerWidth) outside.push("the page scrolls sideways");
  return outside.map((each) => `cropped: ${each}`);
}

function drawnExplanation(place) {
  const shares = [...place.querySelectorAll(".legend li")].map((item) => [item.dataset.kind, Number(item.dataset.ms)]);
  const states = [...place.querySelectorAll(".node.step")].map((node) => [node.dataset.id.slice("step ".length), node.dataset.state]);
  const texts = (row) => [...row.querySelectorAll(".name, .ms, dt, dd")].map((part) => part.textContent.replace(/\s+/g, " ").trim());
  const rows = [...place.querySelectorAll(".waterfall [data-span]")].map((row) => texts(row).join(" "));
  return { shares: Object.fromEntries(shares), states: Object.fromEntries(states), rows, notRun: [...place.querySelectorAll("p.not-run")].map((line) => line.textContent) };
}

report().then(done, (error) => done({ error: String(error) }));
