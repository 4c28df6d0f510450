"use strict";
// Elements, numbers as text, and the stage on which keyed marks glide from one state to the next.
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (value !== undefined && value !== null) node.setAttribute(key, value);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

// ---- numbers as text ------------------------------------------------------------------------------------------------
function num(x, digits = 6) {
  if (x === null || x === -Infinity) return "−∞";
  if (Number.isNaN(x)) return "NaN";
  if (x === Infinity) return "∞";
  if (x === 0) return "0";
  const size = Math.abs(x),
    tiny = size >= 1e5 || size < 1e-3;
  const plain = tiny ? x.toExponential(Math.min(3, digits - 1)).replace("e+", "e") : String(+x.toPrecision(digits));
  return plain.replace("-", "−").replace("e-", "e−");
}
/** For a cell: two digits after the point below 1, else two significant digits. */
function short(x) {
  if (x === null || !Number.isFinite(x) || Math.abs(x) >= 1) return num(x, 2);
  return num(Number(x.toFixed(2)) || 0);
}
/** The text as nodes, with every `e^…` typeset: e^2.5 and e^(s − m). */
function rich(text) {
  return text.split(/(e\^(?:\([^)]*\)|[−-]?[\w.∞]+))/).map((part, i) => {
    if (i % 2 === 0) return part;
    const power = part.slice(2).replace(/^\((.*)\)$/, "$1");
    return el("span", {}, "e", el("sup", {}, power));
  });
}
function list(values, most = 4, digits = 6) {
  const shown = values
    .slice(0, most)
    .map(x => num(x, digits))
    .join(", ");
  return `[${shown}${values.length > most ? `, … ${values.length} in all` : ""}]`;
}
const signed = x => (x !== null && x < 0 ? `(${num(x)})` : num(x));
const thousands = x => String(x).replace(/\B(?=(\d{3})+$)/g, ",");
function bytes(b) {
  const units = [
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
    ["B", 1],
  ];
  const [unit, scale] = units.find(u => b >= u[1]) || ["B", 1];
  return `${+(b / scale).toPrecision(3)} ${unit}`;
}
function duration(seconds) {
  const units = [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
    ["ns", 1e-9],
  ];
  const [unit, scale] = units.find(u => seconds >= u[1]) || ["ns", 1e-9];
  return `${+(seconds / scale).toPrecision(3)} ${unit}`;
}
const span = ([a, b]) => (b - a === 1 ? String(a) : `${a}–${b - 1}`);

// ---- the stage ------------------------------------------------------------------------------------------------------
const GLIDE_MS = 550;
const stillness = matchMedia("(prefers-reduced-motion: reduce)");
const ease = t => (t < 0.5 ? 4 * t * t * t : 1 - (2 - 2 * t) ** 3 / 2);

/** A mark is { key, kind, x, y, w, h, o, cls, text, size, title, enter, pick, z }. `kind` is cell (a box with a text),
 *  box, text or path (with d, drawn at x, y). Marks keep their key from state to state: those that stay glide, new ones
 *  fade in (from `enter`, where given), the others fade out. A glide starts where the last one was interrupted. */
