"use strict";
// Small charts in SVG. They take numbers and return elements; colours come from the page's style, so that light and dark need no redraw.
const SVG = "http://www.w3.org/2000/svg";
function el(name, attributes = {}, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
const tip = el("div", { id: "tip" });
function hover(node, text) {
  const show = event => {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, event.clientY - box.height - 10) + "px";
  };
  node.addEventListener("pointermove", show);
  node.addEventListener("pointerdown", show);
  node.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  return node;
}
const round = x => x === 0 ? "0" : Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 1 ? String(+x.toPrecision(3)) : String(+x.toPrecision(2));
const rate = t => t >= 1 ? round(t) + " TFLOP/s" : t >= 1e-3 ? round(t * 1e3) + " GFLOP/s" : round(t * 1e6) + " MFLOP/s";
const percent = v => Math.round(v * 100) + " %" + (v > 1 ? " *" : "");
const short = n => n >= 1024 && n % 1024 === 0 ? n / 1024 + "K" : String(n);
const bytes = b => {
  const [unit, scale] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]].find(u => b >= u[1]) || ["B", 1];
  return round(b / scale) + " " + unit;
};
const time = ms => ms >= 1000 ? round(ms / 1000) + " s" : ms >= 0.1 ? round(ms) + " ms" : round(ms * 1000) + " µs";

function ticks(low, high, log, base = 10) {
  if (log && base !== 10) {
    const exponents = [Math.ceil(Math.log2(low) - 1e-9), Math.floor(Math.log2(high) + 1e-9)], step = Math.max(1, Math.ceil((exponents[1] - exponents[0]) / 6));
    return Array.from({ length: Math.floor((exponents[1] - exponents[0]) / step) + 1 }, (_, i) => 2 ** (exponents[0] + i * step));
  }
  if (log) {
    const found = [], step = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 6));
    for (let e = Math.ceil(Math.log10(low) - 1e-9); e <= Math.log10(high) + 1e-9; e += step) found.push(10 ** e);
    return found.length > 1 ? found : [low, high];
  }
  const raw = (high - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(+v.toPrecision(12));
  return found;
}

