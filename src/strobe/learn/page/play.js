"use strict";
// The last chapter: its controls, its timeline, its address.
const MOST_TILES = 4096;
const settings = { broken: null },
  now = { index: 0, offset: 0, playing: null };
let run, right, sums, stops, drawnGrid;

const editable = () => settings.n <= 8 && settings.d <= 4;
const numberOf = id => Number($(id).value);

// ---- from settings to a trace ------------------------------------------------------------------------------------------------
function sameAs(recordedTrace) {
  const preset = DATA.presets.find(p => p.name === recordedTrace.preset),
    mask = maskOf(settings.mask, settings.n, settings.left, settings.right).name;
  return (
    recordedTrace.n === settings.n &&
    recordedTrace.d === settings.d &&
    recordedTrace.block_q === Math.min(settings.blockQ, settings.n) &&
    recordedTrace.block_k === Math.min(settings.blockK, settings.n) &&
    recordedTrace.dtype === settings.dtype &&
    recordedTrace.mask === mask &&
    JSON.stringify(preset.matrices) === JSON.stringify({ q: settings.q, k: settings.k, v: settings.v })
  );
}
/** The largest difference between two traces of the same run, in the outputs. */
function disagreement(a, b) {
  let worst = 0;
  for (let i = 0; i < a.n; i++)
    a.row(i).out.forEach((x, c) => {
      worst = Math.max(worst, Math.abs(x - b.row(i).out[c]));
    });
  return worst;
}
function retrace() {
  const found = DATA.traces.find(sameAs),
    computed = recompute({ ...settings, broken: null });
  right = found ? recorded(found) : computed;
  run = settings.broken ? recompute(settings) : right;
  const mask = maskOf(settings.mask, settings.n, settings.left, settings.right);
  run.sees = (row, key) => mask.lo(row) <= key && key < mask.hi(row);
  sums = runningBytes(run, $("cached").checked);
  stops = [0];
  run.steps.forEach((step, i) => {
    if ($("detail").value === "step" || ["begin", "skip", "add", "store"].includes(step.kind)) stops.push(i + 1);
  });
  drawnGrid = buildGrid(run, index => {
    halt();
    go(index);
  });
  $("offset").max = run.block_q - 1;
  $("scrub").max = stops.length - 1;
  $("source").textContent = settings.broken
    ? "The numbers of chapter 12 are recomputed in this page, broken as you chose."
    : found
      ? `The numbers of chapter 12 were recorded by strobe ${DATA.version} itself (strobe.trace). This page's own recomputation differs from them by at most ${disagreement(right, computed).toExponential(0)} in the output.`
      : "The numbers of chapter 12 are recomputed in this page by the same steps; a test holds them against strobe.trace.";
  verdict();
  go(now.index);
}
function verdict() {
  const box = $("verdict");
  box.hidden = !settings.broken;
  if (!settings.broken) return;
  const rows = run.n <= 512 ? Array.from({ length: run.n }, (_, i) => i) : [0, run.n >> 1, run.n - 1];
  let notNumbers = 0,
    worst = 0,
    at = 0;
  for (const i of rows) {
    const [a, b] = [run.row(i).out, right.row(i).out];
    if (a.some(x => !Number.isFinite(x))) {
      if (!notNumbers) at = i;
      notNumbers++;
    } else if (!notNumbers)
      a.forEach((x, c) => {
        if (Math.abs(x - b[c]) > worst) {
          worst = Math.abs(x - b[c]);
          at = i;
        }
      });
  }
  const what = settings.broken === "max" ? "Without the maximum" : "Without the rescale",
    limit = `e^s overflows ${settings.dtype} above s = ${num(+Math.log(LARGEST[settings.dtype]).toPrecision(4))}`;
  const text = notNumbers
    ? `${what}: ${notNumbers} of ${rows.length} rows are no numbers any more. Row ${at}: ${list(run.row(at).out)} instead of ${list(right.row(at).out)}; ${limit}.`
    : worst > 1e-4
      ? `${what} the answer is wrong. Row ${at}: ${list(run.row(at).out)} instead of ${list(right.row(at).out)}.`
      : `${what} this input happens to come out right. ${settings.broken === "max" ? `All scores are small; ${limit}. Try float16, or scores of a thousand.` : "Its maxima never rise after the first tile, or nothing older matters."}`;
  box.replaceChildren(...rich(text));
}

