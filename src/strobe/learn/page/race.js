"use strict";
// Chapters 7 and 10: both methods on one clock, and the backward pass.

// ---- chapter 7 --------------------------------------------------------------------------------------------------------------
const ITEM = 4; // bytes of a number here
/** What standard attention has done after moving so many numbers: { s, p, o } cells written, and the kernel at work. */
function standardAt(moved) {
  const { n, d } = STORY,
    nn = n * n,
    read = 2 * n * d,
    clamp = (x, most) => Math.max(0, Math.min(most, x));
  const softmax = clamp(moved - read - nn, 2 * nn),
    rows = Math.floor(softmax / (2 * n));
  return {
    s: clamp(moved - read, nn),
    p: rows * n + clamp(softmax - rows * 2 * n - n, n),
    o: clamp(moved - read - 4 * nn - n * d, n * d),
    kernel: moved < read + nn ? 1 : moved < read + 3 * nn ? 2 : moved < STORY.moved.standard / ITEM ? 3 : 4,
  };
}
/** The same of FlashAttention: which block of rows is at work, which tile of keys is on the chip, which rows are written. */
function flashAt(moved) {
  const { trace } = STORY,
    wide = 8; // the recorded trace is float64
  let sum = 0,
    block = -1,
    tile = -1,
    ended = 0,
    rows = 0;
  for (const step of trace.steps) {
    const more = (step.flash.hbm_read + step.flash.hbm_written) / wide;
    if (sum + more > moved) break;
    sum += more;
    if (step.kind === "begin") {
      block = step.block;
      tile = -1;
    }
    if (step.kind === "load") {
      tile = step.tile;
      ended = sum;
    }
    if (step.kind === "store") {
      rows = step.rows[1];
      block = -1;
      tile = -1;
    }
  }
  return { block, tile, tileThere: tile >= 0 && moved - ended < 8, rows, done: rows === STORY.n };
}
/** state: { clock }: bytes that either side has moved. */
function race({ clock }, { w, h, small }) {
  const { n, d, blockQ, blockK, moved: total } = STORY,
    gap = small ? 8 : 22,
    half = (w - gap - 2) / 2, // the boxes' edges need a pixel
    head = small ? 16 : 26,
    foot = small ? 52 : 84,
    size = small ? 9.5 : 13;
  const unit = Math.min((half - 16) / (3 * d + 2.2), (h - head - foot - (small ? 100 : 150)) / (3 * n + 3.6), 17),
    hbmHeight = (3 * n + 3.6) * unit + (small ? 18 : 26),
    chipHeight = h - head - foot - hbmHeight - (small ? 8 : 14),
    marks = [];
  const numbers = clock / ITEM,
    standard = standardAt(Math.min(numbers, total.standard / ITEM)),
    flash = flashAt(Math.min(numbers, total.flash / ITEM));
  const filled = (rows, columns, count) => (i, j) => i * columns + j < count;
  const side = (which, x0, title) => {
    const chip = { x: x0, y: head, h: chipHeight },
      hbm = { x: x0, y: head + chipHeight + (small ? 8 : 14), h: hbmHeight };
    marks.push(
      words(`${which}-title`, x0 + half / 2, head - (small ? 7 : 12), title, "strong-text", {
        anchor: "middle",
        size: small ? 12 : 16,
      }),
      box(`${which}-chip`, x0, chip.y, half, chip.h, "chip", { z: 0, round: 6 }),
      box(`${which}-hbm`, x0, hbm.y, half, hbm.h, "hbm", { z: 0, round: 6 }),
      words(`${which}-chip-name`, x0 + 7, chip.y + (small ? 9 : 13), "chip", "place", { size: small ? 9 : 12 }),
      words(`${which}-hbm-name`, x0 + 7, hbm.y + hbm.h - (small ? 7 : 10), "HBM", "place", { size: small ? 9 : 12 }),
    );
    const left = x0 + (half - (3 * d + 2.2) * unit) / 2,
      first = hbm.y + (small ? 16 : 24),
      lines = [first, first + (n + 1) * unit, first + (2 * n + 2) * unit];
    const put = (name, values, x, y, fill, cls) => {
      marks.push(
        ...grid(`${which}-${name}`, values, x, y, unit, (i, j) => (fill(i, j) ? cls : "slot"), {
          numbers: false,
          title: undefined,
        }),
      );
      marks.push(
        words(
          `${which}-${name}-name`,
          x + (values[0].length * unit) / 2,
          y - (small ? 4 : 6),
          name.toUpperCase(),
          `letter ${cls === "state" ? "state-ink" : cls}`,
          { anchor: "middle", size: small ? 9 : 12 },
        ),
      );
    };
    ["q", "k", "v"].forEach((name, b) =>
      put(name, zeros(n, d), left + b * (d + 1.1) * unit, lines[0], () => true, name),
    );
    return { left, lines, chip, put };
  };
  const a = side("left", 1, "standard"),
    b = side("right", half + gap + 1, "FlashAttention");
  a.put("s", zeros(n, n), a.left, a.lines[1], filled(n, n, standard.s), "s");
  a.put("p", zeros(n, n), a.left + (n + 1.1) * unit, a.lines[1], filled(n, n, standard.p), "p");
  a.put("o", zeros(n, d), a.left, a.lines[2], filled(n, d, standard.o), "o");
  marks.push(
    words(
      "left-work",
      half / 2,
      a.chip.y + a.chip.h / 2,
      ["", "S = Q Kᵀ / √d", "P = softmax(S)", "O = P V", "done"][standard.kernel],
      "letter",
      { anchor: "middle", size: small ? 12 : 17 },
    ),
    words(
      "left-kernel",
      half / 2,
      a.chip.y + a.chip.h / 2 + (small ? 15 : 22),
      standard.kernel < 4 ? `kernel ${standard.kernel} of 3` : "",
      "soft",
      { anchor: "middle", size },
    ),
  );
  marks.push(
    box("right-never", b.left, b.lines[1], (2 * n + 1.1) * unit, n * unit - 2, "slot", { z: 0 }),
    words("right-never-name", b.left + ((2 * n + 1.1) * unit) / 2, b.lines[1] + (n * unit) / 2, "no S, no P", "soft", {
      anchor: "middle",
      size: small ? 11 : 14,
    }),
  );
  b.put("o", zeros(n, d), b.left, b.lines[2], i => i < flash.rows, "o");
  b.put("l", zeros(n, 1), b.left + (d + 1.1) * unit, b.lines[2], i => i < flash.rows, "state");
  const cell = Math.min(unit * 1.25, (b.chip.h - 22) / (d + blockQ + 0.9)),
    wide = (2 * d + blockK + 2.3) * cell,
    cx = half + gap + (half - wide) / 2,
    cy = b.chip.y + (b.chip.h - (d + blockQ + 0.6) * cell) / 2 + 4;
  const on = { q: cx, s: cx + (d + 0.6) * cell, o: cx + (d + blockK + 1.2) * cell, row: cy + (d + 0.6) * cell };
  if (flash.block >= 0) {
    const mini = (name, rows, columns, x, y, cls, across = false) =>
      marks.push(
        ...grid(`chip-${name}`, zeros(rows, columns), x, y, cell, cls, { numbers: false, title: undefined, across }),
      );
    mini("q", blockQ, d, on.q, on.row, "q");
    mini("state", blockQ, d + 0, on.o, on.row, "state");
    if (flash.tile >= 0) {
      mini("k", blockK, d, on.s, cy, "k", true);
      mini("v", blockK, d, on.o, cy + (d - blockK) * cell, "v");
    }
    if (flash.tileThere) mini(`tile-${flash.block}-${flash.tile}`, blockQ, blockK, on.s, on.row, "p");
  } else
    marks.push(
      words("right-work", half + gap + half / 2, b.chip.y + b.chip.h / 2, flash.done ? "done" : "", "letter", {
        anchor: "middle",
        size: small ? 12 : 17,
      }),
    );
  const thick = small ? 8 : 12,
    y = h - foot + (small ? 15 : 24),
    most = total.standard;
  for (const [which, x0, movedBytes, all, kept, keptAll] of [
    ["left", 0, Math.min(clock, total.standard), total.standard, (standard.s + standard.p) * ITEM, total.kept_standard],
    ["right", half + gap, Math.min(clock, total.flash), total.flash, flash.rows * ITEM, total.kept_flash],
  ]) {
    marks.push(
      words(
        `${which}-moved`,
        x0,
        y - (small ? 6 : 9),
        `moved: ${movedBytes} B${movedBytes >= all ? ", done" : ""}`,
        "strong-text",
        { size },
      ),
      box(`${which}-track`, x0, y, half, thick, "slot", { round: 2, z: 0 }),
      box(`${which}-bar`, x0, y, (half * movedBytes) / most, thick, "moved", { round: 2 }),
    );
    marks.push(
      words(
        `${which}-kept`,
        x0,
        y + thick + (small ? 9 : 14),
        `${which === "left" ? "S and P" : "L"} in HBM: ${kept} B`,
        "strong-text",
        { size },
      ),
      box(
        `${which}-kept-bar`,
        x0,
        y + thick + (small ? 15 : 24),
        (half * kept) / total.kept_standard,
        thick,
        which === "left" ? "s" : "state",
        { round: 2 },
      ),
    );
  }
  const readout = flash.done
    ? standard.kernel === 4
      ? `In all: ${total.standard} B against ${total.flash} B moved, ${total.kept_standard} B against ${total.kept_flash} B kept.`
      : `FlashAttention is done after ${total.flash} B. Standard attention goes on.`
    : `Either side has moved ${clock} bytes.`;
  return { marks, readout, label: `Standard attention on the left, FlashAttention on the right. ${readout}` };
}

