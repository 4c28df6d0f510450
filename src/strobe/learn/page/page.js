"use strict";
// The controls, and the one timeline that all four panels follow.
const DATA = JSON.parse($("data").textContent), MOST_TILES = 4096;
const settings = { broken: null }, state = { index: 0, offset: 0, playing: null };
let trace, right, sums, stops, grid;

const editable = () => settings.n <= 8 && settings.d <= 4;
const numberOf = id => Number($(id).value);

// ---- from settings to a trace --------------------------------------------------------------------------------------------------
function same(recordedTrace) {
  const preset = DATA.presets.find(p => p.name === recordedTrace.preset), mask = maskOf(settings.mask, settings.n, settings.left, settings.right).name;
  return recordedTrace.n === settings.n && recordedTrace.d === settings.d && recordedTrace.block_q === Math.min(settings.blockQ, settings.n) && recordedTrace.block_k === Math.min(settings.blockK, settings.n) &&
    recordedTrace.dtype === settings.dtype && recordedTrace.mask === mask && JSON.stringify(preset.matrices) === JSON.stringify({ q: settings.q, k: settings.k, v: settings.v });
}
/** The largest difference between two traces of the same run, in the outputs; relative to the values. */
function disagreement(a, b) {
  let worst = 0;
  for (let i = 0; i < a.n; i++) a.row(i).out.forEach((x, c) => { worst = Math.max(worst, Math.abs(x - b.row(i).out[c])); });
  return worst;
}
function retrace() {
  const found = DATA.traces.find(same), computed = recompute({ ...settings, broken: null });
  right = found ? recorded(found) : computed;
  trace = settings.broken ? recompute(settings) : right;
  const mask = maskOf(settings.mask, settings.n, settings.left, settings.right);
  trace.sees = (row, key) => mask.lo(row) <= key && key < mask.hi(row);
  sums = runningBytes(trace, $("cached").checked);
  stops = [0];
  trace.steps.forEach((step, i) => { if ($("detail").value === "step" || ["begin", "skip", "add", "store"].includes(step.kind)) stops.push(i + 1); });
  grid = buildGrid(trace, index => { stop(); go(index); });
  $("offset").max = trace.block_q - 1;
  $("scrub").max = stops.length - 1;
  $("source").textContent = settings.broken ? "The numbers are recomputed in this page, broken as you chose."
    : found ? `The numbers were recorded by strobe ${DATA.version} itself (strobe.trace). This page's own recomputation differs from them by at most ${disagreement(right, computed).toExponential(0)} in the output.`
    : "The numbers are recomputed in this page by the same steps; a test holds them against strobe.trace.";
  verdict();
  go(state.index);
}
function verdict() {
  const box = $("verdict");
  box.hidden = !settings.broken;
  if (!settings.broken) return;
  const rows = trace.n <= 512 ? Array.from({ length: trace.n }, (_, i) => i) : [0, trace.n >> 1, trace.n - 1];
  let notNumbers = 0, worst = 0, at = 0;
  for (const i of rows) {
    const [a, b] = [trace.row(i).out, right.row(i).out];
    if (a.some(x => !Number.isFinite(x))) { if (!notNumbers) at = i; notNumbers++; }
    else if (!notNumbers) a.forEach((x, c) => { if (Math.abs(x - b[c]) > worst) { worst = Math.abs(x - b[c]); at = i; } });
  }
  const what = settings.broken === "max" ? "Without the maximum" : "Without the rescale", limit = `e^s overflows ${settings.dtype} above s = ${num(+Math.log(LARGEST[settings.dtype]).toPrecision(4))}`;
  box.textContent = notNumbers ? `${what}: ${notNumbers} of ${rows.length} rows are no numbers any more. Row ${at}: ${list(trace.row(at).out)} instead of ${list(right.row(at).out)}; ${limit}.`
    : worst > 1e-4 ? `${what} the answer is wrong. Row ${at}: ${list(trace.row(at).out)} instead of ${list(right.row(at).out)}.`
    : `${what} this input happens to come out right. ${settings.broken === "max" ? `All scores are small; ${limit}. Try float16, or scores of a thousand.` : "Its maxima never rise after the first tile, or nothing older matters."}`;
}

