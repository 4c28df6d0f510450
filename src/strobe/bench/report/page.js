"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent), RUN = DATA.run, ROWS = RUN.rows;
const KINDS = Object.fromEntries(RUN.kinds.map((kind, i) => [kind, i]));
const order = (a, b) => KINDS[a.kind] - KINDS[b.kind];
const PROVIDERS = [...new Map([...ROWS].filter(r => r.timed).sort(order).map(r => [r.provider, r.kind])).entries()].map(([name, kind]) => ({ name, kind }));
const STYLE = Object.fromEntries(Object.entries(RUN.styles).map(([name, s]) => [name, { colour: s.colour, dash: s.dashed ? "5 3" : undefined, shape: s.shape, width: s.width }]));
const hidden = new Set();
let suite = null, method = null, pass = null;

const groups = (rows, key) => rows.reduce((found, row) => found.set(key(row), [...(found.get(key(row)) || []), row]), new Map());
const describe = r => `${r.provider}\n${r.title}, ${RUN.methods[r.method][0]}\n${time(r.ms)} (${time(r.low)} – ${time(r.high)}, n ${r.n})` +
  (r.tflops ? `\n${rate(r.tflops)}${r.of ? `, ${Math.round(r.of * 100)} % of a matrix product` : ""}` : "") +
  (r.joules ? `\n${Math.round(r.watts)} W, ${r.joules.toPrecision(3)} J/TFLOP, ${r.per_tokens.toPrecision(3)} J per 1,000 tokens` : "") +
  (r.units ? `\nmatrix units busy ${Math.round(r.units * 100)} %` : "") + (r.clock ? ` at ${r.clock} MHz` : "") +
  (r.status !== "ok" ? `\n${r.status}: ${r.reason}` : "") + (r.note ? `\n${r.note}` : "");

