"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent), RUN = DATA.run, ROWS = RUN.rows;
const KINDS = { ours: 0, ladder: 1, peer: 2, standard: 3 };
const PALETTE = {
  ours: ["#d1495b", "#e07a3f", "#b8336a", "#e0a13f", "#8f2d56"],
  ladder: ["#fbb03b", "#e8793a", "#c94c4c", "#9b3a6b", "#6b3a8a", "#3f3a8f", "#22577a"],
  peer: ["#2f6fb3", "#2a9d8f", "#6a5acd", "#4f9d3a", "#1f8fb8", "#5b7fa6", "#3a7d6b"],
  standard: ["#8a8d93", "#a67c52", "#6f7d5c", "#9a7aa0", "#7a6a5a", "#8f8f5f"],
};
const SHAPES = { ours: "circle", ladder: "diamond", peer: "square", standard: "triangle" };
const order = (a, b) => KINDS[a.kind] - KINDS[b.kind];
const PROVIDERS = [...new Map([...ROWS].filter(r => r.timed).sort(order).map(r => [r.provider, r.kind])).entries()].map(([name, kind]) => ({ name, kind }));
const STYLE = {};
for (const kind of Object.keys(KINDS)) PROVIDERS.filter(p => p.kind === kind).forEach((p, i) => {
  STYLE[p.name] = { colour: PALETTE[kind][i % PALETTE[kind].length], dash: kind === "standard" ? "5 3" : undefined, shape: SHAPES[kind], width: kind === "ours" ? 2.6 : 1.6 };
});
const hidden = new Set();
let suite = null;

const groups = (rows, key) => rows.reduce((found, row) => found.set(key(row), [...(found.get(key(row)) || []), row]), new Map());
const describe = r => `${r.provider}\n${r.key}\n${time(r.ms)} (95 %: ${time(r.low)} – ${time(r.high)}, n ${r.n})` +
  (r.tflops ? `\n${round(r.tflops)} TFLOP/s${r.of ? `, ${Math.round(r.of * 100)} % of a matrix product` : ""}` : "") +
  (r.units ? `\nmatrix units busy ${Math.round(r.units * 100)} %` : "") + (r.clock ? ` at ${r.clock} MHz` : "") +
  (r.status !== "ok" ? `\n${r.status}: ${r.reason}` : "") + (r.note ? `\n${r.note}` : "");

function seriesOf(rows, y, extra = () => ({})) {
  return [...groups(rows, r => r.provider)].filter(([name]) => STYLE[name] && !hidden.has(name)).map(([name, list]) => ({
    name, style: STYLE[name],
    points: list.filter(r => r.timed && y(r) !== undefined && y(r) > 0).map(r => ({ x: r.length, y: y(r), text: describe(r), ...extra(r) })),
    missing: list.filter(r => r.status === "out of memory").map(r => ({ x: r.length, text: `${r.provider}, ${short(r.length)}: out of memory\n${r.reason}` })),
  })).sort((a, b) => KINDS[kindOf(a.name)] - KINDS[kindOf(b.name)]);
}
const kindOf = name => PROVIDERS.find(p => p.name === name)?.kind || "peer";
const lengths = rows => [...new Set(rows.map(r => r.length))].sort((a, b) => a - b);
const lengthAxis = rows => ({ log: true, ticks: lengths(rows), format: short, label: "sequence length" });