// ---- the timeline --------------------------------------------------------------------------------------------------------------
function go(index) {
  const last = trace.steps.length;
  index = Math.min(Math.max(index, 0), last);
  const position = stops.findIndex(s => s >= index);
  state.index = stops[position < 0 ? stops.length - 1 : position];
  $("scrub").value = stops.indexOf(state.index);
  draw();
}
const move = by => go(stops[Math.min(Math.max(stops.indexOf(state.index) + by, 0), stops.length - 1)]);
function moveTile(by) {
  const ends = trace.steps.map((step, i) => (["begin", "skip", "add", "store"].includes(step.kind) ? i + 1 : 0)).filter(Boolean);
  const next = by > 0 ? ends.find(e => e > state.index) : ends.filter(e => e < state.index).at(-1);
  go(next ?? (by > 0 ? trace.steps.length : 0));
}
function draw() {
  const moment = momentOf(trace, state.index, state.offset), gpu = DATA.gpus[numberOf("gpu")], blocks = Math.ceil(trace.n / trace.block_q);
  const words = sentence(trace, moment, settings.broken);
  $("where").textContent = moment.step ? `Block of rows ${moment.step.block + 1} of ${blocks}${moment.step.tile === null ? "" : ` · tile of keys ${moment.step.tile + 1} of ${Math.ceil(trace.n / trace.block_k)}`} · ${moment.kind}` : "Before the first step";
  $("sentence").textContent = words;
  $("scrub").setAttribute("aria-valuetext", `Step ${stops.indexOf(state.index)} of ${stops.length - 1}: ${words}`);
  $("position").textContent = `${stops.indexOf(state.index)} / ${stops.length - 1}`;
  drawGrid(grid, trace, moment);
  drawBars(trace, moment, settings.broken);
  drawNumbers(trace, moment, settings.broken, settings.broken ? right.row(moment.row) : null);
  drawLanes(trace, moment, sums, gpu);
  drawRoof(trace, moment, sums, gpu);
}
function stop() {
  if (state.playing !== null) clearTimeout(state.playing);
  state.playing = null;
  $("play").textContent = "▶ Play";
  $("play").setAttribute("aria-label", "Play");
  $("sentence").setAttribute("aria-live", "polite");
}
function play() {
  if (state.playing !== null) return stop();
  if (state.index === trace.steps.length) go(0);
  $("play").textContent = "❚❚ Pause";
  $("play").setAttribute("aria-label", "Pause");
  $("sentence").setAttribute("aria-live", "off");  // twenty sentences a minute would only drown each other
  const tick = () => {
    move(1);
    if (state.index === trace.steps.length) return stop();
    state.playing = setTimeout(tick, 1800 / Number($("speed").value));
  };
  state.playing = setTimeout(tick, 200);
}