// ---- chapter 10 -------------------------------------------------------------------------------------------------------------
/** The three gradients after the first `count` tiles. */
function gradientsAfter(count) {
  const { q, k, d, n, backward, blockQ, blockK } = STORY,
    scale = 1 / Math.sqrt(d),
    dq = zeros(n, d),
    dk = zeros(n, d),
    dv = zeros(n, d);
  const add = (to, first, piece, factor) =>
    piece.forEach((r, i) =>
      r.forEach((x, c) => {
        to[first + i][c] += factor * x;
      }),
    );
  for (const tile of backward.tiles.slice(0, count)) {
    const rows = [tile.rows, tile.rows + blockQ],
      keys = [tile.keys, tile.keys + blockK];
    add(dv, tile.keys, times(transposed(tile.p), backward.do.slice(...rows)), 1);
    add(dq, tile.rows, times(tile.ds, k.slice(...keys)), scale);
    add(dk, tile.keys, times(transposed(tile.ds), q.slice(...rows)), scale);
  }
  return { dq, dk, dv };
}
/** state: { phase, tile } with phase one of keep, remake, flow, done. */
function backwards({ phase, tile = 0 }, view) {
  const { q, k, v, n, d, backward, blockQ, blockK } = STORY,
    { w, small } = view,
    columns = 4 * d + 1 + 4 * 1.1;
  const mini = Math.min((w - 20) / columns, small ? 7 : 24),
    hbmHeight = (2 * n + 1.3) * mini + (small ? 36 : 52),
    room = memories(view, hbmHeight),
    { chip, hbm, label, marks } = room;
  const left = hbm.x + (hbm.w - columns * mini) / 2,
    y1 = hbm.y + label + (small ? 4 : 6),
    y2 = y1 + (n + 1.3) * mini,
    step = (d + 1.1) * mini,
    size = small ? 9.5 : 12.5,
    remade = phase === "remake" || phase === "flow";
  const now = backward.tiles[tile],
    done = phase === "done" ? backward.tiles.length : phase === "flow" ? tile + 1 : phase === "remake" ? tile : 0,
    sums = gradientsAfter(done);
  const at = { q: left, k: left + step, v: left + 2 * step, do: left + 3 * step, l: left + 4 * step },
    touched = backward.tiles.slice(0, done);
  const name = (key, x, y, text, cls) =>
    marks.push(words(`${key}-name`, x, y - (small ? 5 : 8), text, `letter ${cls}`, { anchor: "middle", size }));
  for (const [key, values, cls, text] of [
    ["q", q, "q", "Q"],
    ["k", k, "k", "K"],
    ["v", v, "v", "V"],
    ["do", backward.do, "o", "dO"],
  ]) {
    marks.push(...grid(`b-${key}`, values, at[key], y1, mini, cls));
    name(`b-${key}`, at[key] + (d * mini) / 2, y1, text, cls);
  }
  marks.push(
    ...grid(
      "b-l",
      backward.lse.map(x => [x]),
      at.l,
      y1,
      mini,
      "state",
      { numbers: mini >= 22 },
    ),
  );
  name("b-l", at.l + mini / 2, y1, "L", "state-ink");
  const known = (key, i) =>
    touched.some(t => (key === "dq" ? i >= t.rows && i < t.rows + blockQ : i >= t.keys && i < t.keys + blockK));
  for (const [key, cls, place] of [
    ["dq", "q", at.q],
    ["dk", "k", at.k],
    ["dv", "v", at.v],
  ]) {
    marks.push(
      ...grid(
        `b-${key}`,
        sums[key].map((r, i) => (known(key, i) ? r : r.map(() => null))),
        place,
        y2,
        mini,
        i => (known(key, i) ? cls : "slot"),
      ),
    );
    name(`b-${key}`, place + (d * mini) / 2, y2, `d${key[1].toUpperCase()}`, cls);
  }
  marks.push(
    box("b-none", at.do, y2, (d + 2.1) * mini - 2, n * mini - 2, "slot", { z: 0 }),
    words("b-none-name", at.do + ((d + 2.1) * mini) / 2, y2 + (n * mini) / 2, small ? "no P" : "no P here", "soft", {
      anchor: "middle",
      size: small ? 10 : 13,
    }),
  );
  const wide = 2 * d + 2 * blockK + 3.8,
    tall = d + blockQ + 0.8,
    unit = Math.min((chip.w - 20) / wide, (chip.h - label - (small ? 22 : 40)) / tall, 40),
    cx = chip.x + (chip.w - wide * unit) / 2,
    cy = chip.y + label + (chip.h - label - tall * unit) / 2 - 4,
    row = cy + (d + 0.8) * unit;
  const on = {
    q: cx,
    l: cx + (d + 0.8) * unit,
    p: cx + (d + 2.6) * unit,
    ds: cx + (d + blockK + 3.2) * unit,
    do: cx + (d + 2 * blockK + 3.8) * unit,
  };
  if (!remade)
    marks.push(
      words(
        "chip-empty",
        chip.x + chip.w / 2,
        chip.y + chip.h / 2,
        phase === "done" ? "empty again" : "empty",
        "soft",
        { anchor: "middle", size: small ? 12 : 16 },
      ),
    );
  if (remade) {
    const rows = [now.rows, now.rows + blockQ],
      keys = [now.keys, now.keys + blockK],
      under = row + blockQ * unit + (small ? 9 : 14);
    marks.push(
      ...grid("bc-q", q.slice(...rows), on.q, row, unit, "q"),
      ...grid("bc-k", k.slice(...keys), on.p, cy, unit, "k", { across: true }),
      ...grid(
        "bc-l",
        backward.lse.slice(...rows).map(x => [x]),
        on.l,
        row,
        unit,
        "state",
      ),
      ...grid(`bc-p${tile}`, now.p, on.p, row, unit, "p"),
    );
    marks.push(
      words("bc-q-name", on.q + (d * unit) / 2, under, "Q tile", "letter q", { anchor: "middle", size }),
      words("bc-l-name", on.l + unit / 2, under, "L", "letter state-ink", { anchor: "middle", size }),
      words("bc-p-name", on.p + (blockK * unit) / 2, under, "P tile", "letter p", { anchor: "middle", size }),
    );
    if (phase === "flow") {
      marks.push(
        ...grid(`bc-ds${tile}`, now.ds, on.ds, row, unit, "s"),
        ...grid("bc-v", v.slice(...keys), on.ds, cy, unit, "v", { across: true }),
        ...grid("bc-do", backward.do.slice(...rows), on.do, row, unit, "o"),
        words("bc-ds-name", on.ds + (blockK * unit) / 2, under, "dS", "letter s", { anchor: "middle", size }),
        words("bc-do-name", on.do + (d * unit) / 2, under, "dO tile", "letter o", { anchor: "middle", size }),
      );
      const { between } = room;
      for (const place of [at.q, at.k, at.v]) {
        const x = place + (d * mini) / 2;
        marks.push(arrow(`b-flow-${place}`, x, between.top - 2, x, between.bottom + 2, "strong"));
      }
    }
  }
  const readout = {
    keep: "Kept from the forward pass: the output and one number L per row.",
    remake: `p = e^(s − L): e^(${num(now.s[0][0], 3)} − ${num(backward.lse[now.rows], 3)}) = ${num(now.p[0][0], 2)}, the weight of chapter 1.`,
    flow: `Tile ${tile + 1} of ${backward.tiles.length} adds its share to dQ, dK and dV, and disappears.`,
    done: "All gradients are complete. Again, no N × N matrix was stored.",
  }[phase];
  return { marks, readout, label: `The backward pass. ${readout}` };
}