function legend(rows) {
  const names = new Set(rows.filter(r => r.timed).map(r => r.provider));
  return el("div", { class: "legend" }, ...PROVIDERS.filter(p => names.has(p.name)).map(p => el("button", {
    type: "button", "aria-pressed": String(!hidden.has(p.name)),
    on: { click: () => { hidden.has(p.name) ? hidden.delete(p.name) : hidden.add(p.name); draw(); } },
  }, el("svg:svg", { viewBox: "0 0 22 10" }, el("svg:line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: STYLE[p.name].colour, "stroke-width": 2, "stroke-dasharray": STYLE[p.name].dash }), mark(STYLE[p.name].shape, 11, 5, STYLE[p.name].colour)), p.name)));
}
function figure(title, svg) { return el("figure", {}, el("h3", {}, title), svg); }
function section(id, title, text, figures, rows, columns) {
  if (!figures.length) return null;
  return el("section", { id }, el("h2", {}, title), el("p", {}, text), legendFor(id, rows), el("div", { class: "figures" }, ...figures), tableBehind(rows, columns));
}
const legendFor = (id, rows) => id === "tiles" ? null : legend(rows);

const COLUMNS = {
  case: ["case", r => r.key, "text"], who: ["provider", r => r.provider, "text who"], ms: ["median", r => r.ms, "", time],
  low: ["low", r => r.low, "", time], high: ["high", r => r.high, "", time], n: ["n", r => r.n], rate: ["TFLOP/s", r => r.tflops, "", round],
  of: ["of matmul", r => r.of, "", v => Math.round(v * 100) + " %"], units: ["matrix units", r => r.units, "", v => Math.round(v * 100) + " %"],
  clock: ["MHz", r => r.clock], peak: ["peak", r => r.peak, "", bytes], extra: ["extra", r => r.extra, "", bytes],
  error: ["error", r => r.error, "", v => v.toExponential(1)], gbs: ["GB/s", r => r.gbs, "", round],
  status: ["status", r => r.reason ? `${r.status}: ${r.reason}` : r.status, "text wide"], kernels: ["kernels", r => (r.kernels || []).join(", "), "text wide"],
  repeat: ["repeat", r => r.repeat, "text"], length: ["length", r => r.length],
};
function sortable(rows, columns) {
  const body = el("tbody"), heads = [];
  const fill = list => body.replaceChildren(...list.map(row => el("tr", { class: row.css || row.kind || "" }, ...columns.map(([, get, css, format]) => {
    const value = get(row), text = value === undefined || value === null || value === "" ? "–" : format ? format(value) : String(value);
    return el("td", { class: css || "" }, text);
  }))));
  columns.forEach(([name, get, css], i) => heads.push(el("th", { class: css || "", scope: "col", tabindex: 0, on: { click: () => sortBy(i), keydown: e => { if (e.key === "Enter") sortBy(i); } } }, name)));
  const sortBy = i => {
    const down = heads[i].getAttribute("aria-sort") === "ascending";
    heads.forEach(h => h.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", down ? "descending" : "ascending");
    const get = columns[i][1], sign = down ? -1 : 1;
    fill([...rows].sort((a, b) => {
      const [x, y] = [get(a), get(b)];
      if (x === undefined || x === null) return 1;
      if (y === undefined || y === null) return -1;
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
    }));
  };
  fill(rows);
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body));
}
function tableBehind(rows, columns) {
  const box = el("details", {}, el("summary", {}, `The ${rows.length} rows behind it`));
  box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(sortable(rows, columns)); });
  return box;
}
const pick = names => names.split(" ").map(name => COLUMNS[name]);
const panelTitle = r => [r.panel, r.direction !== "forward" ? r.direction : null, r.dtype !== "bfloat16" ? r.dtype : null].filter(Boolean).join(", ");
const panelsOf = rows => [...groups(rows, panelTitle)].filter(([, list]) => lengths(list).length > 1);

function speed(rows) {
  return panelsOf(rows).map(([title, list]) => figure(title, lineChart(
    seriesOf(list, r => r.tflops, r => ({ low: r.tflops * r.ms / r.high, high: r.tflops * r.ms / r.low })),
    { title, x: lengthAxis(list), y: { label: "TFLOP/s" }, lines: ceilingLines(list) })));
}
function ceilingLines(list) {
  const ceiling = RUN.ceilings.matmul_tflops[list[0].dtype], top = Math.max(...list.map(r => r.tflops || 0));
  return ceiling && top > 0.35 * ceiling ? [{ y: ceiling, label: "matrix product" }] : [];
}
function speedUp(rows) {
  return panelsOf(rows).map(([title, list]) => {
    const best = new Map();
    for (const r of list) if (r.kind === "ours" && r.timed && !hidden.has(r.provider) && !(best.get(r.length)?.ms < r.ms)) best.set(r.length, r);
    const standard = list.filter(r => r.kind === "standard");
    const series = seriesOf(standard, r => best.has(r.length) ? r.ms / best.get(r.length).ms : undefined);
    for (const s of series) for (const p of s.points) p.text = `${best.get(p.x)?.provider} is ${round(p.y)} times as fast as\n` + p.text;
    return series.some(s => s.points.length) ? figure(title, lineChart(series, { title, x: lengthAxis(list), y: { log: true, base: 2, label: "times as fast (our fastest), logarithmic", format: v => `${round(v)}` }, lines: [{ y: 1, label: "" }] })) : null;
  }).filter(Boolean);
}
// Guides make sense where only the length changes; the grid keeps the number of tokens and changes the batch with it.
const one = list => new Set(list.map(r => r.scores / r.length ** 2)).size === 1;
function memory(rows) {
  return panelsOf(rows.filter(r => r.peak || r.status === "out of memory")).map(([title, list]) => {
    const series = seriesOf(list, r => r.extra), ns = lengths(list), limit = RUN.provenance.device.memory_bytes;
    for (const s of series) for (const p of s.points) { const r = list.find(row => row.provider === s.name && row.length === p.x); p.text = `${s.name}, ${short(p.x)}\nextra ${bytes(r.extra)} over q, k, v, o\npeak ${bytes(r.peak)} in all`; }
    const points = series.flatMap(s => s.points);
    if (!points.length) return null;
    const guide = (power, label) => {
      const anchor = power === 1 ? points.filter(p => p.x === ns[0]).map(p => p.y).sort((a, b) => a - b)[0] : points.filter(p => p.x === ns[0]).map(p => p.y).sort((a, b) => b - a)[0];
      return anchor ? { label, points: ns.map(n => ({ x: n, y: anchor * 0.72 * (n / ns[0]) ** power })) } : { label, points: [] };
    };
    const top = Math.max(...points.map(p => p.y)), lines = limit && (limit < 40 * top || list.some(r => r.status === "out of memory")) ? [{ y: limit, label: `the device's ${bytes(limit)}` }] : [];
    return figure(title, lineChart(series, { title, x: lengthAxis(list), y: { log: true, base: 2, label: "extra memory over q, k, v, o", format: bytes }, guides: one(list) ? [guide(1, "∝ N"), guide(2, "∝ N²")] : [], lines }));
  }).filter(Boolean);
}
function roofline(rows) {
  return [...groups(rows.filter(r => r.tflops && r.intensity), r => r.dtype)].map(([dtype, list]) => {
    const peak = RUN.ceilings.matmul_tflops[dtype], copy = RUN.ceilings.copy_gbytes_per_s;
    if (!peak || !copy) return null;
    const series = seriesOf(list, r => r.tflops).map(s => ({ ...s, connect: false, missing: [], points: s.points }));
    for (const s of series) s.points = list.filter(r => r.provider === s.name && r.timed).map(r => ({ x: r.intensity, y: r.tflops, text: describe(r) + `\n${round(r.intensity)} FLOP per byte` }));
    const xs = list.map(r => r.intensity), ridge = peak * 1000 / copy, from = Math.min(...xs, ridge / 2), to = Math.max(...xs, ridge * 2);
    const at = x => Math.min(peak, x * copy / 1000);
    return figure(`roofline, ${dtype}`, lineChart(
      [...series, { name: "roof", style: { colour: "var(--soft)", width: 1.5 }, points: [from, ridge, to].map(x => ({ x, y: at(x), text: `roof: ${round(at(x))} TFLOP/s at ${round(x)} FLOP per byte` })) }],
      { title: "roofline", x: { log: true, label: "FLOP per byte that must move" }, y: { log: true, label: "TFLOP/s" } }));
  }).filter(Boolean);
}
function errors(rows) {
  return panelsOf(rows.filter(r => r.error)).map(([title, list]) => figure(title, lineChart(
    seriesOf(list, r => r.error).map(s => ({ ...s, missing: [] })), { title, x: lengthAxis(list), y: { log: true, label: "‖out − exact‖ / ‖exact‖", format: v => v.toExponential(0) } })));
}
function bars(rows) {
  return [...groups(rows, r => r.key)].map(([, list]) => {
    const title = list[0].model ? `${list[0].model}, ${list[0].direction}` : `${list[0].label}${list[0].measure === "call" ? ", CPU per call" : list[0].measure === "graph" ? ", graph replay" : list[0].measure === "compile" ? ", compile time" : ""}`;
    const shown = list.filter(r => !hidden.has(r.provider) && (r.timed || r.status !== "not installed") && r.status !== "skipped").sort((a, b) => (a.ms ?? 1e9) - (b.ms ?? 1e9));
    const items = shown.map(r => r.timed
      ? { name: r.provider, value: list[0].measure === "time" && r.tflops ? r.tflops : r.ms, label: list[0].measure === "time" && r.tflops ? `${round(r.tflops)} TFLOP/s` : time(r.ms), text: describe(r), colour: (STYLE[r.provider] || {}).colour, strong: r.kind === "ours" }
      : { name: r.provider, label: r.status, text: `${r.status}: ${r.reason}` });
    return items.some(i => i.value) ? figure(title, barChart(items, title)) : null;
  }).filter(Boolean);
}
function tiles(rows) {
  return [...groups(rows, r => r.provider + "|" + r.panel.replace(/-\d+x\d+$/, ""))].map(([, list]) => {
    const title = `${list[0].provider}, ${list[0].label.replace(/-\d+x\d+$/, "")}`;
    const cells = list.map(r => ({ x: r.tile[1], y: r.tile[0], value: r.timed ? (r.tflops >= 1 ? r.tflops : r.tflops * 1000) : undefined, text: r.timed ? describe(r) : `${r.status}: ${r.reason}` }));
    if (!cells.some(c => c.value)) return null;
    const unit = list.some(r => r.tflops >= 1) ? "TFLOP/s" : "GFLOP/s";
    return figure(`${title} (${unit})`, heatMap(cells, { title, x: "keys in a tile", y: "queries" }));
  }).filter(Boolean);
}
function comparison(entry) {
  const counts = [...groups(entry.changes, c => c.kind)].map(([kind, list]) => `${list.length} ${kind}`).join(", ");
  const css = { regression: "bad", broken: "bad", improvement: "good", repaired: "good" };
  const rows = entry.changes.map(c => ({ ...c, css: css[c.kind] || "" })).sort((a, b) => (b.ratio || 0) - (a.ratio || 0));
  return el("section", { id: "compare" }, el("h2", {}, `Compared with the run of ${entry.provenance.date.slice(0, 16).replace("T", " ")}`),
    entry.problem ? el("p", { class: "warning" }, `${entry.problem}: the times say nothing about the code.`) : null,
    el("p", {}, `${counts}. A change is called one only if the 95 % intervals of the medians do not overlap and it exceeds 3 %.`),
    sortable(rows, [["case", c => c.key, "text"], ["provider", c => c.provider, "text"], ["first run", c => c.old, "", time], ["this run", c => c.new, "", time], ["ratio", c => c.ratio, "", v => v.toFixed(3)], ["", c => c.kind, "text"]]));
}

function draw() {
  const chosen = ROWS.filter(r => r.suite === suite), plain = chosen.filter(r => r.measure === "time" && !r.tile), open = new Set([...document.querySelectorAll("section:has(details[open])")].map(s => s.id));
  const families = new Set(panelsOf(plain).map(([t]) => t)), single = chosen.filter(r => !r.tile && (r.measure !== "time" || !families.has(panelTitle(r))));
  const parts = [
    section("speed", "Speed against length", "Medians; the bars are 95 % intervals. A cross on top is a provider that ran out of memory. The dotted line is the matrix product measured in the same run.", speed(plain), plain, pick("case who ms low high n rate of units clock status")),
    section("speedup", "Against standard attention", "How many times as fast our fastest provider is as each standard baseline; below 1 it is slower.", speedUp(plain), plain.filter(r => r.kind !== "peer"), pick("case who ms rate status")),
    section("memory", "Memory against length", "What a call needs on top of q, k, v and the output, at its worst moment. Both axes are logarithmic. Where only the length changes, guides grow with N and N²; where the number of tokens is kept, the batch shrinks as the length grows.", memory(plain), plain, pick("case who length peak extra status")),
    section("bars", "Case by case", "Those that did not run say why.", bars(single), single, pick("case who ms low high n rate of gbs extra status")),
    section("tiles", "Tile sizes", "The darker the faster.", tiles(chosen.filter(r => r.tile)), chosen.filter(r => r.tile), pick("case who ms rate status")),
    section("roofline", "Roofline", "Against the work per byte that has to move at least once. The roof is measured in the same run: a copy, a matrix product.", roofline(chosen), chosen.filter(r => r.tflops), pick("case who rate gbs of units clock")),
    section("errors", "Error against length", "Relative distance from float64. Each provider is checked before it is timed.", errors(plain), plain.filter(r => r.error), pick("case who error status")),
    everything(chosen),
    ...DATA.compared.map(comparison),
  ].filter(Boolean);
  document.getElementById("main").replaceChildren(...parts);
  for (const id of open) { const box = document.querySelector(`#${id} details`); if (box) box.open = true; }
  for (const b of document.querySelectorAll("#suites button")) b.setAttribute("aria-pressed", String(b.textContent === suite));
}
function everything(rows) {
  const box = el("div"), search = el("input", { type: "search", placeholder: "filter: provider, case, status, kernel", "aria-label": "Filter rows" });
  const columns = pick("case who ms low high n rate of units clock extra error status kernels repeat");
  const fill = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    box.replaceChildren(sortable(rows.filter(r => { const text = JSON.stringify(r).toLowerCase(); return words.every(w => text.includes(w)); }), columns));
  };
  search.addEventListener("input", fill);
  fill();
  return el("section", { id: "everything" }, el("h2", {}, "Every row"), el("p", {}, "Whatever was not timed says why. The last column is the command that makes the row again."), search, box);
}
function start() {
  document.body.append(tip);
  const p = RUN.provenance, d = p.device, ceilings = Object.entries(RUN.ceilings.matmul_tflops);
  document.getElementById("title").textContent = d.name;
  document.getElementById("subtitle").textContent = `Attention, measured ${p.date.slice(0, 16).replace("T", " ")} UTC with strobe ${p.strobe}`;
  const facts = { commit: p.git.commit ? p.git.commit.slice(0, 10) + (p.git.dirty ? " + changes" : "") : "unknown", torch: p.torch, CUDA: p.cuda, driver: p.driver, NVRTC: p.nvrtc, memory: d.memory_bytes ? bytes(d.memory_bytes) : null, "L2 cache": RUN.method.l2, host: `${p.host_cpu}, ${p.host_cores} cores`, copy: RUN.ceilings.copy_gbytes_per_s ? `${round(RUN.ceilings.copy_gbytes_per_s)} GB/s` : null };
  for (const [dtype, value] of ceilings) facts[`matrix product, ${dtype}`] = `${round(value)} TFLOP/s`;
  document.getElementById("facts").replaceChildren(...Object.entries(facts).filter(([, v]) => v).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))));
  const warnings = [];
  if (!RUN.complete) warnings.push("The run was stopped before its end; what it had is shown.");
  if (RUN.throttled.length) warnings.push(`While it ran the GPU reported: ${RUN.throttled.join(", ")}.`);
  if (d.kind === "cpu" && p.host_load > p.host_cores / 4) warnings.push(`Other work ran on this machine when the run began (load ${p.host_load} on ${p.host_cores} cores): the times are noisy.`);
  const wrong = ROWS.filter(r => r.status === "wrong" || r.status === "failed").length;
  if (wrong) warnings.push(`${wrong} rows are wrong or failed; see the table.`);
  document.getElementById("warnings").replaceChildren(...warnings.map(w => el("div", { class: "warning" }, w)));
  const suites = [...new Set(ROWS.map(r => r.suite))];
  suite = suites[0];
  document.getElementById("suites").replaceChildren(...suites.map(name => el("button", { type: "button", on: { click: () => { suite = name; location.hash = "suite=" + name; draw(); } } }, name)));
  const asked = location.hash.replace("#suite=", "");
  if (suites.includes(asked)) suite = asked;
  document.getElementById("footer").textContent = `Made by: ${p.command}`;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  draw();
  document.documentElement.dataset.ready = "yes";
}
start();
