"use strict";
// What a moment looks like. Each function takes the trace and a moment and fills one panel; colours come from the style.
const SVG = "http://www.w3.org/2000/svg", $ = id => document.getElementById(id);
function el(name, attributes = {}, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== null) node.setAttribute(key, value);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
const svg = (width, height, label, ...children) => el("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);
const text = (x, y, content, more = {}) => el("svg:text", { x, y, ...more }, content);

// ---- numbers as text ---------------------------------------------------------------------------------------------------------
function num(x, digits = 6) {
  if (x === null || x === -Infinity) return "−∞";
  if (Number.isNaN(x)) return "NaN";
  if (x === Infinity) return "∞";
  if (x === 0) return "0";
  const size = Math.abs(x), plain = size >= 1e5 || size < 1e-3 ? x.toExponential(Math.min(3, digits - 1)).replace("e+", "e") : String(+x.toPrecision(digits));
  return plain.replace("-", "−").replace("e-", "e−");
}
function list(values, most = 4) {
  const shown = values.slice(0, most).map(x => num(x)).join(", ");
  return `[${shown}${values.length > most ? `, … ${values.length} in all` : ""}]`;
}
const signed = x => (x !== null && x < 0 ? `(${num(x)})` : num(x));
function bytes(b) {
  const [unit, scale] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]].find(u => b >= u[1]) || ["B", 1];
  return `${+(b / scale).toPrecision(3)} ${unit}`;
}
function duration(seconds) {
  const [unit, scale] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9], ["ps", 1e-12]].find(u => seconds >= u[1]) || ["ps", 1e-12];
  return `${+(seconds / scale).toPrecision(3)} ${unit}`;
}
const span = ([a, b]) => (b - a === 1 ? String(a) : `${a}–${b - 1}`);

// ---- a moment: the state of one row after the first `index` steps ---------------------------------------------------------------
/** index 0: before the first step; i: just after step i - 1. */
function momentOf(trace, index, offset) {
  const step = index > 0 ? trace.steps[index - 1] : null;
  const rows = step ? step.rows : [0, Math.min(trace.block_q, trace.n)], row = Math.min(rows[0] + offset, rows[1] - 1), result = trace.row(row);
  const kind = step ? step.kind : "start";
  let seen = result.tiles, tile = null;
  if (kind === "start" || kind === "begin") seen = [];
  else if (kind === "skip") seen = seen.filter(t => t.tile < step.tile);
  else if (kind !== "store") { tile = seen.find(t => t.tile === step.tile); seen = seen.filter(t => t.tile < step.tile); }
  return { step, index, kind, rows, row, result, seen, tile, before: seen.length ? seen[seen.length - 1] : null };
}

