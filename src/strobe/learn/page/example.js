"use strict";
// The data that Python put into the page, and the six words in the form in which the scenes want them.
const DATA = JSON.parse($("data").textContent);
const STORY = (() => {
  const { words, row, q, k, v, p, backward, masks, bytes: moved } = DATA.story,
    trace = recorded(DATA.story.trace);
  const s = trace.rows.map(tiles => tiles.flatMap(tile => tile.s));
  const n = words.length,
    d = q[0].length,
    blockQ = trace.block_q,
    blockK = trace.block_k;
  return {
    names: words,
    row,
    q,
    k,
    v,
    s,
    p,
    o: trace.out,
    lse: trace.lse,
    rows: trace.rows,
    trace,
    n,
    d,
    blockQ,
    blockK,
    backward,
    masks,
    moved,
  };
})();
const times = (a, b) => a.map(row => b[0].map((_, j) => row.reduce((sum, x, i) => sum + x * b[i][j], 0)));
const transposed = a => a[0].map((_, j) => a.map(row => row[j]));
const plus = (a, b) => a.map((row, i) => row.map((x, j) => x + b[i][j]));
const nothing = (rows, columns) => Array.from({ length: rows }, () => new Array(columns).fill(null));
const zeros = (rows, columns) => Array.from({ length: rows }, () => new Array(columns).fill(0));

// ---- HBM below, the chip above: the same two places in every chapter --------------------------------------------------
/** Where the two memories lie, and their marks. */
function memories({ w, h, small }, hbmHeight, about = {}) {
  const gap = small ? 16 : 34,
    label = small ? 15 : 20,
    chipHeight = h - hbmHeight - gap;
  const chip = { x: 1, y: 1, w: w - 2, h: chipHeight - 2 },
    hbm = { x: 1, y: chipHeight + gap, w: w - 2, h: hbmHeight - 1 };
  const size = small ? 10 : 12.5;
  return {
    chip,
    hbm,
    label,
    between: { top: chipHeight, bottom: hbm.y },
    marks: [
      box("chip", chip.x, chip.y, chip.w, chip.h, "chip", { z: 0, round: 8 }),
      box("hbm", hbm.x, hbm.y, hbm.w, hbm.h, "hbm", { z: 0, round: 8 }),
      words("chip-name", chip.x + 9, chip.y + label - 3, about.chip || "on the chip", "place", { size }),
      words("hbm-name", hbm.x + 9, hbm.y + label - 3, about.hbm || "HBM", "place", { size }),
    ],
  };
}