class Stage {
  constructor(root) {
    this.root = root;
    this.layers = [0, 1, 2, 3].map(() => root.appendChild(el("svg:g")));
    this.live = new Map();
    this.frame = null;
  }
  show(marks, { instant = false } = {}) {
    const wanted = new Set();
    for (const mark of marks) {
      wanted.add(mark.key);
      const target = { x: mark.x, y: mark.y, w: mark.w ?? 0, h: mark.h ?? 0, o: mark.o ?? 1 };
      let item = this.live.get(mark.key);
      if (item && item.kind !== mark.kind) {
        item.node.remove();
        item = null;
      }
      if (!item) {
        item = this.create(mark);
        item.at = { ...target, o: 0, ...mark.enter };
        this.live.set(mark.key, item);
      }
      this.dress(item, mark);
      Object.assign(item, { from: { ...item.at }, to: target, leaving: false });
    }
    for (const [key, item] of this.live)
      if (!wanted.has(key)) {
        Object.assign(item, { from: { ...item.at }, to: { ...item.at, ...item.exit, o: 0 }, leaving: true });
        item.node.removeAttribute("data-pick");
      }
    this.began = instant || stillness.matches ? -Infinity : performance.now();
    document.documentElement.dataset.settled = "no";
    cancelAnimationFrame(this.frame);
    this.tick(performance.now());
  }
  tick(now) {
    const passed = Math.min(1, Math.max(0, (now - this.began) / GLIDE_MS)),
      t = ease(passed);
    for (const [key, item] of this.live) {
      for (const name of ["x", "y", "w", "h", "o"])
        item.at[name] = item.from[name] + t * (item.to[name] - item.from[name]);
      if (item.leaving) item.at.o = item.from.o * Math.max(0, 1 - 2 * t);
      this.place(item);
      if (passed === 1 && item.leaving) {
        item.node.remove();
        this.live.delete(key);
      }
    }
    if (passed < 1) this.frame = requestAnimationFrame(later => this.tick(later));
    else document.documentElement.dataset.settled = "yes";
  }
  create(mark) {
    const boxed = mark.kind === "cell" || mark.kind === "box",
      written = mark.kind === "cell" || mark.kind === "text";
    const node = el("svg:g");
    const item = { kind: mark.kind, node, text: null };
    if (boxed) item.box = node.appendChild(el("svg:rect", { rx: mark.round ?? 3 }));
    if (mark.kind === "path") item.path = node.appendChild(el("svg:path"));
    if (written) item.text = node.appendChild(el("svg:text"));
    this.layers[mark.z ?? 1].append(node);
    return item;
  }
  dress(item, mark) {
    item.exit = mark.exit;
    item.node.setAttribute("class", `mark ${mark.cls || ""}`);
    if (item.path) item.path.setAttribute("d", mark.d);
    if (item.text) {
      if (item.text.textContent !== (mark.text ?? "")) item.text.textContent = mark.text ?? "";
      item.text.style.fontSize = `${mark.size ?? 12}px`;
      item.text.setAttribute("text-anchor", item.kind === "cell" ? "middle" : mark.anchor || "start");
    }
    const old = item.node.querySelector("title");
    if (mark.title === undefined) old?.remove();
    else (old || item.node.appendChild(el("svg:title"))).textContent = mark.title;
    if (mark.pick) item.node.dataset.pick = mark.pick;
    else item.node.removeAttribute("data-pick");
    for (const [name, value] of Object.entries({ tabindex: mark.tabindex, "aria-label": mark.spoken })) {
      if (value === undefined) item.node.removeAttribute(name);
      else item.node.setAttribute(name, value);
    }
  }
  place({ node, box, text, at, kind }) {
    node.setAttribute("transform", `translate(${at.x.toFixed(2)} ${at.y.toFixed(2)})`);
    node.setAttribute("opacity", at.o.toFixed(3));
    if (box) {
      box.setAttribute("width", Math.max(0, at.w).toFixed(2));
      box.setAttribute("height", Math.max(0, at.h).toFixed(2));
    }
    if (kind === "cell") text.setAttribute("transform", `translate(${(at.w / 2).toFixed(2)} ${(at.h / 2).toFixed(2)})`);
  }
}

// ---- marks ----------------------------------------------------------------------------------------------------------
const box = (key, x, y, w, h, cls, more = {}) => ({ key, kind: "box", x, y, w, h, cls, ...more });
const words = (key, x, y, text, cls = "", more = {}) => ({ key, kind: "text", x, y, text, cls, z: 2, ...more });
const path = (key, d, cls, more = {}) => ({ key, kind: "path", x: 0, y: 0, d, cls, z: 2, ...more });
/** An arrow from (x1, y1) to (x2, y2). */
function arrow(key, x1, y1, x2, y2, cls = "", more = {}) {
  const angle = Math.atan2(y2 - y1, x2 - x1),
    head = 7;
  const wing = turn => `L${x2 - head * Math.cos(angle + turn)} ${y2 - head * Math.sin(angle + turn)}`;
  return path(key, `M${x1} ${y1}L${x2} ${y2}M${x2} ${y2}${wing(0.45)}M${x2} ${y2}${wing(-0.45)}`, `arrow ${cls}`, more);
}
/** One cell for each number. `values[i][j]` may be null: an empty cell. `cls`, `enter`, `pick`, `o` may be functions of
 *  (i, j). With `across` the matrix is drawn transposed. `first` shifts the indices that keys and functions see. */
function grid(name, values, x, y, size, cls, options = {}) {
  const { across = false, first = [0, 0], numbers = size >= 17, gap = size > 12 ? 2 : 1, ...rest } = options;
  const of = (value, i, j) => (typeof value === "function" ? value(i, j) : value);
  const longest = Math.max(
    1,
    ...values.flat().map(v => (v === null ? 0 : short(v).length - (size < 28 && Math.abs(v) < 1 && v !== 0))),
  );
  const fontSize = Math.max(7.5, Math.min(15, (size - 4) / (0.58 * Math.max(longest, 2.4))));
  return values.flatMap((row, a) =>
    row.map((value, b) => {
      const i = a + first[0],
        j = b + first[1];
      const mark = {
        key: `${name}-${i}-${j}`,
        kind: "cell",
        w: size - gap,
        h: size - gap,
        cls: of(cls, i, j),
        size: fontSize,
        x: x + (across ? a : b) * size,
        y: y + (across ? b : a) * size,
        text: value === null || !numbers ? "" : size < 28 ? short(value).replace(/^(−?)0\./, "$1.") : short(value),
        title: value === null ? undefined : num(value, 9),
      };
      for (const [key, option] of Object.entries(rest)) mark[key] = of(option, i, j);
      return mark;
    }),
  );
}