// ---- the sentence ------------------------------------------------------------------------------------------------------------
function sentence(trace, moment, broken) {
  const { step, kind, tile, row, before, result } = moment, rows = span(moment.rows);
  const of = Math.ceil(trace.n / trace.block_k), first = !before || before.m_new === null;
  if (kind === "start") return `${trace.n} queries and ${trace.n} keys of ${trace.d} numbers each lie in GPU memory, cut into tiles of ${trace.block_q} rows by ${trace.block_k} keys. Nothing has been computed.`;
  if (kind === "begin") return `Rows ${rows} of Q are loaded, once. For each row three things are kept on the chip: the largest score so far m = −∞, the sum l = 0 and the output o = 0.`;
  if (kind === "skip") return `Keys ${span(step.keys)} are hidden from all of the rows ${rows}: flash attention skips the tile, it loads nothing and computes nothing. Standard attention still writes and reads its scores.`;
  if (kind === "load") return `Keys and values ${span(step.keys)} (tile ${step.tile + 1} of ${of}) are loaded into shared memory.${step.masked ? " Some of them are hidden from some of the rows." : ""}`;
  if (kind === "scores") return `Scores s = q·k / √d of this tile, straight into registers: for row ${row} ${list(tile.s)}.${step.masked && tile.s.includes(null) ? " Hidden keys get −∞, which becomes a weight of 0." : ""} They are never written to GPU memory.`;
  if (kind === "max") {
    if (broken === "max") return "Broken on purpose: no maximum is taken and nothing is subtracted, so e^s itself will be summed. That works until a score is large.";
    if (tile.m_new === null) return `Row ${row} sees no key of this tile: its maximum stays −∞.`;
    if (first) return `The largest score of row ${row} so far is m = ${num(tile.m_new)}. There is no earlier work to correct.`;
    if (tile.m_new === tile.m_old) return `No score of this tile is larger than m = ${num(tile.m_old)}: the reference stays, so α = e^0 = 1.`;
    return `A larger score: m rises from ${num(tile.m_old)} to ${num(tile.m_new)}. All weights so far were measured from the old m, and so are too large by e^(${num(tile.m_new)} − ${signed(tile.m_old)}); α = ${num(tile.should ?? tile.alpha)} puts that right.`;
  }
  if (kind === "rescale") {
    if (broken === "rescale") return first ? "Nothing has been summed yet, so leaving out the rescale does no harm here." : `Broken on purpose: l and o ought to be multiplied by α = ${num(tile.should)}, but are left as they are. Old keys now weigh ${tile.should === 1 ? "what they should, by luck" : `${num(1 / tile.should)} times too much`}.`;
    if (broken === "max") return "Nothing to rescale: without a maximum there is no reference that could change.";
    if (first) return "Nothing has been summed yet: multiplying zero by α changes nothing.";
    if (tile.alpha === 1) return "α = 1: what has been summed is already measured from the right maximum. Nothing changes.";
    return `l and o are multiplied by α = ${num(tile.alpha)}. Every earlier weight e^(s − m_old) becomes e^(s − m_new): the same sum in a new unit. No key is looked at again.`;
  }
  if (kind === "add") return `The weights ${broken === "max" ? "e^s" : "e^(s − m)"} of this tile are added: to l as they are, to o times the values. Now l = ${num(tile.l)}${broken ? "" : `; if these were all the keys, the output would be o / l = ${list(tile.o.map(x => x / tile.l))}`}.`;
  return `All keys are done. One division, o / l = ${list(result.out)}, and rows ${rows} of the output are written, once, with log-sum-exp ${num(result.lse)}. m, l and the scores are forgotten.`;
}