function seriesOf(rows, y, extra = () => ({}), zeros = false) {
  return [...groups(rows, r => r.provider)].filter(([name]) => STYLE[name] && !hidden.has(name)).map(([name, list]) => ({
    name, style: STYLE[name],
    points: list.filter(r => r.timed && y(r) !== undefined && (y(r) > 0 || zeros)).map(r => ({ x: r.length, y: y(r), text: describe(r), ...extra(r) })),
    missing: list.filter(r => r.status === "out of memory").map(r => ({ x: r.length, text: `${r.provider}, ${short(r.length)}: out of memory\n${r.reason}` })),
  })).sort((a, b) => KINDS[kindOf(b.name)] - KINDS[kindOf(a.name)]); // ours last, on top
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
function figure(title, ...parts) { return el("figure", {}, el("h3", {}, title), ...parts); }
// What did not run, behind one line: a reason, and whom it concerns.
function absent(rows) {
  const out = rows.filter(r => !r.timed);
  if (!out.length) return null;
  const reasons = [...groups(out, r => `${r.status}: ${r.reason || ""}`)].map(([why, list]) => {
    const who = [...groups(list, r => r.provider)].map(([name, same]) => same.length > 1 ? `${name} ×${same.length}` : name).join(", ");
    return el("li", {}, `${why}: ${who}`);
  });
  return el("details", { class: "absent" }, el("summary", {}, `${new Set(out.map(r => r.provider)).size} providers did not run`), el("ul", {}, ...reasons));
}
function section(id, title, text, figures, rows, columns, note) {
  if (!figures.length) return null;
  return el("section", { id }, el("h2", {}, title), el("p", {}, text), legend(rows), el("div", { class: "figures" }, ...figures), tableBehind(rows.filter(r => r.timed || r.status === "out of memory"), columns), note ? el("p", {}, note) : null);
}

const COLUMNS = {
  case: ["case", r => r.title, "text"], key: ["key", r => r.key, "text"], who: ["provider", r => r.provider, "text who"], ms: ["time", r => r.ms, "", time],
  low: ["low", r => r.low, "", time], high: ["high", r => r.high, "", time], n: ["n", r => r.n], rate: ["rate", r => r.tflops, "", rate],
  of: ["of matmul", r => r.of, "", percent], units: ["matrix units", r => r.units, "", percent],
  watts: ["watts", r => r.watts, "", round], joules: ["J/TFLOP", r => r.joules, "", v => v.toPrecision(3)], tokens: ["J per 1,000 tokens", r => r.per_tokens, "", v => v.toPrecision(3)],
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
const panelsOf = rows => [...groups(rows, r => r.panel)].filter(([, list]) => lengths(list).length > 1);
// CPUs are drawn in GFLOP/s.
const rateUnit = rows => rows.some(r => r.tflops >= 2) ? ["TFLOP/s", 1] : ["GFLOP/s", 1e3];

function speed(rows) {
  const [unit, times] = rateUnit(rows);
  return panelsOf(rows).map(([title, list]) => figure(title, lineChart(
    seriesOf(list, r => r.tflops && r.tflops * times, r => ({ low: r.tflops * times * r.ms / r.high, high: r.tflops * times * r.ms / r.low })),
    { title, x: lengthAxis(list), y: { label: unit }, lines: ceilingLines(list, times) })));
}
function ceilingLines(list, times) {
  const ceilings = method === "sustained" ? RUN.ceilings.sustained_tflops : RUN.ceilings.matmul_tflops;
  const ceiling = ceilings[list[0].dtype], top = Math.max(...list.map(r => r.tflops || 0));
  return ceiling && top > 0.35 * ceiling ? [{ y: ceiling * times, label: "matrix product" }] : [];
}
function energy(rows) {
  return panelsOf(rows.filter(r => r.joules)).map(([title, list]) => figure(title, lineChart(
    seriesOf(list, r => r.joules), { title, x: lengthAxis(list), y: { label: "joules per TFLOP" } })));
}
function speedUp(rows) {
  return panelsOf(rows).map(([title, list]) => {
    const best = new Map();
    for (const r of list) if (r.kind === "ours" && r.timed && !hidden.has(r.provider) && !(best.get(r.length)?.ms < r.ms)) best.set(r.length, r);
    const standard = list.filter(r => r.kind === "standard");
    const series = seriesOf(standard, r => best.has(r.length) ? r.ms / best.get(r.length).ms : undefined);
    for (const s of series) for (const p of s.points) p.text = `${best.get(p.x)?.provider} is ${p.y >= 1 ? round(p.y) + " × faster" : round(1 / p.y) + " × slower"} than\n` + p.text;
    return series.some(s => s.points.length) ? figure(title, lineChart(series, { title, x: lengthAxis(list), y: { log: true, base: 2, label: "× faster (our fastest), logarithmic", format: v => `${round(v)}` }, lines: [{ y: 1, label: "" }] })) : null;
  }).filter(Boolean);
}
// Guides make sense where only the length changes; the grid keeps the number of tokens and changes the batch with it.
const one = list => new Set(list.map(r => r.scores / r.length ** 2)).size === 1;
function memory(rows) {
  return panelsOf(rows.filter(r => r.peak || r.status === "out of memory")).map(([title, list]) => {
    const series = seriesOf(list, r => r.extra, () => ({}), true), ns = lengths(list), limit = RUN.provenance.device.memory_bytes;
    for (const s of series) for (const p of s.points) { const r = list.find(row => row.provider === s.name && row.length === p.x); p.text = `${s.name}, ${short(p.x)}\nextra ${bytes(r.extra)} beyond inputs, outputs and gradients\npeak ${bytes(r.peak)} in all`; }
    const drawn = series.flatMap(s => s.points), points = drawn.filter(p => p.y > 0);
    if (!drawn.length) return null;
    const guide = (power, label) => {
      const anchor = power === 1 ? points.filter(p => p.x === ns[0]).map(p => p.y).sort((a, b) => a - b)[0] : points.filter(p => p.x === ns[0]).map(p => p.y).sort((a, b) => b - a)[0];
      return anchor ? { label, points: ns.map(n => ({ x: n, y: anchor * 0.72 * (n / ns[0]) ** power })) } : { label, points: [] };
    };
    const top = Math.max(...points.map(p => p.y)), lines = limit && (limit < 40 * top || list.some(r => r.status === "out of memory")) ? [{ y: limit, label: `the device's ${bytes(limit)}` }] : [];
    return figure(title, lineChart(series, { title, x: lengthAxis(list), y: { log: true, base: 2, band: true, label: "memory beyond inputs, outputs, gradients", format: bytes }, guides: one(list) ? [guide(1, "∝ N"), guide(2, "∝ N²")] : [], lines }));
  }).filter(Boolean);
}
function roofline(rows) {
  return [...groups(rows.filter(r => r.tflops && r.intensity), r => r.dtype)].map(([dtype, list]) => {
    const peak = RUN.ceilings.matmul_tflops[dtype], copy = RUN.ceilings.copy_gbytes_per_s;
    if (!peak || !copy) return null;
    const [unit, times] = rateUnit(list), series = seriesOf(list, r => r.tflops).map(s => ({ ...s, connect: false, missing: [], points: s.points }));
    for (const s of series) s.points = list.filter(r => r.provider === s.name && r.timed).map(r => ({ x: r.intensity, y: r.tflops * times, text: describe(r) + `\n${round(r.intensity)} FLOP per byte` }));
    const xs = list.map(r => r.intensity), ridge = peak * 1000 / copy, from = Math.min(...xs, ridge / 2), to = Math.max(...xs, ridge * 2);
    const at = x => Math.min(peak, x * copy / 1000);
    return figure(`roofline, ${dtype}`, lineChart(
      [...series, { name: "roof", style: { colour: "var(--soft)", width: 1.5 }, points: [from, ridge, to].map(x => ({ x, y: at(x) * times, text: `roof: ${rate(at(x))} at ${round(x)} FLOP per byte` })) }],
      { title: "roofline", x: { log: true, label: "FLOP per byte that must move" }, y: { log: true, label: unit } }));
  }).filter(Boolean);
}
function errors(rows) {
  return panelsOf(rows.filter(r => r.error)).map(([title, list]) => figure(title, lineChart(
    seriesOf(list, r => r.error).map(s => ({ ...s, missing: [] })), { title, x: lengthAxis(list), y: { log: true, label: "‖out − exact‖ / ‖exact‖", format: v => v.toExponential(0) } })));
}
function bars(rows) {
  return [...groups(rows, r => r.key)].map(([, list]) => {
    const title = list[0].title + ({ call: ", CPU time per call", graph: ", replayed from a CUDA graph" }[list[0].measure] || "");
    const shown = list.filter(r => r.timed && !hidden.has(r.provider)).sort((a, b) => a.ms - b.ms), speed = list[0].measure === "time", tokens = r => `${Math.round(r.tokens_per_s).toLocaleString("en")} tokens/s`;
    const items = shown.map(r => ({ name: r.provider, value: r.tokens_per_s || (speed && r.tflops ? r.tflops : r.ms), label: r.tokens_per_s ? tokens(r) : speed && r.tflops ? rate(r.tflops) : time(r.ms), text: describe(r), colour: (STYLE[r.provider] || {}).colour, strong: r.kind === "ours" }));
    return items.length ? figure(title, barChart(items, title), absent(list)) : null;
  }).filter(Boolean);
}
function comparison(entry) {
  const counts = [...groups(entry.changes, c => c.kind)].map(([kind, list]) => `${list.length} ${kind}`).join(", ");
  const css = { regression: "bad", broken: "bad", improvement: "good", repaired: "good" };
  const rows = entry.changes.map(c => ({ ...c, css: css[c.kind] || "" })).sort((a, b) => (b.ratio || 0) - (a.ratio || 0));
  return el("section", { id: "compare" }, el("h2", {}, `Compared with the run of ${entry.provenance.date.slice(0, 16).replace("T", " ")}`),
    entry.problem ? el("p", { class: "warning" }, `${entry.problem}: the times say nothing about the code.`) : null,
    el("p", {}, `${counts}. A change is called one only if the 95 % intervals do not overlap and it exceeds 3 %.`),
    sortable(rows, [["case", c => c.key, "text"], ["provider", c => c.provider, "text"], ["method", c => c.method, "text"], ["first run", c => c.old, "", time], ["this run", c => c.new, "", time], ["ratio", c => c.ratio, "", v => v.toFixed(3)], ["", c => c.kind, "text"]]));
}

function draw() {
  const chosen = ROWS.filter(r => r.suite === suite && r.method === method && r.pass === pass), plain = chosen.filter(r => r.measure === "time"), open = new Set([...document.querySelectorAll("section:has(details[open])")].map(s => s.id));
  const families = new Set(panelsOf(plain).map(([t]) => t)), single = chosen.filter(r => r.measure !== "time" || !families.has(r.panel));
  const parts = [
    section("speed", "Speed against length", `${TIMES()} A cross on top is a provider that ran out of memory. The dotted line is a matrix product, measured in the same run by the same method: a yardstick, not a limit. A fused kernel may exceed it, because it keeps its score matrix on the chip and, at the power limit, runs at another clock.`, speed(plain), plain, pick("case who ms low high n rate of units clock status")),
    section("energy", "Energy against length", "Joules for 10¹² operations of the matrix products, while a provider runs alone. At the power limit of a GPU this is what decides the speed.", energy(plain), plain.filter(r => r.joules), pick("case who rate watts joules tokens clock")),
    section("speedup", "Against standard attention", "How many times faster our fastest provider is than each standard baseline; below 1 it is slower.", speedUp(plain), plain.filter(r => r.kind !== "peer"), pick("case who ms rate status")),
    section("memory", "Memory against length", "What a call needs beyond its inputs, outputs and gradients, at its worst moment. Both axes are logarithmic; what needs nothing is drawn at 0. Where only the length changes, guides grow with N and N²; where the number of tokens is kept, the batch shrinks as the length grows.", memory(plain), plain, pick("case who length peak extra status")),
    section("bars", "Case by case", "The fastest on top.", bars(single), single, pick("case who ms low high n rate of gbs extra status")),
    section("roofline", "Roofline", "Against the work per byte that has to move at least once. The roof is measured in the same run: a copy, a matrix product.", roofline(chosen), chosen.filter(r => r.tflops), pick("case who rate gbs of units clock"), "*: more than 100 %; see the note on the matrix product above."),
    section("errors", "Error against length", "Relative distance from float64. Each provider is checked before it is timed.", errors(plain), plain.filter(r => r.error), pick("case who error status")),
    everything(chosen),
    ...DATA.compared.map(comparison),
  ].filter(Boolean);
  document.getElementById("main").replaceChildren(...parts);
  for (const id of open) { const box = document.querySelector(`#${id} details`); if (box) box.open = true; }
  for (const [id, chosen] of [["suites", suite], ["methods", method], ["passes", pass]]) for (const b of document.querySelectorAll(`#${id} button`)) b.setAttribute("aria-pressed", String(b.value === chosen));
  document.getElementById("conclusions").replaceChildren(...((RUN.conclusions[suite] || {})[pass] || []).map(sentence => el("li", {}, sentence)));
}
const TIMES = () => method === "sustained" ? "Means of at least a second in which a provider ran alone; the bars span the repeats." : "Medians; the bars are 95 % intervals.";
function everything(rows) {
  const box = el("div"), search = el("input", { type: "search", placeholder: "filter: provider, case, status, kernel", "aria-label": "Filter rows" });
  const columns = pick("case who ms low high n rate of units clock watts joules tokens extra error status kernels key repeat");
  const ran = rows.filter(r => r.timed || ["out of memory", "wrong", "failed"].includes(r.status));
  const fill = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    box.replaceChildren(sortable(ran.filter(r => { const text = JSON.stringify(r).toLowerCase(); return words.every(w => text.includes(w)); }), columns));
  };
  search.addEventListener("input", fill);
  fill();
  return el("section", { id: "everything" }, el("h2", {}, "Every row"), el("p", {}, "*: more than 100 %. The last column is the command that makes the row again."), search, box, absent(rows.filter(r => !ran.includes(r))));
}
function start() {
  document.body.append(tip);
  const p = RUN.provenance, d = p.device, ceilings = Object.entries(RUN.ceilings.matmul_tflops);
  document.getElementById("title").textContent = d.name;
  document.getElementById("subtitle").textContent = `Attention, measured ${p.date.slice(0, 16).replace("T", " ")} UTC with strobe ${p.strobe}`;
  const facts = { commit: p.git.commit ? p.git.commit.slice(0, 10) + (p.git.dirty ? " + changes" : "") : "unknown", torch: p.torch, CUDA: p.cuda, driver: p.driver, NVRTC: p.nvrtc, memory: d.memory_bytes ? bytes(d.memory_bytes) : null, "L2 cache": RUN.method.l2, host: `${p.host_cpu}, ${p.host_cores} cores`, copy: RUN.ceilings.copy_gbytes_per_s ? `${round(RUN.ceilings.copy_gbytes_per_s)} GB/s` : null };
  for (const [dtype, value] of ceilings) facts[`matrix product, ${dtype}`] = rate(value);
  for (const [dtype, value] of Object.entries(RUN.ceilings.sustained_tflops)) facts[`sustained, ${dtype}`] = rate(value);
  document.getElementById("facts").replaceChildren(...Object.entries(facts).filter(([, v]) => v).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))));
  document.getElementById("warnings").replaceChildren(...RUN.warnings.map(w => el("div", { class: "warning" }, w)));
  const suites = Object.keys(RUN.suites), methods = Object.keys(RUN.methods), passes = Object.keys(RUN.passes);
  // Not every suite was measured in every pass: what is chosen last stays, the other follows.
  const has = (s, p) => ROWS.some(r => r.suite === s && r.pass === p);
  const toSuite = value => { suite = value; if (!has(suite, pass)) pass = passes.find(p => has(suite, p)) || pass; };
  const toPass = value => { pass = value; if (!has(suite, pass)) suite = suites.find(s => has(s, pass)) || suite; };
  [suite, method] = [suites[0], methods[0]];
  toPass(passes[0]);
  const choose = () => { location.hash = `suite=${suite}&method=${method}&pass=${pass}`; draw(); };
  const button = (value, text, hint, act) => el("button", { type: "button", value, title: hint, on: { click: () => { act(value); choose(); } } }, text);
  document.getElementById("suites").replaceChildren(...suites.map(name => button(name, name, RUN.suites[name], toSuite)));
  if (methods.length > 1) document.getElementById("methods").replaceChildren(...methods.map(name => button(name, RUN.methods[name][0], RUN.methods[name][1], value => { method = value; })));
  if (passes.length > 1) document.getElementById("passes").replaceChildren(...passes.map(name => button(name, RUN.passes[name], `Times of ${RUN.passes[name]}`, toPass)));
  const asked = new URLSearchParams(location.hash.slice(1));
  if (passes.includes(asked.get("pass"))) toPass(asked.get("pass"));
  if (suites.includes(asked.get("suite"))) toSuite(asked.get("suite"));
  if (methods.includes(asked.get("method"))) method = asked.get("method");
  document.getElementById("footer").textContent = `Made by: ${p.command}`;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  draw();
  document.documentElement.dataset.ready = "yes";
}
start();
