"use strict";
// The last chapter: what a moment of a run looks like. Each function fills one panel.
const svg = (width, height, label, ...children) =>
  el("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);
const svgText = (x, y, content, more = {}) => el("svg:text", { x, y, ...more }, content);
const widthOf = id => Math.max(240, $(id).clientWidth || 420); // one unit of a drawing is one pixel, so that letters keep their size

// ---- a moment: the state of one row after the first `index` steps ---------------------------------------------------------
/** index 0: before the first step; i: just after step i - 1. */
function momentOf(trace, index, offset) {
  const step = index > 0 ? trace.steps[index - 1] : null;
  const rows = step ? step.rows : [0, Math.min(trace.block_q, trace.n)],
    row = Math.min(rows[0] + offset, rows[1] - 1),
    result = trace.row(row);
  const kind = step ? step.kind : "start";
  let seen = result.tiles,
    tile = null;
  if (kind === "start" || kind === "begin") seen = [];
  else if (kind === "skip") seen = seen.filter(t => t.tile < step.tile);
  else if (kind !== "store") {
    tile = seen.find(t => t.tile === step.tile);
    seen = seen.filter(t => t.tile < step.tile);
  }
  return { step, index, kind, rows, row, result, seen, tile, before: seen.length ? seen[seen.length - 1] : null };
}

// ---- the sentence ------------------------------------------------------------------------------------------------------------
function sentence(trace, moment, broken) {
  const { step, kind, tile, row, before, result } = moment,
    rows = span(moment.rows);
  const of = Math.ceil(trace.n / trace.block_k),
    first = !before || before.m_new === null;
  if (kind === "start")
    return `${trace.n} queries and ${trace.n} keys of ${trace.d} numbers each lie in GPU memory, cut into tiles of ${trace.block_q} rows by ${trace.block_k} keys. Nothing has been computed.`;
  if (kind === "begin")
    return `Rows ${rows} of Q are loaded, once. For each row three things are kept on the chip: the largest score so far m = −∞, the sum l = 0 and the output o = 0.`;
  if (kind === "skip")
    return `Keys ${span(step.keys)} are hidden from all of the rows ${rows}. FlashAttention skips the tile: it loads nothing and computes nothing. Standard attention still writes and reads its scores.`;
  if (kind === "load")
    return `Keys and values ${span(step.keys)} (tile ${step.tile + 1} of ${of}) are loaded into shared memory.${step.masked ? " Some of them are hidden from some of the rows." : ""}`;
  if (kind === "scores")
    return `Scores s = q·k / √d of this tile, straight into registers. Row ${row} gets ${list(tile.s)}.${step.masked && tile.s.includes(null) ? " Hidden keys get −∞, which becomes a weight of 0." : ""} Scores are never written to GPU memory.`;
  if (kind === "max") {
    if (broken === "max")
      return "Broken on purpose: no maximum is taken and nothing is subtracted, so e^s itself will be summed. That works until a score is large.";
    if (tile.m_new === null) return `Row ${row} sees no key of this tile: its maximum stays −∞.`;
    if (first)
      return `The largest score of row ${row} so far is m = ${num(tile.m_new)}. There is no earlier work to convert.`;
    if (tile.m_new === tile.m_old)
      return `No score of this tile is larger than m = ${num(tile.m_old)}. The unit stays the same, so α = e^0 = 1.`;
    return `A larger score: m rises from ${num(tile.m_old)} to ${num(tile.m_new)}. All weights so far were measured from the old m. They are too large by e^(${num(tile.m_new)} − ${signed(tile.m_old)}), so α = ${num(tile.should ?? tile.alpha)}.`;
  }
  if (kind === "rescale") {
    if (broken === "rescale")
      return first
        ? "Nothing has been summed yet, so leaving out the rescale does no harm here."
        : `Broken on purpose: l and o ought to be multiplied by α = ${num(tile.should)}, but are left as they are. Old keys now weigh ${tile.should === 1 ? "what they should, by luck" : `${num(1 / tile.should)} times too much`}.`;
    if (broken === "max") return "Nothing to rescale: without a maximum there is no unit that could change.";
    if (first) return "Nothing has been summed yet: multiplying zero by α changes nothing.";
    if (tile.alpha === 1)
      return "α = 1: what has been summed is already measured from the right maximum. Nothing changes.";
    return `l and o are multiplied by α = ${num(tile.alpha)}. Every earlier weight e^(s − old m) becomes e^(s − new m): the same sum in a new unit. No key is looked at again.`;
  }
  if (kind === "add")
    return `The weights ${broken === "max" ? "e^s" : "e^(s − m)"} of this tile are added: to l as they are, to o times the values. Now l = ${num(tile.l)}${broken ? "" : `. If these were all the keys, the output would be o / l = ${list(tile.o.map(x => x / tile.l))}`}.`;
  return `All keys are done. One division, o / l = ${list(result.out)}, and rows ${rows} of the output are written, once, with log-sum-exp ${num(result.lse)}. m, l and the scores are forgotten.`;
}

// ---- the tiles ---------------------------------------------------------------------------------------------------------------
const EDGE = 34;
function buildGrid(trace, jump) {
  const side = Math.min(widthOf("grid"), 400) - 2 * EDGE,
    unit = side / trace.n,
    rows = Math.ceil(trace.n / trace.block_q),
    columns = Math.ceil(trace.n / trace.block_k);
  const cells = new Map(),
    strips = { q: [], k: [], o: [] },
    root = svg(side + 2 * EDGE, side + EDGE + 16, ""),
    fine = rows > 40 || columns > 40,
    marks = [];
  const end = (i, block) => Math.min((i + 1) * block, trace.n) * unit;
  root.append(
    svgText(EDGE + side / 2, 11, `Kᵀ: ${columns} tiles of keys`, { "text-anchor": "middle" }),
    svgText(10, EDGE + side / 2, "Q", { "text-anchor": "middle" }),
    svgText(EDGE + side + 25, EDGE + side / 2, "O", { "text-anchor": "middle" }),
  );
  for (let j = 0; j < columns; j++) {
    const x = j * trace.block_k * unit;
    strips.k.push(
      el("svg:rect", { class: "strip k", x: EDGE + x, y: 16, width: end(j, trace.block_k) - x, height: 13 }),
    );
  }
  for (let i = 0; i < rows; i++) {
    const y = i * trace.block_q * unit,
      height = end(i, trace.block_q) - y;
    strips.q.push(el("svg:rect", { class: "strip q", x: 17, y: EDGE + y, width: 13, height }));
    strips.o.push(el("svg:rect", { class: "strip o", x: EDGE + side + 4, y: EDGE + y, width: 13, height }));
  }
  root.append(...strips.k, ...strips.q, ...strips.o);
  trace.steps.forEach((step, index) => {
    if (step.kind !== "skip" && step.kind !== "add") return;
    const x = step.tile * trace.block_k * unit,
      y = step.block * trace.block_q * unit,
      width = end(step.tile, trace.block_k) - x,
      height = end(step.block, trace.block_q) - y;
    const cell = el("svg:rect", { class: "cell", x: EDGE + x, y: EDGE + y, width, height });
    cell.addEventListener("click", () => jump(index + 1));
    cells.set(`${step.block},${step.tile}`, { cell, skipped: step.kind === "skip", end: index + 1 });
    root.append(cell);
    if (step.kind === "skip" && !fine)
      marks.push(
        el("svg:path", {
          class: "skipped",
          d: `M${EDGE + x} ${EDGE + y}l${width} ${height}m0 ${-height}l${-width} ${height}`,
        }),
      );
    if (step.kind !== "add" || !step.masked) return;
    const last = Math.min((step.tile + 1) * trace.block_k, trace.n) - 1,
      corner = d => marks.push(el("svg:path", { class: "hidden-corner", d }));
    if (trace.n > 32) {
      if (!trace.sees(step.rows[0], last)) corner(`M${EDGE + x + width / 2} ${EDGE + y}h${width / 2}v${height / 2}Z`);
      if (!trace.sees(step.rows[1] - 1, step.tile * trace.block_k))
        corner(`M${EDGE + x} ${EDGE + y + height / 2}v${height / 2}h${width / 2}Z`);
    } else
      for (let r = step.rows[0]; r < step.rows[1]; r++)
        for (let c = step.tile * trace.block_k; c <= last; c++)
          if (!trace.sees(r, c))
            marks.push(
              el("svg:path", {
                class: "hidden-pair",
                d: `M${EDGE + (c + 0.35) * unit} ${EDGE + (r + 0.35) * unit}l${0.3 * unit} ${0.3 * unit}m0 ${-0.3 * unit}l${-0.3 * unit} ${0.3 * unit}`,
              }),
            );
  });
  for (const mark of marks) mark.setAttribute("pointer-events", "none");
  const line = el("svg:rect", { class: "rowline", x: EDGE, width: side, height: Math.max(unit, 1.5), y: 0 }),
    numbers = el("svg:g");
  root.append(
    ...marks,
    numbers,
    line,
    svgText(EDGE + side / 2, EDGE + side + 13, `${trace.n} × ${trace.n} scores; only the tile in colour exists`, {
      "text-anchor": "middle",
    }),
  );
  root.classList.toggle("fine", fine || columns > 16);
  $("grid").replaceChildren(root);
  return { root, cells, strips, line, unit, numbers };
}
function drawGrid(drawn, trace, moment) {
  const { step, index } = moment,
    exists = step && ["scores", "max", "rescale", "add"].includes(step.kind),
    weights = step && step.kind === "add";
  for (const [, entry] of drawn.cells) {
    const state = entry.end > index ? "cell" : entry.skipped ? "cell skip" : "cell done";
    if (entry.state !== state) entry.cell.setAttribute("class", (entry.state = state));
  }
  if (step && step.tile !== null) {
    const entry = drawn.cells.get(`${step.block},${step.tile}`);
    entry.cell.setAttribute(
      "class",
      (entry.state = entry.skipped ? "cell skip now" : exists ? `cell now${weights ? " weights" : ""}` : "cell"),
    );
  }
  drawn.numbers.replaceChildren();
  if (exists && drawn.unit >= 26)
    for (let r = step.rows[0]; r < step.rows[1]; r++) {
      const met = trace.row(r).tiles.find(t => t.tile === step.tile),
        values = weights ? met.p : met.s;
      values.forEach((x, j) =>
        drawn.numbers.append(
          svgText(EDGE + (met.keys[0] + j + 0.5) * drawn.unit, EDGE + (r + 0.5) * drawn.unit + 4, short(x), {
            "text-anchor": "middle",
            class: `in-cell${weights ? " weights" : ""}`,
          }),
        ),
      );
    }
  const at = (strip, name, state) => strip.setAttribute("class", `strip ${name}${state ? ` ${state}` : ""}`);
  drawn.strips.q.forEach((strip, i) => at(strip, "q", step && i === step.block && step.kind !== "store" ? "on" : ""));
  drawn.strips.k.forEach((strip, j) => at(strip, "k", step && j === step.tile && step.kind !== "skip" ? "on" : ""));
  drawn.strips.o.forEach((strip, i) =>
    at(strip, "o", !step || i > step.block ? "" : i < step.block || step.kind === "store" ? "out" : "on"),
  );
  drawn.line.setAttribute("y", EDGE + moment.row * drawn.unit);
  const skipped = [...drawn.cells.values()].filter(c => c.skipped).length;
  drawn.root.setAttribute(
    "aria-label",
    `Grid of ${drawn.strips.q.length} by ${drawn.strips.k.length} tiles; ${skipped} are skipped by the mask. ${step ? `Now at block of rows ${step.block + 1}${step.tile === null ? "" : `, tile of keys ${step.tile + 1}`}.` : "Not begun."}`,
  );
}

// ---- one row -----------------------------------------------------------------------------------------------------------------
function drawBars(trace, moment, broken) {
  const { kind, seen, tile, before } = moment,
    width = widthOf("bars"),
    height = 172,
    base = 138,
    top = 18;
  const few = trace.n <= 16 && width / trace.n >= 30,
    slot = width / trace.n,
    bar = Math.max(slot * (few ? 0.62 : 1), 0.3),
    finished = kind === "store",
    last = finished ? seen.at(-1) : null;
  const after = kind === "rescale" || kind === "add";
  // Each old weight is e^(s - m), of the m that is valid at this moment. Without the rescale it is what it was when it was added.
  const m = finished ? last.m_new : after ? tile.m_new : before ? before.m_new : null;
  const honest = (s, reference) => (s === null || reference === null ? 0 : Math.exp(s - reference));
  const weights = new Map(),
    ghosts = new Map();
  for (const old of seen)
    old.s.forEach((s, j) => {
      const key = old.keys[0] + j;
      if (!broken) {
        weights.set(key, honest(s, m));
        if (kind === "rescale" && tile.alpha !== 1 && trace.n <= 128) ghosts.set(key, honest(s, before.m_new));
      } else {
        weights.set(key, old.p[j]);
        if (broken === "rescale" && trace.n <= 128 && (after || finished)) ghosts.set(key, honest(s, m));
      }
    });
  if (kind === "add") tile.p.forEach((p, j) => weights.set(tile.keys[0] + j, p));
  const most = Math.max(1e-300, ...[...weights.values(), ...ghosts.values()].filter(Number.isFinite)),
    unit = broken === "max" ? most : Math.max(1, most);
  const tall = p => (Number.isFinite(p) ? Math.min(1, p / unit) : 1) * (base - top),
    at = key => key * slot + (slot - bar) / 2;
  const root = svg(
    width,
    height,
    `Weights of the keys for row ${moment.row}: ${
      [...weights]
        .slice(0, 8)
        .map(([k, p]) => `key ${k}: ${num(p)}`)
        .join(", ") || "none yet"
    }`,
  );
  const outlined = ghosts.size ? (broken ? "; dotted: as they should be" : "; dotted: before the rescale") : "";
  const caption = el(
    "p",
    { class: "caption" },
    ...rich(
      broken === "max"
        ? "Bars: the weights e^s that were summed."
        : `Bars: the weights e^(s − m)${outlined}. Dashed bars are summed up already, and forgotten.`,
    ),
  );
  root.append(
    el("svg:line", { class: "top", x1: 0, x2: width, y1: base - tall(1), y2: base - tall(1) }),
    svgText(0, base - tall(1) - 4, "1"),
  );
  for (let key = trace.block_k; key < trace.n; key += trace.block_k)
    if (trace.n / trace.block_k <= 64)
      root.append(el("svg:line", { class: "boundary", x1: key * slot, x2: key * slot, y1: top, y2: base + 30 }));
  const outline = (key, p) => `M${at(key)} ${base}v${-tall(p)}h${bar}v${tall(p)}Z`,
    fresh = key => kind === "add" && key >= tile.keys[0];
  if (!few)
    for (const style of ["bar", "bar new"])
      root.append(
        el("svg:path", {
          class: style,
          d: [...weights]
            .filter(([key]) => fresh(key) === (style !== "bar"))
            .map(([key, p]) => outline(key, p))
            .join(""),
        }),
      );
  else
    for (const [key, p] of weights) {
      root.append(
        el("svg:rect", {
          class: `bar${fresh(key) ? " new" : ""}${!Number.isFinite(p) ? " wrong" : ""}`,
          x: at(key),
          width: bar,
          y: base - tall(p),
          height: tall(p),
        }),
      );
      root.append(
        svgText(key * slot + slot / 2, base - tall(p) - 4, num(p, slot > 48 ? 3 : 2), {
          "text-anchor": "middle",
          class: "strong",
        }),
      );
    }
  for (const [key, p] of ghosts)
    root.append(
      el("svg:rect", { class: "ghost", x: at(key), width: bar, y: base - tall(p), height: Math.max(tall(p), 0.5) }),
    );
  if (kind === "rescale" && seen.length && !broken && tile.alpha !== 1 && tile.m_old !== null) {
    const middle = ((seen[0].keys[0] + seen.at(-1).keys[1]) / 2) * slot;
    root.append(
      svgText(middle, top + 24, `× α = ${num(tile.alpha, 3)}`, { "text-anchor": "middle", class: "strong over-lines" }),
      el("svg:path", { class: "drop", d: `M${middle} ${top + 30}v22m-5 -6l5 6l5 -6` }),
    );
  }
  root.append(el("svg:line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }));
  if (few) {
    const known = new Map();
    for (const t of [...seen, ...(tile && kind !== "load" ? [tile] : [])])
      t.s.forEach((s, j) => known.set(t.keys[0] + j, s));
    for (let key = 0; key < trace.n; key++)
      root.append(
        svgText(key * slot + slot / 2, base + 13, `key ${key}`.slice(trace.n > 8 ? 4 : 0), { "text-anchor": "middle" }),
        svgText(
          key * slot + slot / 2,
          base + 27,
          known.has(key) ? `${slot > 80 ? "s = " : ""}${num(known.get(key), slot > 60 ? 4 : slot > 48 ? 3 : 2)}` : "",
          { "text-anchor": "middle", class: "strong" },
        ),
      );
  } else
    root.append(
      svgText(0, base + 14, "key 0"),
      svgText(width, base + 14, `key ${trace.n - 1}`, { "text-anchor": "end" }),
    );
  $("bars").replaceChildren(caption, root);
}
function drawNumbers(trace, moment, broken, right) {
  const { kind, tile, before, result, row } = moment,
    order = ["start", "begin", "skip", "load", "scores", "max", "rescale", "add", "store"],
    from = order.indexOf(kind);
  const reached = name => tile && from >= order.indexOf(name),
    lines = [];
  const zero = result.out.map(() => 0),
    lOld = before ? before.l : 0,
    oOld = before ? before.o : zero;
  const last = kind === "store" ? moment.seen.at(-1) : null,
    now = last || before;
  const put = (name, value, hot, bad) =>
    lines.push(
      el("div", { class: `name${hot ? " hot" : ""}` }, name),
      el("div", { class: `value${hot ? " hot" : ""}${bad ? " bad" : ""}` }, ...rich(value)),
    );
  const odd = x => (Array.isArray(x) ? x.some(odd) : x !== null && !Number.isFinite(x));
  put("row", `${row} of ${trace.n}`);
  put("s", reached("scores") ? list(tile.s) : "–", kind === "scores");
  put(
    "m",
    reached("max")
      ? broken === "max"
        ? "not taken"
        : `${num(tile.m_old)} → ${num(tile.m_new)}`
      : broken === "max"
        ? "not taken"
        : now
          ? num(now.m_new)
          : "−∞",
    kind === "max",
  );
  const alphaText = !reached("max")
    ? "–"
    : broken === "max"
      ? "not needed"
      : tile.m_old === null
        ? `e^(−∞) = ${num(tile.alpha)}`
        : `e^(${num(tile.m_old)} − ${signed(tile.m_new)}) = ${num(tile.should ?? tile.alpha)}${broken === "rescale" ? ", left out" : ""}`;
  put(
    "α",
    alphaText,
    kind === "max",
    broken === "rescale" && reached("max") && tile.m_old !== null && tile.should !== 1,
  );
  put("p", reached("add") ? list(tile.p) : "–", kind === "add", reached("add") && odd(tile.p));
  const alpha = tile ? tile.alpha : 1,
    sum = tile ? tile.p.reduce((a, b) => a + b, 0) : 0,
    hot = kind === "rescale" || kind === "add";
  put(
    "l",
    reached("add")
      ? `${num(alpha * lOld)} + ${num(sum)} = ${num(tile.l)}`
      : reached("rescale")
        ? `${num(alpha)} × ${num(lOld)} = ${num(alpha * lOld)}`
        : num(now ? now.l : 0),
    hot,
    reached("add") && odd(tile.l),
  );
  put(
    "o",
    reached("add")
      ? list(tile.o)
      : reached("rescale")
        ? `${num(alpha)} × ${list(oOld)} = ${list(oOld.map(x => alpha * x))}`
        : list(now ? now.o : zero),
    hot,
    reached("add") && odd(tile.o),
  );
  if (kind === "store") {
    put(
      "o / l",
      list(result.out),
      true,
      right && right.out.some((x, c) => !(Math.abs(x - result.out[c]) <= 1e-5 * Math.max(1, Math.abs(x)))),
    );
    if (right) put("right", list(right.out));
  } else {
    const at = reached("add") ? tile : now;
    put("o / l", at && at.l !== 0 ? list(at.o.map(x => x / at.l)) : "–");
  }
  $("numbers").replaceChildren(...lines);
}