// ---- panel 1: the grid ---------------------------------------------------------------------------------------------------------
const EDGE = 34, widthOf = id => Math.max(240, $(id).clientWidth || 420);  // one unit of a drawing is one pixel, so that letters keep their size
function buildGrid(trace, jump) {
  const GRID = Math.min(widthOf("grid"), 390) - 2 * EDGE, unit = GRID / trace.n, rows = Math.ceil(trace.n / trace.block_q), columns = Math.ceil(trace.n / trace.block_k), cells = new Map(), strips = { q: [], k: [], o: [] };
  const root = svg(GRID + 2 * EDGE, GRID + EDGE + 16, ""), fine = rows > 40 || columns > 40;
  const end = (i, block) => Math.min((i + 1) * block, trace.n) * unit;
  root.append(text(EDGE + GRID / 2, 11, `Kᵀ: ${columns} tiles of keys`, { "text-anchor": "middle" }), text(10, EDGE + GRID / 2, "Q", { "text-anchor": "middle" }), text(EDGE + GRID + 25, EDGE + GRID / 2, "O", { "text-anchor": "middle" }));
  for (let j = 0; j < columns; j++) { const x = j * trace.block_k * unit; strips.k.push(el("svg:rect", { class: "strip", x: EDGE + x, y: 16, width: end(j, trace.block_k) - x, height: 13 })); }
  for (let i = 0; i < rows; i++) {
    const y = i * trace.block_q * unit, height = end(i, trace.block_q) - y;
    strips.q.push(el("svg:rect", { class: "strip", x: 17, y: EDGE + y, width: 13, height }));
    strips.o.push(el("svg:rect", { class: "strip", x: EDGE + GRID + 4, y: EDGE + y, width: 13, height }));
  }
  root.append(...strips.k, ...strips.q, ...strips.o);
  const marks = [];
  trace.steps.forEach((step, index) => {
    if (step.kind !== "skip" && step.kind !== "add") return;
    const x = step.tile * trace.block_k * unit, y = step.block * trace.block_q * unit, width = end(step.tile, trace.block_k) - x, height = end(step.block, trace.block_q) - y;
    const cell = el("svg:rect", { class: "cell", x: EDGE + x, y: EDGE + y, width, height });
    cell.addEventListener("click", () => jump(index + 1));
    cells.set(`${step.block},${step.tile}`, { cell, skipped: step.kind === "skip", end: index + 1 });
    root.append(cell);
    if (step.kind === "skip" && !fine) marks.push(el("svg:path", { class: "skipped", d: `M${EDGE + x} ${EDGE + y}l${width} ${height}m0 ${-height}l${-width} ${height}` }));
    if (step.kind === "add" && step.masked && trace.n <= 32) {
      for (let r = step.rows[0]; r < step.rows[1]; r++) for (let c = step.tile * trace.block_k; c < Math.min((step.tile + 1) * trace.block_k, trace.n); c++) {
        if (!trace.sees(r, c)) marks.push(el("svg:path", { class: "hidden-pair", d: `M${EDGE + (c + 0.35) * unit} ${EDGE + (r + 0.35) * unit}l${0.3 * unit} ${0.3 * unit}m0 ${-0.3 * unit}l${-0.3 * unit} ${0.3 * unit}` }));
      }
    } else if (step.kind === "add" && step.masked) {
      const last = Math.min((step.tile + 1) * trace.block_k, trace.n) - 1, corner = d => marks.push(el("svg:path", { class: "hidden-corner", d }));
      if (!trace.sees(step.rows[0], last)) corner(`M${EDGE + x + width / 2} ${EDGE + y}h${width / 2}v${height / 2}Z`);
      if (!trace.sees(step.rows[1] - 1, step.tile * trace.block_k)) corner(`M${EDGE + x} ${EDGE + y + height / 2}v${height / 2}h${width / 2}Z`);
    }
  });
  for (const mark of marks) mark.setAttribute("pointer-events", "none");
  const line = el("svg:rect", { class: "rowline", x: EDGE, width: GRID, height: Math.max(unit, 1.5), y: 0 });
  root.append(...marks, line, text(EDGE + GRID / 2, EDGE + GRID + 13, `${trace.n} × ${trace.n} scores, of which one tile at a time exists`, { "text-anchor": "middle" }));
  $("grid").replaceChildren(root);
  return { root, cells, strips, line, unit };
}
function drawGrid(drawn, trace, moment) {
  const { step, index } = moment;
  for (const [, entry] of drawn.cells) {
    const state = entry.skipped ? (entry.end <= index ? "cell skip" : "cell") : entry.end <= index ? "cell done" : "cell";
    if (entry.state !== state) entry.cell.setAttribute("class", entry.state = state);
  }
  if (step && step.tile !== null) { const entry = drawn.cells.get(`${step.block},${step.tile}`); entry.cell.setAttribute("class", entry.state = entry.skipped ? "cell skip now" : "cell now"); }
  drawn.strips.q.forEach((strip, i) => strip.setAttribute("class", step && i === step.block && step.kind !== "store" ? "strip on" : "strip"));
  drawn.strips.k.forEach((strip, j) => strip.setAttribute("class", step && j === step.tile && step.kind !== "skip" ? "strip on" : "strip"));
  drawn.strips.o.forEach((strip, i) => strip.setAttribute("class", step && (i < step.block || (i === step.block && step.kind === "store")) ? "strip out" : "strip"));
  drawn.line.setAttribute("y", EDGE + moment.row * drawn.unit);
  const skipped = [...drawn.cells.values()].filter(c => c.skipped).length;
  drawn.root.setAttribute("aria-label", `Grid of ${drawn.strips.q.length} by ${drawn.strips.k.length} tiles; ${skipped} are skipped by the mask. ${step ? `Now at block of rows ${step.block + 1}${step.tile === null ? "" : `, tile of keys ${step.tile + 1}`}.` : "Not begun."}`);
}

