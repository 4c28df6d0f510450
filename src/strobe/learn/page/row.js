"use strict";
// Chapters 5 and 6: one row, its bars, and the three things that are remembered.

/** state: { tile, phase } with phase one of start, arrive, rescale, add, gone, final. */
function oneRow({ tile = 0, phase }, { w, h, small }) {
  const { names, rows, row, v, s: scores, o, n, d, blockK } = STORY,
    met = rows[row],
    now = met[tile],
    before = tile ? met[tile - 1] : null;
  const arriving = phase === "arrive" && before,
    started = phase !== "start";
  const m = !started ? null : phase === "final" ? met.at(-1).m_new : arriving ? before.m_new : now.m_new;
  const added = phase === "add" || phase === "gone",
    fresh = j => Math.floor(j / blockK) === tile && phase !== "final" && started;
  const seen = j => started && (phase === "final" || Math.floor(j / blockK) <= tile),
    tall = j => Math.exp(scores[row][j] - m);
  const l = !started
    ? 0
    : phase === "final"
      ? met.at(-1).l
      : added
        ? now.l
        : !before
          ? 0
          : arriving
            ? before.l
            : now.alpha * before.l;
  const o_ = !started
    ? zeros(1, d)[0]
    : phase === "final"
      ? o[row]
      : added
        ? now.o
        : !before
          ? zeros(1, d)[0]
          : before.o.map(x => (arriving ? x : now.alpha * x));
  // Bars on the left, the sum of them as one column on the right, the state below.
  const column = small ? 46 : 74,
    strip = small ? 64 : 104,
    foot = small ? 34 : 50,
    top = small ? 16 : 26,
    base = h - strip - foot,
    scale = (base - top) / 2.85;
  const slot = (w - column - (small ? 30 : 46)) / n,
    bar = Math.min(slot * 0.62, 62),
    left = small ? 14 : 22,
    x = j => left + j * slot + (slot - bar) / 2,
    size = small ? 10 : 13;
  const cx = w - column - 4,
    marks = [
      path("unit", `M${left - 4} ${base - scale}H${w - 2}`, "unit"),
      words("unit-name", left - 7, base - scale, "1", "soft", { anchor: "end", size }),
      path("base", `M${left - 4} ${base}H${w - 2}`, "axis"),
      words("column-name", cx + column / 2, base + (small ? 12 : 16), "sum l", "strong-text", {
        anchor: "middle",
        size,
      }),
    ];
  for (let t = 0; t < n / blockK; t++) {
    const a = left + t * blockK * slot + 4,
      b = left + (t + 1) * blockK * slot - 4,
      y = base + foot - (small ? 4 : 7);
    marks.push(
      path(
        `brace-${t}`,
        `M${a} ${y - 4}v4H${b}v-4`,
        t === tile && started && phase !== "final" ? "brace now" : "brace",
      ),
    );
    marks.push(
      words(
        `brace-name-${t}`,
        (a + b) / 2,
        y + (small ? 8 : 11),
        `tile ${t + 1}`,
        t === tile && started && phase !== "final" ? "strong-text" : "soft",
        { anchor: "middle", size: small ? 9 : 12 },
      ),
    );
  }
  let stacked = base - (added ? now.alpha * (before ? before.l : 0) : l) * scale;
  const settled = phase === "gone" || phase === "final";
  marks.push(
    box(
      "column",
      cx,
      base - (settled ? l : added ? now.alpha * (before ? before.l : 0) : l) * scale,
      column,
      (settled ? l : added ? now.alpha * (before ? before.l : 0) : l) * scale,
      "state",
      { round: 0 },
    ),
  );
  names.forEach((name, j) => {
    marks.push(
      words(`row-word-${j}`, left + (j + 0.5) * slot, base + (small ? 9 : 14), name, seen(j) ? "word" : "word dim", {
        anchor: "middle",
        size,
      }),
    );
    marks.push(
      words(
        `row-score-${j}`,
        left + (j + 0.5) * slot,
        base + (small ? 20 : 30),
        seen(j) ? `s = ${num(scores[row][j], 3)}` : "",
        "s-ink",
        { anchor: "middle", size: small ? 9 : 12.5 },
      ),
    );
    if (!seen(j)) return;
    const height = tall(j) * scale,
      alive = fresh(j) && phase !== "gone";
    marks.push(
      box(
        `bar-${j}`,
        x(j),
        base - height,
        bar,
        height,
        alive ? (arriving && tall(j) > 1 ? "p filled over" : "p filled") : "ghost",
        { round: 0, enter: { x: x(j), y: base, w: bar, h: 0, o: 1 }, title: `e^(s − m) = ${num(tall(j), 6)}` },
      ),
    );
    marks.push(
      words(
        `bar-name-${j}`,
        x(j) + bar / 2,
        base - height - 8,
        num(tall(j), tall(j) < 1 ? 2 : 3),
        alive ? "strong-text" : "soft",
        { anchor: "middle", size },
      ),
    );
    if (phase === "add" && fresh(j)) {
      stacked -= height;
      marks.push(
        box(`piece-${j}`, cx, stacked, column, height, "p filled", {
          round: 0,
          enter: { x: x(j), y: base - height, w: bar, h: height, o: 1 },
        }),
      );
    }
  });
  if (l > 0)
    marks.push(
      words("column-value", cx + column / 2, base - l * scale - 9, num(l, 3), "strong-text", {
        anchor: "middle",
        size,
      }),
    );
  if (phase === "rescale" && before)
    marks.push(
      words(
        "alpha",
        cx - 8,
        base - Math.max(l * scale, scale) - (small ? 14 : 22),
        `everything × α = ${num(now.alpha, 2)}`,
        "strong-text",
        { anchor: "end", size: small ? 12 : 16 },
      ),
    );
  marks.push(...remembered(m, l, o_, phase, w, h, strip, small));
  const readout = rowText(tile, phase, now, before, l);
  return {
    marks,
    readout,
    label: `Bars for the keys of the row ${names[row]}. m ${num(m, 3)}, l ${num(l, 3)}. ${readout}`,
  };
}
/** m, l and o: black on yellow, in one line. */
function remembered(m, l, o, phase, w, h, strip, small) {
  const { d } = STORY,
    cell = Math.min(small ? 34 : 52, (w - 30) / (d + 3.2)),
    gap = small ? 14 : 26,
    wide = (d + 2) * cell + 2 * gap,
    y = h - cell - 4,
    x = (w - wide) / 2,
    size = small ? 10.5 : 13;
  const final = phase === "final",
    at = { m: x, l: x + cell + gap, o: x + 2 * cell + 2 * gap };
  const put = (name, value, column) => ({
    key: `keep-${name}`,
    kind: "cell",
    x: column,
    y,
    w: cell - 2,
    h: cell - 2,
    cls: "state",
    text: short(value),
    size: small ? 11 : 15,
    title: num(value, 9),
  });
  return [
    put("m", m, at.m),
    put("l", l, at.l),
    ...o.map((value, c) => ({ ...put(`o${c}`, value, at.o + c * cell), cls: final ? "o" : "state" })),
    words("keep-m-name", at.m + cell / 2, y - 9, small ? "max m" : "maximum m", "soft", { anchor: "middle", size }),
    words("keep-l-name", at.l + cell / 2, y - 9, "sum l", "soft", { anchor: "middle", size }),
    words("keep-o-name", at.o + (d * cell) / 2, y - 9, final ? "output o / l" : "o: sum of bar × value", "soft", {
      anchor: "middle",
      size,
    }),
  ];
}
function rowText(tile, phase, now, before, l) {
  const sum = now.p.reduce((a, b) => a + b, 0);
  if (phase === "start") return "No key has been seen: m = −∞, l = 0, o = 0.";
  if (phase === "arrive")
    return before
      ? `Measured from m = ${num(before.m_new, 3)}: e^(${num(Math.max(...now.s), 3)} − ${num(before.m_new, 3)}) = ${num(Math.exp(Math.max(...now.s) - before.m_new), 3)}, above the line.`
      : `m = ${num(now.m_new, 3)}; bars e^(s − m): ${now.p.map(x => num(x, 2)).join(" and ")}.`;
  if (phase === "rescale")
    return `α = e^(${num(before.m_new, 3)} − ${num(now.m_new, 3)}) = ${num(now.alpha, 3)};  l = ${num(now.alpha, 3)} × ${num(before.l, 3)} = ${num(l, 3)}`;
  if (phase === "add")
    return `l = ${before ? `${num(now.alpha * before.l, 3)} + ` : ""}${now.p.map(x => num(x, 3)).join(" + ")} = ${num(now.l, 3)}`;
  if (phase === "gone") return "The bars are gone. Only m, l and o are remembered.";
  return `One division: o / l = ${list(STORY.o[STORY.row], 4, 3)}, the output of chapter 1.`;
}

