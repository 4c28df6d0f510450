"use strict";
// Chapters 1 and 4: matrices with their numbers. A scene takes a state and the size of the stage, and returns marks, a line
// to read below the figure, and a label for those who cannot see it.

// ---- chapter 1: what attention is ---------------------------------------------------------------------------------------
const HEADINGS = { q: ["query", "what it looks for"], k: ["key", "what it offers"], v: ["value", "what it passes on"] };

function attention(state, view) {
  return state.layout === "list" ? threeVectors(view) : product(state, view);
}
function threeVectors({ w, h, small }) {
  const { names, q, k, v, n, d } = STORY,
    side = small ? 36 : 58,
    between = 0.9;
  const unit = Math.min((w - side - 10) / (3 * d + 2 * between), (h - 70) / n, 46);
  const left = (w - side - (3 * d + 2 * between) * unit) / 2 + side,
    top = (h - n * unit) / 2 + 14,
    size = small ? 10.5 : 14;
  const marks = names.map((name, i) =>
    words(`word-${i}`, left - 8, top + (i + 0.5) * unit, name, "word", { anchor: "end", size }),
  );
  Object.entries({ q, k, v }).forEach(([name, values], b) => {
    const x = left + b * (d + between) * unit;
    marks.push(...grid(name, values, x, top, unit, name));
    marks.push(
      words(`head-${name}`, x + (d * unit) / 2, top - (small ? 22 : 30), HEADINGS[name][0], `letter ${name}`, {
        anchor: "middle",
        size: small ? 12 : 16,
      }),
    );
    marks.push(
      words(`about-${name}`, x + (d * unit) / 2, top - (small ? 9 : 12), HEADINGS[name][1], "soft", {
        anchor: "middle",
        size: small ? 9 : 12,
      }),
    );
  });
  const label = `Six words, ${names.join(" ")}, each with a query, a key and a value of ${d} numbers.`;
  return { marks, readout: "Each row belongs to one word.", label };
}