// series: [{name, style: {colour, dash, shape}, points: [{x, y, text, low, high}], missing: [{x, text}]}]
// options: {x: {log, ticks, format, label}, y: {log, format, label, zero, band}, guides: [{points, label}], lines: [{y, label}]}
function lineChart(series, options) {
  const W = 440, H = 290, left = 52, right = 12, top = 26, bottom = 38;
  const all = series.flatMap(s => s.points), missing = series.flatMap(s => s.missing || []);
  const svg = el("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": options.title || "" });
  if (!all.length) { svg.append(el("svg:text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "no data")); return svg; }
  const { x: X, y: Y } = options;
  const xs = [...all, ...missing].map(p => p.x), values = [...all.map(p => p.y), ...(options.lines || []).map(l => l.y)];
  // A logarithmic axis has no 0: what is 0 gets a band of its own below it.
  const zeros = Y.band && values.some(v => v === 0), ys = zeros ? values.filter(v => v > 0) : values, floor = H - bottom - (zeros ? 22 : 0);
  if (!ys.length) ys.push(1, 1024);
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) { x0 *= 0.7; x1 *= 1.4; }
  if (Y.log) { y0 = y0 / 1.4; y1 = y1 * (missing.length ? 2.2 : 1.4); } else { y0 = Y.zero === false ? y0 : Math.min(0, y0); y1 = y1 * (missing.length ? 1.16 : 1.06) || 1; }
  const scale = (v, a, b, from, to, log) => from + (log ? (Math.log(v) - Math.log(a)) / (Math.log(b) - Math.log(a)) : (v - a) / (b - a)) * (to - from);
  const px = v => scale(v, x0, x1, left + 10, W - right - 10, X.log), py = v => zeros && v === 0 ? H - bottom - 7 : scale(v, y0, y1, floor, top, Y.log);
  if (zeros) svg.append(el("svg:line", { class: "guide", x1: left, x2: W - right, y1: floor + 4, y2: floor + 4 }), el("svg:text", { x: left - 6, y: H - bottom - 3, "text-anchor": "end" }, "0"));
  for (const v of ticks(y0, y1, Y.log, Y.base)) {
    svg.append(el("svg:line", { class: "grid", x1: left, x2: W - right, y1: py(v), y2: py(v) }),
      el("svg:text", { x: left - 6, y: py(v) + 4, "text-anchor": "end" }, (Y.format || round)(v)));
  }
  for (const v of X.ticks ? X.ticks : ticks(x0, x1, X.log)) {
    svg.append(el("svg:line", { class: "axis", x1: px(v), x2: px(v), y1: H - bottom, y2: H - bottom + 4 }),
      el("svg:text", { x: px(v), y: H - bottom + 16, "text-anchor": "middle" }, (X.format || round)(v)));
  }
  svg.append(el("svg:line", { class: "axis", x1: left, x2: W - right, y1: H - bottom, y2: H - bottom }),
    el("svg:text", { x: (left + W - right) / 2, y: H - 4, "text-anchor": "middle" }, X.label),
    el("svg:text", { x: 4, y: 10 }, Y.label));
  for (const line of options.lines || []) {
    svg.append(el("svg:line", { class: "guide", x1: left, x2: W - right, y1: py(line.y), y2: py(line.y) }),
      el("svg:text", { x: left + 4, y: py(line.y) - 4 }, line.label));
  }
  for (const guide of options.guides || []) {
    const inside = guide.points.filter(p => p.y >= y0 && p.y <= y1 && p.x >= x0 && p.x <= x1);
    if (inside.length < 2) continue;
    const last = inside[inside.length - 1];
    svg.append(el("svg:path", { class: "guide", d: inside.map((p, i) => `${i ? "L" : "M"}${px(p.x)} ${py(p.y)}`).join("") }),
      el("svg:text", { x: px(last.x), y: py(last.y) + 14, "text-anchor": "end" }, guide.label));
  }
  for (const s of series) {
    const sorted = [...s.points].sort((a, b) => a.x - b.x);
    if (s.connect !== false && sorted.length > 1)
      svg.append(el("svg:path", { d: sorted.map((p, i) => `${i ? "L" : "M"}${px(p.x)} ${py(p.y)}`).join(""), fill: "none", stroke: s.style.colour, "stroke-width": s.style.width || 1.8, "stroke-dasharray": s.style.dash }));
    for (const p of sorted) {
      if (p.low !== undefined && p.high > p.low) svg.append(el("svg:line", { x1: px(p.x), x2: px(p.x), y1: py(p.low), y2: py(p.high), stroke: s.style.colour, opacity: 0.6 }));
      svg.append(hover(el("svg:g", { class: "hot" }, el("svg:circle", { cx: px(p.x), cy: py(p.y), r: 9, fill: "transparent" }), mark(s.style.shape, px(p.x), py(p.y), s.style.colour)), p.text));
    }
    for (const p of s.missing || []) {
      const row = [...series].filter(o => (o.missing || []).some(m => m.x === p.x)).indexOf(s);
      const [cx, cy] = [px(p.x), top - 2 + 10 * row];
      svg.append(hover(el("svg:g", { class: "hot oom" }, el("svg:circle", { cx, cy, r: 8, fill: "transparent" }),
        el("svg:path", { d: `M${cx - 3.5} ${cy - 3.5}L${cx + 3.5} ${cy + 3.5}M${cx + 3.5} ${cy - 3.5}L${cx - 3.5} ${cy + 3.5}`, stroke: s.style.colour, "stroke-width": 2 })), p.text));
    }
  }
  return svg;
}
function mark(shape, x, y, colour) {
  if (shape === "square") return el("svg:rect", { x: x - 3, y: y - 3, width: 6, height: 6, fill: colour });
  if (shape === "triangle") return el("svg:path", { d: `M${x} ${y - 4}L${x + 4} ${y + 3}L${x - 4} ${y + 3}Z`, fill: colour });
  return el("svg:circle", { cx: x, cy: y, r: 3.4, fill: colour });
}

// bars: [{name, value, text, label, colour}]
function barChart(bars, title) {
  const W = 440, row = 20, left = Math.min(230, 14 + 6.4 * Math.max(...bars.map(b => b.name.length))), H = bars.length * row + 8, most = Math.max(...bars.map(b => b.value || 0), 1e-12);
  const svg = el("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  bars.forEach((bar, i) => {
    const y = i * row + 4;
    svg.append(el("svg:text", { x: left - 6, y: y + 13, "text-anchor": "end", class: bar.strong ? "value" : "" }, bar.name));
    const width = Math.max(1.5, (bar.value / most) * (W - left - 80));
    svg.append(hover(el("svg:rect", { class: "hot", x: left, y: y + 2, width, height: row - 6, fill: bar.colour, rx: 2 }), bar.text),
      el("svg:text", { x: left + width + 5, y: y + 13, class: "value" }, bar.label));
  });
  return svg;
}