// ---- the timeline ------------------------------------------------------------------------------------------------------------
function go(index) {
  const position = stops.findIndex(s => s >= Math.min(Math.max(index, 0), run.steps.length));
  now.index = stops[position < 0 ? stops.length - 1 : position];
  $("scrub").value = stops.indexOf(now.index);
  drawPlay();
  if (document.documentElement.dataset.part === "play") remember();
}
const move = by => go(stops[Math.min(Math.max(stops.indexOf(now.index) + by, 0), stops.length - 1)]);
const atPlayStart = () => now.index === 0;
function moveTile(by) {
  const ends = run.steps
    .map((step, i) => (["begin", "skip", "add", "store"].includes(step.kind) ? i + 1 : 0))
    .filter(Boolean);
  const next = by > 0 ? ends.find(e => e > now.index) : ends.filter(e => e < now.index).at(-1);
  go(next ?? (by > 0 ? run.steps.length : 0));
}
function drawPlay() {
  const moment = momentOf(run, now.index, now.offset),
    gpu = DATA.gpus[numberOf("gpu")],
    blocks = Math.ceil(run.n / run.block_q),
    words = sentence(run, moment, settings.broken);
  $("where").textContent = moment.step
    ? `Block of rows ${moment.step.block + 1} of ${blocks}${moment.step.tile === null ? "" : ` · tile of keys ${moment.step.tile + 1} of ${Math.ceil(run.n / run.block_k)}`} · ${moment.kind}`
    : "Before the first step";
  $("sentence").replaceChildren(...rich(words));
  $("scrub").setAttribute("aria-valuetext", `Step ${stops.indexOf(now.index)} of ${stops.length - 1}: ${words}`);
  $("position").textContent = `${stops.indexOf(now.index)} / ${stops.length - 1}`;
  drawGrid(drawnGrid, run, moment);
  drawBars(run, moment, settings.broken);
  drawNumbers(run, moment, settings.broken, settings.broken ? right.row(moment.row) : null);
  drawLanes(run, moment, sums, gpu);
  drawRoof(run, moment, sums, gpu);
}
function halt() {
  if (now.playing !== null) clearTimeout(now.playing);
  now.playing = null;
  $("run").textContent = "▶ Play";
  $("run").setAttribute("aria-label", "Play");
  $("sentence").setAttribute("aria-live", "polite");
}
function play() {
  if (now.playing !== null) return halt();
  if (now.index === run.steps.length) go(0);
  $("run").textContent = "❚❚ Pause";
  $("run").setAttribute("aria-label", "Pause");
  $("sentence").setAttribute("aria-live", "off"); // twenty sentences a minute would only drown each other
  const tick = () => {
    move(1);
    if (now.index === run.steps.length) return halt();
    now.playing = setTimeout(tick, 1800 / Number($("speed").value));
  };
  now.playing = setTimeout(tick, 200);
}