// ---- the controls --------------------------------------------------------------------------------------------------------------
const NUMBERS = { n: "Tokens N", d: "Head dim d", blockQ: "Rows per tile", blockK: "Keys per tile", left: "Keys before", right: "Keys after" };
function complaint() {
  for (const [id, name] of Object.entries(NUMBERS)) {
    const { min, max } = $(id), value = numberOf(id);
    if ($(id).value === "" || !Number.isInteger(value) || value < min || value > max) return `${name} must be a whole number from ${min} to ${max}, not ${$(id).value || "empty"}.`;
  }
  const tiles = Math.ceil(numberOf("n") / numberOf("blockQ")) * Math.ceil(numberOf("n") / numberOf("blockK"));
  return tiles > MOST_TILES ? `That would be ${tiles} tiles; at most ${MOST_TILES} are drawn. Choose larger tiles or fewer tokens.` : null;
}
function fill() {
  for (const id of [...Object.keys(NUMBERS), "dtype", "mask"]) $(id).value = settings[id];
  for (const node of document.querySelectorAll(".window")) node.hidden = settings.mask !== "window";
  fillMatrices();
}
function fillMatrices() {
  $("noedit").hidden = editable();
  $("matrices").replaceChildren(...(editable() ? ["q", "k", "v"] : []).map(name => el("table", {}, el("caption", {}, name.toUpperCase()), el("tbody", {}, ...settings[name].map((row, i) => el("tr", {}, ...row.map((value, j) => {
    const input = el("input", { type: "number", step: "any", value, "aria-label": `${name.toUpperCase()} row ${i} column ${j}` });
    input.addEventListener("change", () => {
      const wanted = Number(input.value);
      if (input.value === "" || !Number.isFinite(wanted)) { input.value = settings[name][i][j]; return; }
      settings[name] = settings[name].map((r, a) => (a === i ? r.map((x, b) => (b === j ? wanted : x)) : r));
      own("Your own numbers.");
      retrace();
    });
    return el("td", {}, input);
  })))))));
}
function own(what) {
  $("preset").value = "own";
  $("about").textContent = what;
}
function choose(preset) {
  stop();
  for (const id of [...Object.keys(NUMBERS), "dtype", "mask"]) settings[id] = preset[id];
  const [q, k, v] = preset.matrices ? [preset.matrices.q, preset.matrices.k, preset.matrices.v] : sample(preset.n, preset.d);
  Object.assign(settings, { q, k, v });
  $("about").textContent = preset.about;
  $("preset").value = DATA.presets.indexOf(preset);
  $("problem").hidden = true;
  state.index = 0;
  fill();
  retrace();
}
function change() {
  const problem = complaint();
  $("problem").hidden = !problem;
  $("problem").textContent = problem || "";
  if (problem) return;
  const resized = numberOf("n") !== settings.n || numberOf("d") !== settings.d;
  for (const id of Object.keys(NUMBERS)) settings[id] = numberOf(id);
  settings.dtype = $("dtype").value;
  settings.mask = $("mask").value;
  if (resized) { const [q, k, v] = sample(settings.n, settings.d); Object.assign(settings, { q, k, v }); own("Your own sizes; the numbers are made by a recipe."); }
  fill();
  stop();
  retrace();
}
function keys(event) {
  const typing = event.target.closest("input:not([type=range]):not([type=checkbox]):not([type=radio]), select, textarea"), name = event.key;
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.type === "radio" && name.startsWith("Arrow")) return;
  if (name === " " && event.target.closest("button, summary, input")) return;
  const action = { ArrowRight: () => move(1), ArrowLeft: () => move(-1), PageDown: () => moveTile(1), PageUp: () => moveTile(-1), Home: () => go(0), End: () => go(trace.steps.length), " ": play }[name];
  if (!action) return;
  event.preventDefault();
  if (name !== " ") stop();
  action();
}
function start() {
  DATA.presets.forEach((preset, i) => $("preset").append(el("option", { value: i }, preset.name)));
  $("preset").append(el("option", { value: "own", disabled: "" }, "Your own"));
  DATA.gpus.forEach((gpu, i) => $("gpu").append(el("option", { value: i }, gpu.name)));
  const legend = { "not yet": "cell", now: "cell now", done: "cell done", skipped: "cell skip" };
  $("grid-legend").replaceChildren(...Object.entries(legend).map(([name, style]) => el("li", {}, el("svg:svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, el("svg:rect", { class: style, x: 1, y: 1, width: 12, height: 12 }), name === "skipped" ? el("svg:path", { class: "skipped", d: "M1 1l12 12m0 -12l-12 12" }) : null), name)),
    el("li", {}, el("svg:svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, el("svg:rect", { class: "rowline", x: 1, y: 4, width: 12, height: 5 })), "the row in panel 2"),
    el("li", {}, el("svg:svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, el("svg:rect", { class: "cell", x: 1, y: 1, width: 12, height: 12 }), el("svg:path", { class: "hidden-corner", d: "M6 1h7v7Z" })), "partly masked"));
  document.querySelector("#gpus table").replaceChildren(...gpuTable(DATA.gpus));
  $("preset").addEventListener("change", () => choose(DATA.presets[numberOf("preset")]));
  for (const id of [...Object.keys(NUMBERS), "dtype", "mask"]) $(id).addEventListener("change", change);
  for (const id of ["detail", "cached"]) $(id).addEventListener("change", retrace);
  $("gpu").addEventListener("change", draw);
  $("offset").addEventListener("input", () => { state.offset = Math.min(Math.max(0, Math.floor(numberOf("offset")) || 0), trace.block_q - 1); draw(); });
  for (const radio of document.querySelectorAll("input[name=broken]")) radio.addEventListener("change", () => { settings.broken = radio.value || null; retrace(); });
  $("scrub").addEventListener("input", () => { stop(); go(stops[numberOf("scrub")]); });
  for (const [id, action] of Object.entries({ first: () => go(0), back: () => move(-1), next: () => move(1), last: () => go(trace.steps.length) })) $(id).addEventListener("click", () => { stop(); action(); });
  $("play").addEventListener("click", play);
  $("theme").addEventListener("click", () => {
    const dark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; retrace(); } });
  document.addEventListener("keydown", keys);
  document.querySelector("input[name=broken]").checked = true;
  choose(DATA.presets[0]);
  document.documentElement.dataset.ready = "yes";
}
start();
// For tests, and for the curious: the numbers behind the picture.
window.strobePage = { recompute, sample, settings, state, go, get trace() { return trace; }, get moment() { return momentOf(trace, state.index, state.offset); }, get sums() { return sums; } };