/** Q left of S, K above it; V above O: where a row meets a column, their product stands. */
function product(state, { w, h, small }) {
  const { names, q, k, v, s, p, o, n, d, row } = STORY,
    { reveal, pick } = state,
    gap = 0.7,
    side = small ? 34 : 56;
  const unit = Math.min((w - side - 8) / (2 * d + n + 2 * gap), (h - 46) / (2 * n + gap), 44);
  const left = (w - side - (2 * d + n + 2 * gap) * unit) / 2 + side,
    top = (h - (2 * n + gap) * unit) / 2 + 2;
  const at = {
    q: left,
    s: left + (d + gap) * unit,
    o: left + (d + n + 2 * gap) * unit,
    v: top,
    k: top + (n - d) * unit,
    row: top + (n + gap) * unit,
  };
  const size = small ? 9.5 : 13.5,
    letter = small ? 13 : 18,
    one = reveal !== "scores" && reveal !== "all";
  const weights = i => reveal === "all" || ((reveal === "softmax" || reveal === "mix") && i === row),
    outputs = i => reveal === "all" || (reveal === "mix" && i === row);
  const lit = {
    q: i => pick && pick.m !== "o" && pick.m !== "p" && i === pick.i,
    k: j => pick && pick.m === "s" && j === pick.j,
    v: (_, c) => pick && pick.m === "o" && c === pick.j,
  };
  const faded = i => one && i !== row;
  const cls = (name, isLit, dim) => `${name}${isLit ? " lit" : ""}${dim ? " dim" : ""}`;
  const cells = s.map((scores, i) => scores.map((x, j) => (weights(i) ? p[i][j] : x)));
  const isPicked = (i, j) =>
    pick && ((pick.m !== "o" && pick.i === i && pick.j === j) || (pick.m === "o" && pick.i === i));
  const kind = i => (weights(i) ? "p" : "s"),
    about = (i, j) => `${names[i]}, ${names[j]}: ${weights(i) ? "weight" : "score"} ${num(cells[i][j], 3)}`;
  const marks = [
    ...grid("q", q, at.q, at.row, unit, (i, c) => cls("q", lit.q(i), faded(i))),
    ...grid("k", k, at.s, at.k, unit, (j, c) => cls("k", lit.k(j)), { across: true }),
    ...grid("v", v, at.o, at.v, unit, (j, c) => cls("v", lit.v(j, c), reveal !== "mix" && reveal !== "all")),
    ...grid("s", cells, at.s, at.row, unit, (i, j) => cls(kind(i), isPicked(i, j), faded(i)), {
      pick: (i, j) => (faded(i) ? undefined : `${kind(i)},${i},${j}`),
      spoken: about,
      tabindex: (i, j) => (pick && pick.m !== "o" && pick.i === i && pick.j === j ? 0 : undefined),
    }),
    ...grid(
      "o",
      o.map((r, i) => (outputs(i) ? r : r.map(() => null))),
      at.o,
      at.row,
      unit,
      (i, c) => (outputs(i) ? cls("o", pick && pick.m === "o" && pick.i === i && pick.j === c) : "slot"),
      { pick: (i, c) => (outputs(i) ? `o,${i},${c}` : undefined) },
    ),
    ...names.map((name, i) =>
      words(`word-${i}`, at.q - 7, at.row + (i + 0.5) * unit, name, `word${faded(i) ? " dim" : ""}`, {
        anchor: "end",
        size,
      }),
    ),
    ...names.map((name, j) =>
      words(`key-${j}`, at.s + (j + 0.5) * unit - 1, at.k - (small ? 6 : 9), name, "word", {
        anchor: "middle",
        size: small ? 8.5 : 12,
      }),
    ),
    words("head-q", at.q + (d * unit) / 2, at.row + n * unit + (small ? 11 : 15), "Q", "letter q", {
      anchor: "middle",
      size: letter,
    }),
    words("head-k", at.s - 9, at.k + (d * unit) / 2, "Kᵀ", "letter k", { anchor: "end", size: letter }),
    words(
      "head-v",
      at.o + (d * unit) / 2,
      at.v - (small ? 10 : 15),
      "V",
      "letter v",
      { anchor: "middle", size: letter },
    ),
    words(
      "head-s",
      at.s + (n * unit) / 2,
      at.row + n * unit + (small ? 11 : 15),
      reveal === "all" ? "P = softmax(S)" : reveal === "scores" || reveal === "row" ? "S = Q Kᵀ / √d" : "softmax",
      `letter ${reveal === "scores" || reveal === "row" ? "s" : "p"}`,
      { anchor: "middle", size: small ? 11 : 15 },
    ),
    words(
      "head-o",
      at.o + (d * unit) / 2,
      at.row + n * unit + (small ? 11 : 15),
      reveal === "all" ? "O = P V" : "O",
      "letter o",
      { anchor: "middle", size: small ? 11 : 15 },
    ),
  ];
  return {
    marks,
    readout: written(pick, reveal),
    label: `${{ scores: "All scores", row: "The scores of one word", softmax: "The weights of one word", mix: "The output of one word", all: "Weights and outputs of all words" }[reveal]}. ${written(pick, reveal)}`,
  };
}
/** Where the number that is picked comes from, written out. */
function written(pick) {
  const { names, q, k, v, s, p, o, d } = STORY;
  if (!pick) return "";
  const { m, i, j } = pick;
  if (m === "s") {
    const dot = q[i].reduce((sum, x, c) => sum + x * k[j][c], 0);
    return `“${names[i]}” asks “${names[j]}”: (${q[i].map((x, c) => `${signed(x)}·${signed(k[j][c])}`).join(" + ")}) / √${d} = ${num(dot)} / ${Math.sqrt(d)} = ${num(s[i][j], 4)}`;
  }
  if (m === "p") {
    const powers = s[i].map(Math.exp),
      sum = powers.reduce((a, b) => a + b);
    return `e^${num(s[i][j], 4)} / (${s[i].map(x => `e^${num(x, 4)}`).join(" + ")}) = ${num(powers[j], 3)} / ${num(sum, 3)} = ${num(p[i][j], 3)}`;
  }
  return `${p[i].map((x, key) => `${num(x, 2)}·${signed(v[key][j])}`).join(" + ")} = ${num(o[i][j], 3)}`;
}