// ---- panel 2: one row --------------------------------------------------------------------------------------------------------
function drawBars(trace, moment, broken) {
  const { kind, seen, tile, result } = moment, width = widthOf("bars"), height = 172, base = 138, top = 18;
  const few = trace.n <= 16 && width / trace.n >= 30, slot = width / trace.n, bar = Math.max(slot * (few ? 0.62 : 1), 0.3), finished = kind === "store", last = finished ? seen.at(-1) : null;
  const before = moment.before, after = kind === "rescale" || kind === "add";
  // Each old weight is e^(s - m): of the m that is valid at this moment. Without the rescale it is what it was when it was added.
  const m = finished ? last.m_new : after ? tile.m_new : before ? before.m_new : null;
  const honest = (s, reference) => (s === null || reference === null ? 0 : Math.exp(s - reference));
  const weights = new Map(), ghosts = new Map();
  for (const old of seen) old.s.forEach((s, j) => {
    const key = old.keys[0] + j;
    if (!broken) { weights.set(key, honest(s, m)); if (kind === "rescale" && tile.alpha !== 1 && trace.n <= 128) ghosts.set(key, honest(s, before.m_new)); }
    else { weights.set(key, old.p[j]); if (broken === "rescale" && trace.n <= 128 && (after || finished)) ghosts.set(key, honest(s, m)); }
  });
  if (kind === "add") tile.p.forEach((p, j) => weights.set(tile.keys[0] + j, p));
  const most = Math.max(1e-300, ...[...weights.values(), ...ghosts.values()].filter(Number.isFinite)), unit = broken === "max" ? most : Math.max(1, most);
  const share = p => (Number.isFinite(p) ? Math.min(1, p / unit) : 1), tall = p => share(p) * (base - top), at = key => key * slot + (slot - bar) / 2;
  const root = svg(width, height, `Weights of the keys for row ${moment.row}: ${[...weights].slice(0, 8).map(([k, p]) => `key ${k}: ${num(p)}`).join(", ") || "none yet"}`);
  const caption = el("p", { class: "caption" }, broken === "max" ? "Bars: the weights e^s that were summed." : `Bars: the weights e^(s − m)${ghosts.size ? (broken ? "; outlined: as they should be" : "; outlined: before the rescale") : " of the keys so far"}. Dotted line: 1.`, few ? " Below each key: its score s." : "");
  root.append(el("svg:line", { class: "top", x1: 0, x2: width, y1: top, y2: top }));
  for (let key = trace.block_k; key < trace.n; key += trace.block_k) if (trace.n / trace.block_k <= 64) root.append(el("svg:line", { class: "boundary", x1: key * slot, x2: key * slot, y1: top, y2: base + 30 }));
  const box = (key, p) => `M${at(key)} ${base}v${-tall(p)}h${bar}v${tall(p)}Z`, fresh = key => kind === "add" && key >= tile.keys[0];
  if (!few) for (const style of ["bar", "bar new"]) root.append(el("svg:path", { class: style, d: [...weights].filter(([key]) => fresh(key) === (style !== "bar")).map(([key, p]) => box(key, p)).join("") }));
  if (few) for (const [key, p] of weights) {
    const isNew = fresh(key);
    root.append(el("svg:rect", { class: `bar${isNew ? " new" : ""}${!Number.isFinite(p) ? " wrong" : ""}`, x: at(key), width: bar, y: base - tall(p), height: tall(p) }));
    root.append(text(key * slot + slot / 2, base - tall(p) - 3, num(p, slot > 48 ? 3 : 2), { "text-anchor": "middle", class: "strong" }));
  }
  for (const [key, p] of ghosts) root.append(el("svg:rect", { class: "ghost", x: at(key), width: bar, y: base - tall(p), height: Math.max(tall(p), 0.5) }));
  if (kind === "rescale" && seen.length && !broken && tile.alpha !== 1 && tile.m_old !== null) {
    const [from, to] = [seen[0].keys[0] * slot, (seen.at(-1).keys[1]) * slot];
    root.append(text((from + to) / 2, top + 24, `× α = ${num(tile.alpha, 3)}`, { "text-anchor": "middle", class: "strong" }), el("svg:path", { class: "drop", d: `M${(from + to) / 2} ${top + 30}v22m-5 -6l5 6l5 -6` }));
  }
  root.append(el("svg:line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }));
  if (few) {
    const known = new Map();
    for (const t of [...seen, ...(tile && kind !== "load" ? [tile] : [])]) t.s.forEach((s, j) => known.set(t.keys[0] + j, s));
    for (let key = 0; key < trace.n; key++) root.append(text(key * slot + slot / 2, base + 13, `key ${key}`.slice(trace.n > 8 ? 4 : 0), { "text-anchor": "middle" }), text(key * slot + slot / 2, base + 27, known.has(key) ? `${slot > 80 ? "s = " : ""}${num(known.get(key), slot > 60 ? 4 : slot > 48 ? 3 : 2)}` : "", { "text-anchor": "middle", class: "strong" }));
  } else root.append(text(0, base + 14, "key 0"), text(width, base + 14, `key ${trace.n - 1}`, { "text-anchor": "end" }));
  $("bars").replaceChildren(caption, root);
}
function drawNumbers(trace, moment, broken, right) {
  const { kind, tile, before, result, row } = moment, order = ["start", "begin", "skip", "load", "scores", "max", "rescale", "add", "store"], from = order.indexOf(kind);
  const reached = name => tile && from >= order.indexOf(name), lines = [];
  const lOld = before ? before.l : 0, oOld = before ? before.o : moment.result.out.map(() => 0), zero = moment.result.out.map(() => 0);
  const last = kind === "store" ? moment.seen.at(-1) : null, now = last || before;
  const put = (name, value, hot, bad) => lines.push(el("div", { class: `name${hot ? " hot" : ""}` }, name), el("div", { class: `value${hot ? " hot" : ""}${bad ? " bad" : ""}` }, value));
  const odd = x => (Array.isArray(x) ? x.some(odd) : x !== null && !Number.isFinite(x));
  put("row", `${row} of ${trace.n}`);
  put("s", reached("scores") ? list(tile.s) : "–", kind === "scores");
  put("m", reached("max") ? (broken === "max" ? "not taken" : `${num(tile.m_old)} → ${num(tile.m_new)}`) : broken === "max" ? "not taken" : now ? num(now.m_new) : "−∞", kind === "max");
  put("α", !reached("max") ? "–" : broken === "max" ? "not needed" : tile.m_old === null ? `e^(−∞) = ${num(tile.alpha)}` : `e^(${num(tile.m_old)} − ${signed(tile.m_new)}) = ${num(tile.should ?? tile.alpha)}${broken === "rescale" ? ", left out" : ""}`, kind === "max", broken === "rescale" && reached("max") && tile.m_old !== null && tile.should !== 1);
  put("p", reached("add") ? list(tile.p) : "–", kind === "add", reached("add") && odd(tile.p));
  const alpha = tile ? tile.alpha : 1, sum = tile ? tile.p.reduce((a, b) => a + b, 0) : 0;
  put("l", reached("add") ? `${num(alpha * lOld)} + ${num(sum)} = ${num(tile.l)}` : reached("rescale") ? `${num(alpha)} × ${num(lOld)} = ${num(alpha * lOld)}` : num(now ? now.l : 0), kind === "rescale" || kind === "add", reached("add") && odd(tile.l));
  put("o", reached("add") ? list(tile.o) : reached("rescale") ? `${num(alpha)} × ${list(oOld)} = ${list(oOld.map(x => alpha * x))}` : list(now ? now.o : zero), kind === "rescale" || kind === "add", reached("add") && odd(tile.o));
  if (kind === "store") {
    const wrong = right && right.out.some((x, c) => !(Math.abs(x - result.out[c]) <= 1e-5 * Math.max(1, Math.abs(x))));
    put("o / l", list(result.out), true, wrong);
    if (right) put("right", list(right.out));
  } else {
    const at = reached("add") ? tile : now;
    put("o / l", at && at.l !== 0 ? list(at.o.map(x => x / at.l)) : "–");
  }
  $("numbers").replaceChildren(...lines);
}

// ---- panel 3: the memories -----------------------------------------------------------------------------------------------------
const FLOWS = {
  begin: ["Q tile", "down", null], load: ["K and V tile", "down", null], scores: [null, null, "Q and K, down to the matrix units ↓"], max: [null, null, "m and α: in registers, nothing moves"],
  rescale: [null, null, "l and o times α: in registers, nothing moves"], add: [null, null, "V, down to the matrix units ↓"], store: ["O and LSE", "up", "o / l ↑"], skip: ["nothing: the tile is skipped", null, null],
};
function meter(name, parts, of, caption, ceiling) {
  const track = el("div", { class: "track" }, ...parts.map(([style, value]) => el("i", { class: style, style: `width:${Math.min(100, (100 * value) / of)}%${value > 0 ? ";min-width:3px" : ""}` })), ceiling ? el("i", { class: "ceiling", style: `left:0;width:${Math.min(100, (100 * ceiling) / of)}%` }) : null);
  return el("div", { class: "meter" }, el("span", {}, name), track, el("div", { class: "text" }, caption));
}
function drawLanes(trace, moment, sums, gpu) {
  const now = { flash: sums.flash[moment.index], standard: sums.standard[moment.index] }, end = { flash: sums.flash.at(-1), standard: sums.standard.at(-1) };
  const total = x => x.hbm_read + x.hbm_written, most = Math.max(total(end.flash), total(end.standard));
  const hbm = ["standard", "flash"].map(who => meter(who, [[`${who}-read`, now[who].hbm_read], [`${who}-written`, now[who].hbm_written]], most, `${bytes(now[who].hbm_read)} read + ${bytes(now[who].hbm_written)} written; in the end ${bytes(total(end[who]))}`, total(end[who])));
  const h = held(trace), shared = h.q + h.k + h.v, registers = h.s + h.o + h.stats, kind = moment.kind, flow = FLOWS[kind] || [null, null, null];
  const busy = moment.step && moment.step.kind !== "store", loaded = moment.tile && busy;
  const room = (used, capacity) => used > capacity * 1024 ? el("span", { class: "overflow" }, `does not fit: ${bytes(used)} of ${capacity} KiB`) : el("span", {}, `${bytes(used)} of ${capacity} KiB per SM`);
  const key = (style, name) => [el("span", { class: `key held-${style}` }), name];
  const active = kind === "scores" || kind === "max" || kind === "rescale" || kind === "add";
  const ratio = total(end.flash) / total(end.standard);
  const stepBytes = moment.step ? moment.step.flash : moved();
  $("lanes").replaceChildren(
    el("div", { class: "lane" }, el("h3", {}, `GPU memory (${gpu.memory})`, el("span", {}, `${gpu.bandwidth} GB/s · L2 ${gpu.l2} MiB`)), ...hbm,
      el("div", { class: "meter" }, el("span"), el("div", { class: "text" }, `In the end flash moves ${ratio < 1 ? `${+(1 / ratio).toPrecision(3)} times less than` : ratio === 1 ? "as much as" : `${+ratio.toPrecision(3)} times more than`} standard.`)),
      el("div", { class: "meter" }, el("span"), el("div", { class: "text" }, `Besides Q, K, V and O: standard keeps S, ${bytes(trace.n * trace.n * ITEMSIZE[trace.dtype])}; flash one number per row, ${bytes(trace.n * (trace.dtype === "float64" ? 8 : 4))}.`))),
    el("div", { class: `flow${flow[0] && flow[1] ? " on" : ""}` }, flow[0] ? `${flow[1] === "down" ? "↓ " : flow[1] === "up" ? "↑ " : ""}${flow[0]}${flow[1] ? `, ${bytes(stepBytes.hbm_read + stepBytes.hbm_written)}` : ""}` : "no traffic with GPU memory in this step"),
    el("div", { class: "lane" }, el("h3", {}, "Shared memory", room(shared, gpu.shared)),
      meter("holds", [["held-q", busy ? h.q : 0], ["held-k", loaded ? h.k : 0], ["held-v", loaded ? h.v : 0]], gpu.shared * 1024, ""),
      meter("moved", [["flash-read", now.flash.shared_read], ["flash-written", now.flash.shared_written]], end.flash.shared_read + end.flash.shared_written, `${bytes(now.flash.shared_read)} read + ${bytes(now.flash.shared_written)} written`),
      el("div", { class: "text" }, ...key("q", "Q"), ...key("k", "K"), ...key("v", "V"))),
    el("div", { class: `flow${flow[2] ? " on" : ""}` }, flow[2] || " "),
    el("div", { class: "lane" }, el("h3", {}, "Registers", room(registers, gpu.registers)),
      meter("holds", [["held-s", active ? h.s : 0], ["held-o", busy ? h.o : 0], ["held-m", busy ? h.stats : 0]], gpu.registers * 1024, ""),
      el("div", { class: "text" }, ...key("s", "S, then P"), ...key("o", "o"), ...key("m", "m, l"))),
  );
}

/** The figures that the panels reckon with. The ridge is where a kernel stops waiting for memory. */
function gpuTable(gpus) {
  const columns = { GPU: g => g.name, SMs: g => g.sms, "shared memory per SM, KiB": g => g.shared, "registers per SM, KiB": g => g.registers, "L2, MiB": g => g.l2, "memory, GB/s": g => g.bandwidth, "float16, TFLOP/s": g => g.tflops.float16, "float32, TFLOP/s": g => g.tflops.float32, "ridge in float16, operations per byte": g => Math.round((1000 * g.tflops.float16) / g.bandwidth) };
  const head = el("thead", {}, el("tr", {}, ...Object.keys(columns).map(name => el("th", { scope: "col" }, name))));
  return [head, el("tbody", {}, ...gpus.map(g => el("tr", {}, ...Object.values(columns).map((value, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, String(value(g)))))))];
}

// ---- panel 4: the roofline -----------------------------------------------------------------------------------------------------
function drawRoof(trace, moment, sums, gpu) {
  const width = widthOf("roof"), height = Math.min(Math.max(0.55 * width, 230), 330), left = 44, right = 8, top = 10, bottom = 32, lows = [-1, -2], spans = [5, 6];
  const peak = gpu.tflops[trace.dtype] || gpu.tflops.float32, bandwidth = gpu.bandwidth / 1000;
  const x = v => left + ((Math.log10(v) - lows[0]) / spans[0]) * (width - left - right), y = v => height - bottom - ((Math.log10(v) - lows[1]) / spans[1]) * (height - top - bottom);
  const total = who => { const s = sums[who].at(-1); return s.hbm_read + s.hbm_written; };
  const soFar = who => { const s = sums[who][moment.index]; return s.hbm_read + s.hbm_written; };
  const model = { flash: modelled(total("flash"), sums.flops.flash.at(-1), gpu, trace.dtype), standard: modelled(total("standard"), sums.flops.standard.at(-1), gpu, trace.dtype) };
  const until = { flash: modelled(soFar("flash"), sums.flops.flash[moment.index], gpu, trace.dtype), standard: modelled(soFar("standard"), sums.flops.standard[moment.index], gpu, trace.dtype) };
  const speedup = model.standard.seconds / model.flash.seconds;
  const faster = speedup >= 1 ? `${+speedup.toPrecision(3)} times faster` : `${+(1 / speedup).toPrecision(3)} times slower`;
  const root = svg(width, height, `Roofline of ${gpu.name}: ridge at ${+(peak / bandwidth).toPrecision(3)} operations per byte. Flash is ${faster} than standard in this model.`);
  const add = (...nodes) => root.append(...nodes.filter(Boolean));
  for (let e = 0; e <= spans[0]; e++) add(el("svg:line", { class: "gridline", x1: x(10 ** (e + lows[0])), x2: x(10 ** (e + lows[0])), y1: top, y2: height - bottom }), width < 400 && e % 2 === 0 ? null : text(x(10 ** (e + lows[0])), height - bottom + 13, String(10 ** (e + lows[0])), { "text-anchor": e === spans[0] ? "end" : "middle" }));
  for (let e = 0; e <= spans[1]; e++) add(el("svg:line", { class: "gridline", x1: left, x2: width - right, y1: y(10 ** (e + lows[1])), y2: y(10 ** (e + lows[1])) }), e % 2 ? null : text(left - 4, y(10 ** (e + lows[1])) + 4, String(10 ** (e + lows[1])), { "text-anchor": "end" }));
  const ridge = peak / bandwidth, roof = `M${x(0.1)} ${y(0.1 * bandwidth)}L${x(ridge)} ${y(peak)}L${width - right} ${y(peak)}`;
  root.append(el("svg:path", { class: "roofline", d: roof }), text(width - right, y(peak) - 5, `${peak} TFLOP/s`, { "text-anchor": "end", class: "strong" }), text(width / 2, height - 4, "operations per byte of GPU memory", { "text-anchor": "middle" }), text(left + 4, top + 8, "TFLOP/s"));
  for (const who of ["standard", "flash"]) {
    const at = { intensity: sums.flops[who].at(-1) / total(who) }, px = x(Math.min(Math.max(at.intensity, 0.1), 1e4)), py = y(Math.min(peak, at.intensity * bandwidth));
    root.append(el("svg:line", { class: "guide", x1: px, x2: px, y1: py, y2: height - bottom }), who === "flash" ? el("svg:circle", { class: "point-flash", cx: px, cy: py, r: 5 }) : el("svg:rect", { class: "point-standard", x: px - 7, y: py - 7, width: 14, height: 14 }));
    root.append(text(px + (who === "flash" ? 10 : -10), py + (who === "flash" ? 16 : -4), who, { class: `label-${who}`, "text-anchor": who === "flash" ? "start" : "end" }));
  }
  $("roof").replaceChildren(root);
  const most = Math.max(model.flash.seconds, model.standard.seconds);
  const one = who => meter(who, [[`${who}-read`, until[who].seconds]], most, `${duration(until[who].seconds)} of ${duration(model[who].seconds)}, ${model[who].bound === "memory" ? "waiting for memory" : "limited by arithmetic"}`, model[who].seconds);
  const missing = gpu.tflops[trace.dtype] ? "" : ` ${gpu.name} has no matrix units for ${trace.dtype}; its float32 units are shown.`;
  $("times").replaceChildren(one("standard"), one("flash"), el("p", {}, `In this model flash attention is ${faster} on ${gpu.name}.${missing}`));
}