// ---- the controls ------------------------------------------------------------------------------------------------------------
const NUMBERS = {
  n: "Tokens N",
  d: "Head dim d",
  blockQ: "Rows per tile",
  blockK: "Keys per tile",
  left: "Keys before",
  right: "Keys after",
};
const SETTINGS = [...Object.keys(NUMBERS), "dtype", "mask"];
function complaint() {
  for (const [id, name] of Object.entries(NUMBERS)) {
    const { min, max } = $(id),
      value = numberOf(id);
    if ($(id).value === "" || !Number.isInteger(value) || value < min || value > max)
      return `${name} must be a whole number from ${min} to ${max}, not ${$(id).value || "empty"}.`;
  }
  const tiles = Math.ceil(numberOf("n") / numberOf("blockQ")) * Math.ceil(numberOf("n") / numberOf("blockK"));
  return tiles > MOST_TILES
    ? `That would be ${tiles} tiles; at most ${MOST_TILES} are drawn. Choose larger tiles or fewer tokens.`
    : null;
}
function fill() {
  for (const id of SETTINGS) $(id).value = settings[id];
  for (const node of document.querySelectorAll(".window")) node.hidden = settings.mask !== "window";
  for (const radio of document.querySelectorAll("input[name=broken]"))
    radio.checked = radio.value === (settings.broken || "");
  fillMatrices();
}
function fillMatrices() {
  const cell = (name, i, j) => {
    const input = el("input", {
      type: "number",
      step: "any",
      value: settings[name][i][j],
      "aria-label": `${name.toUpperCase()} row ${i} column ${j}`,
    });
    input.addEventListener("change", () => {
      const wanted = Number(input.value);
      if (input.value === "" || !Number.isFinite(wanted)) {
        input.value = settings[name][i][j];
        return;
      }
      settings[name] = settings[name].map((r, a) => (a === i ? r.map((x, b) => (b === j ? wanted : x)) : r));
      own("Your own numbers.");
      retrace();
    });
    return el("td", {}, input);
  };
  const table = name =>
    el(
      "table",
      {},
      el("caption", {}, name.toUpperCase()),
      el("tbody", {}, ...settings[name].map((row, i) => el("tr", {}, ...row.map((_, j) => cell(name, i, j))))),
    );
  $("noedit").hidden = editable();
  $("matrices").replaceChildren(...(editable() ? ["q", "k", "v"].map(table) : []));
}
function own(what) {
  $("preset").value = "own";
  $("about").textContent = what;
}
function choose(preset, index = 0) {
  halt();
  for (const id of SETTINGS) settings[id] = preset[id];
  const [q, k, v] = preset.matrices
    ? [preset.matrices.q, preset.matrices.k, preset.matrices.v]
    : sample(preset.n, preset.d);
  Object.assign(settings, { q, k, v });
  $("about").textContent = preset.about;
  $("preset").value = DATA.presets.indexOf(preset);
  $("cached").checked = preset.cached;
  $("problem").hidden = true;
  now.index = index;
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
  if (resized) {
    const [q, k, v] = sample(settings.n, settings.d);
    Object.assign(settings, { q, k, v });
    own("Your own sizes; the numbers are made by a recipe.");
  }
  fill();
  halt();
  retrace();
}
function playKeys(event) {
  const name = event.key;
  if (event.target.type === "radio" && name.startsWith("Arrow")) return;
  if (name === " " && event.target.closest("button, summary, input")) return;
  const action = {
    ArrowRight: () => move(1),
    ArrowLeft: () => move(-1),
    PageDown: () => moveTile(1),
    PageUp: () => moveTile(-1),
    Home: () => go(0),
    End: () => go(run.steps.length),
    " ": play,
  }[name];
  if (!action) return;
  event.preventDefault();
  if (name !== " ") halt();
  action();
}

// ---- the address -------------------------------------------------------------------------------------------------------------
const flat = rows => rows.map(row => row.join(",")).join(";"),
  unflat = text => text.split(";").map(row => row.split(",").map(Number));