// ---- chapter 6: break it -----------------------------------------------------------------------------------------------------
/** The row once right and once broken: { right, wrong }, each { weights, out }. Scores are `gain` times as large. */
function breakRow({ broken = "", gain = 1 }) {
  const { q, k, v, row, n, d, blockQ, blockK } = STORY,
    mask = maskOf("full", n);
  const run = how => {
    const found = rowOf(
      row,
      {
        q: q.map(r => r.map(x => x * gain)),
        k,
        v,
        scale: 1 / Math.sqrt(d),
        blockQ,
        blockK,
        dtype: "float32",
        broken: how,
      },
      mask,
    );
    const l = found.tiles.at(-1).l;
    return {
      out: found.out,
      l,
      weights: found.tiles.flatMap((t, i) =>
        t.p.map(p => (p * found.tiles.slice(i + 1).reduce((f, later) => f * later.alpha, 1)) / l),
      ),
    };
  };
  return { right: run(null), wrong: run(broken || null) };
}
function brokenRow(state, { w, h, small }) {
  const { names, s, row, n, d } = STORY,
    { broken = "", gain = 1 } = state,
    { right, wrong } = breakRow(state),
    fits = wrong.weights.every(Number.isFinite);
  const strip = small ? 86 : 140,
    foot = small ? 32 : 46,
    top = small ? 20 : 34,
    base = h - strip - foot,
    most = Math.max(0.5, ...right.weights, ...wrong.weights.filter(Number.isFinite)),
    scale = (base - top) / most;
  const left = small ? 8 : 16,
    slot = (w - 2 * left) / n,
    bar = Math.min(slot * 0.6, 66),
    size = small ? 10 : 13,
    marks = [path("base", `M${left} ${base}H${w - left}`, "axis")];
  names.forEach((name, j) => {
    const x = left + (j + 0.5) * slot,
      r = right.weights[j] * scale,
      weight = wrong.weights[j],
      bad = broken && !(Math.abs(weight - right.weights[j]) < 1e-4);
    marks.push(
      words(`row-word-${j}`, x, base + (small ? 10 : 15), name, "word", { anchor: "middle", size }),
      words(`row-score-${j}`, x, base + (small ? 22 : 32), `s = ${num(s[row][j] * gain, 3)}`, "s-ink", {
        anchor: "middle",
        size: small ? 9 : 12.5,
      }),
    );
    if (Number.isFinite(weight))
      marks.push(
        box(`bar-${j}`, x - bar / 2, base - weight * scale, bar, weight * scale, bad ? "wrong" : "p filled", {
          round: 0,
        }),
      );
    marks.push(box(`outline-${j}`, x - bar / 2, base - r, bar, r, "outline", { round: 0, z: 2 }));
    marks.push(
      words(
        `bar-name-${j}`,
        x,
        base - Math.max(Number.isFinite(weight) ? weight * scale : 0, r) - 9,
        Number.isFinite(weight) ? num(weight, 2) : "NaN",
        bad ? "bad" : "strong-text",
        { anchor: "middle", size },
      ),
    );
  });
  const cell = Math.min(small ? 40 : 54, (w - 80) / d),
    x = (w - d * cell) / 2 + (small ? 20 : 30),
    y = h - strip + (small ? 14 : 26);
  const line = (name, values, dy, cls) => [
    words(`${name}-name`, x - 8, y + dy + cell * 0.36, name, "soft", { anchor: "end", size }),
    ...values.map((value, c) => ({
      key: `${name}-${c}`,
      kind: "cell",
      x: x + c * cell,
      y: y + dy,
      w: cell - 2,
      h: cell * 0.72,
      cls,
      text: short(value),
      size: small ? 11 : 15,
      title: num(value, 9),
    })),
  ];
  const isWrong = broken && wrong.out.some((value, c) => !(Math.abs(value - right.out[c]) < 1e-4));
  marks.push(
    ...line("right", right.out, 0, "o"),
    ...line(broken ? "broken" : "this", wrong.out, cell * 0.82, isWrong ? "wrong" : "o"),
  );
  const largest = Math.max(...s[row]) * gain;
  const readout = !broken
    ? "Nothing is broken: bars and outlines agree."
    : !fits
      ? `e^${num(largest, 3)} overflows 32 bits (the limit is e^88.7): ∞ / ∞ is no number.`
      : !wrong.out.every(Number.isFinite)
        ? `e^${num(largest, 3)} still fits in 32 bits, but times a value it does not: o is ∞.`
        : isWrong
          ? `Without the rescale “${names[0]}” weighs ${num(wrong.weights[0], 2)} instead of ${num(right.weights[0], 2)}.`
          : "No harm done: the result is the same.";
  return { marks, readout, label: `Weights of the six keys, outlined as they should be. ${readout}` };
}