// ---- chapter 4: tiles ---------------------------------------------------------------------------------------------------
/** state: { tile, phase } with phase one of empty, load, scores, use, gone, done. The weights are taken as known here. */
function tiles({ tile = 0, phase }, view) {
  const { q, k, v, s, p, o, n, d, blockQ, blockK } = STORY,
    { w, small } = view;
  const mini = Math.min((w - 24) / (4 * d + 3.6), small ? 19 : 27),
    room = memories(view, n * mini + (small ? 36 : 50));
  const { chip, hbm, label, marks } = room,
    order = ["empty", "load", "scores", "use", "gone", "done"].indexOf(phase);
  const busy = order >= 1 && order < 5,
    tileThere = phase === "scores" || phase === "use";
  // HBM: Q, K, V and O side by side
  const step = (d + 1.2) * mini,
    hx = hbm.x + (hbm.w - (4 * d + 3.6) * mini) / 2,
    hy = hbm.y + label + 6;
  const rowIn = i => busy && i < blockQ,
    keyIn = j => busy && Math.floor(j / blockK) === tile;
  const at = { q: hx, k: hx + step, v: hx + 2 * step, o: hx + 3 * step };
  const copied = name => `${name} copied`;
  marks.push(
    ...grid("hq", q, at.q, hy, mini, i => (rowIn(i) ? copied("q") : "q")),
    ...grid("hk", k, at.k, hy, mini, j => (keyIn(j) ? copied("k") : "k")),
    ...grid("hv", v, at.v, hy, mini, j => (keyIn(j) ? copied("v") : "v")),
  );
  // The chip: the product of chapter 1, no larger than a tile
  const gap = 0.8,
    columns = 2 * d + blockK + 2 * gap,
    rows = d + blockQ + gap;
  const unit = Math.min((chip.w - 24) / columns, (chip.h - label - (small ? 34 : 44)) / rows, 46);
  const cx = chip.x + (chip.w - columns * unit) / 2,
    cy = chip.y + label + (chip.h - label - rows * unit) / 2 - (small ? 8 : 4);
  const on = {
    q: cx,
    s: cx + (d + gap) * unit,
    o: cx + (d + blockK + 2 * gap) * unit,
    k: cy,
    v: cy + (d - blockK) * unit,
    row: cy + (d + gap) * unit,
  };
  const first = tile * blockK,
    from = (x, i, c) => ({ x: x + c * mini, y: hy + i * mini, w: mini - 2, h: mini - 2, o: 0.4 });
  const size = small ? 11 : 14,
    under = on.row + blockQ * unit + (small ? 9 : 14);
  const head = (key, x, text, cls) => words(key, x, under, text, `letter ${cls}`, { anchor: "middle", size });
  if (busy) {
    marks.push(
      ...grid("tq", q.slice(0, blockQ), on.q, on.row, unit, "q", { enter: (i, c) => from(at.q, i, c) }),
      head("tq-name", on.q + (d * unit) / 2, "Q tile stays", "q"),
    );
    marks.push(
      ...grid("tk", k.slice(first, first + blockK), on.s, on.k, unit, "k", {
        across: true,
        first: [first, 0],
        enter: (j, c) => from(at.k, j, c),
      }),
    );
    marks.push(
      ...grid("tv", v.slice(first, first + blockK), on.o, on.v, unit, "v", {
        first: [first, 0],
        enter: (j, c) => from(at.v, j, c),
      }),
    );
    const done = phase === "use" || phase === "gone" ? tile + 1 : tile;
    const o_ = p
      .slice(0, blockQ)
      .map(weights => v[0].map((_, c) => weights.slice(0, done * blockK).reduce((sum, x, j) => sum + x * v[j][c], 0)));
    marks.push(
      ...grid("to", o_, on.o, on.row, unit, "state", {}),
      head("to-name", on.o + (d * unit) / 2, "o so far", "state-ink"),
    );
    if (tileThere) {
      const values = (phase === "use" ? p : s).slice(0, blockQ).map(r => r.slice(first, first + blockK));
      marks.push(
        ...grid("ts", values, on.s, on.row, unit, phase === "use" ? "p" : "s", { first: [0, first] }),
        head("ts-name", on.s + (blockK * unit) / 2, phase === "use" ? "P tile" : "S tile", phase === "use" ? "p" : "s"),
      );
    } else marks.push(box("hole", on.s, on.row, blockK * unit - 2, blockQ * unit - 2, "slot", { z: 0 }));
  }
  if (!busy)
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
  marks.push(
    ...grid(
      "ho",
      o.map((r, i) => (phase === "done" && i < blockQ ? r : r.map(() => null))),
      at.o,
      hy,
      mini,
      i => (phase === "done" && i < blockQ ? "o" : "slot"),
      { enter: (i, c) => (phase === "done" ? { x: on.o + c * unit, y: on.row + i * unit } : {}) },
    ),
  );
  for (const [name, text] of Object.entries({ q: "Q", k: "K", v: "V", o: "O" }))
    marks.push(
      words(`h${name}-name`, at[name] + (d * mini) / 2, hy - (small ? 6 : 9), text, `letter ${name}`, {
        anchor: "middle",
        size,
      }),
    );
  const readout = {
    empty: "Nothing is on the chip yet.",
    load: `Loaded: three queries, keys and values ${first} and ${first + 1}.`,
    scores: "The tile of scores: 6 numbers of the 36.",
    use: "P tile times V tile is added to o.",
    gone: "The tile is gone. What it had to say is in o.",
    done: "Three rows of O are written, once. No score has ever left the chip.",
  }[phase];
  return { marks, readout, label: `Two memories, HBM and the chip. ${readout}` };
}