function playAddress() {
  const preset = DATA.presets[$("preset").value],
    parts = {
      at: now.index,
      row: now.offset || null,
      broken: settings.broken,
      gpu: numberOf("gpu") ? DATA.gpus[numberOf("gpu")].name : null,
    };
  if (preset) parts.example = preset.name;
  for (const id of SETTINGS) if (!preset || settings[id] !== preset[id]) parts[id] = settings[id];
  if (!preset && editable()) for (const name of ["q", "k", "v"]) parts[name] = flat(settings[name]);
  return `#${PLAY_ID}?${new URLSearchParams(Object.entries(parts).filter(([, value]) => value !== null))}`;
}
/** The moment that an address names; what it names wrongly is left as it is. */
function restorePlay(values) {
  const preset = DATA.presets.find(p => p.name === values.example);
  if (preset) choose(preset);
  for (const id of SETTINGS) if (id in values) $(id).value = values[id];
  if (SETTINGS.some(id => id in values)) change();
  const given = ["q", "k", "v"].map(name => (values[name] ? unflat(values[name]) : null)),
    fits = rows =>
      rows && rows.length === settings.n && rows.every(row => row.length === settings.d && row.every(Number.isFinite));
  if (given.every(fits)) {
    Object.assign(settings, { q: given[0], k: given[1], v: given[2] });
    own("Your own numbers.");
  }
  settings.broken = ["rescale", "max"].includes(values.broken) ? values.broken : null;
  const gpu = DATA.gpus.findIndex(g => g.name === values.gpu);
  if (gpu >= 0) $("gpu").value = gpu;
  fill();
  retrace();
  now.offset = Math.min(Math.max(0, Math.floor(Number(values.row)) || 0), run.block_q - 1);
  $("offset").value = now.offset;
  go("at" in values ? Number(values.at) || 0 : now.index);
}

function startPlay() {
  DATA.presets.forEach((preset, i) => $("preset").append(el("option", { value: i }, preset.name)));
  $("preset").append(el("option", { value: "own", disabled: "" }, "Your own"));
  DATA.gpus.forEach((gpu, i) => $("gpu").append(el("option", { value: i }, gpu.name)));
  const sample = (...shapes) => el("svg:svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, ...shapes),
    square = style => el("svg:rect", { class: style, x: 1, y: 1, width: 12, height: 12 });
  $("grid-key").replaceChildren(
    ...[
      ["not yet", square("cell")],
      ["exists now", square("cell now")],
      ["done and gone", square("cell done")],
      ["skipped", square("cell skip")],
      ["partly masked", square("cell"), el("svg:path", { class: "hidden-corner", d: "M6 1h7v7Z" })],
      ["the row beside", el("svg:rect", { class: "rowline", x: 1, y: 4, width: 12, height: 5 })],
    ].map(([name, ...shapes]) => el("li", {}, sample(...shapes), name)),
  );
  document.querySelector("#gpus table").replaceChildren(...gpuTable(DATA.gpus));
  $("preset").addEventListener("change", () => choose(DATA.presets[numberOf("preset")]));
  for (const id of SETTINGS) $(id).addEventListener("change", change);
  for (const id of ["detail", "cached"]) $(id).addEventListener("change", retrace);
  $("gpu").addEventListener("change", drawPlay);
  $("offset").addEventListener("input", () => {
    now.offset = Math.min(Math.max(0, Math.floor(numberOf("offset")) || 0), run.block_q - 1);
    drawPlay();
    remember();
  });
  for (const radio of document.querySelectorAll("input[name=broken]"))
    radio.addEventListener("change", () => {
      settings.broken = radio.value || null;
      retrace();
    });
  $("scrub").addEventListener("input", () => {
    halt();
    go(stops[numberOf("scrub")]);
  });
  for (const [id, action] of Object.entries({
    first: () => go(0),
    back: () => move(-1),
    next: () => move(1),
    last: () => go(run.steps.length),
  }))
    $(id).addEventListener("click", () => {
      halt();
      action();
    });
  $("run").addEventListener("click", play);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      retrace();
    }
  });
  const first = DATA.presets[DATA.opening.preset];
  choose(first, DATA.opening.index);
}

document.documentElement.classList.add("js");
startPlay();
startStory();
document.documentElement.dataset.ready = "yes";
// For tests, and for the curious: the numbers behind the pictures.
window.strobePage = {
  recompute,
  sample,
  settings,
  state: now,
  go,
  get trace() {
    return run;
  },
  get moment() {
    return momentOf(run, now.index, now.offset);
  },
  get sums() {
    return sums;
  },
  steps: STEPS.map(step => step.id),
  goTo,
  story,
  sceneOf: id => sceneOf(byId(id)),
  breakRow,
  standardAt,
  flashAt,
  gradientsAfter,
  share,
  mostRows,
};
