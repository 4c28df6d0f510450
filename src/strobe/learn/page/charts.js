"use strict";
// Chapters 8, 9 and 11: how large a tile, which tiles a mask leaves, what a GPU can do.

/** A chart's frame: scales, axes and their names. */
function frame(key, { w, h, small }, { xs, ys, x, y, xName, yName, xTick = String, yTick = String }) {
  const left = small ? 40 : 58,
    right = small ? 8 : 14,
    top = small ? 22 : 34,
    bottom = small ? 36 : 50,
    size = small ? 10 : 13;
  const px = value => left + x(value) * (w - left - right),
    py = value => h - bottom - y(value) * (h - top - bottom);
  const marks = [
    words(`${key}-x`, (left + w - right) / 2, h - (small ? 6 : 10), xName, "soft", { anchor: "middle", size }),
    words(`${key}-y`, 2, small ? 9 : 13, yName, "soft", { size }),
  ];
  for (const value of xs)
    marks.push(
      words(`${key}-x-${value}`, Math.min(px(value), w), h - bottom + (small ? 12 : 17), xTick(value), "tick", {
        anchor: px(value) > w - 24 ? "end" : "middle",
        size: small ? 9.5 : 12,
      }),
    );
  for (const value of ys)
    marks.push(
      path(`${key}-line-${value}`, `M${left} ${py(value)}H${w - right}`, "gridline", { z: 0 }),
      words(`${key}-y-${value}`, left - 6, py(value), yTick(value), "tick", { anchor: "end", size: small ? 9.5 : 12 }),
    );
  return { px, py, left, right, top, bottom, size, marks };
}

// ---- chapter 8 ---------------------------------------------------------------------------------------------------------------
const BR = { least: 8, most: 1024, keys: 128 };
/** Bytes moved, relative to standard attention: (2 N² d / Br) / (4 N²). */
const share = (br, d) => d / (2 * br);
/** The most rows whose scores, output, m and l fit into the registers of one multiprocessor, with 32-bit numbers. */
const mostRows = (d, gpu = GPU0) => Math.floor((gpu.registers * 1024) / (4 * (BR.keys + d + 2)));
/** state: { br, d }. */
function tileSize({ br, d }, view) {
  const { w, h, small } = view,
    span = Math.log2(BR.most / BR.least),
    highest = 4.4,
    wall = mostRows(d),
    powers = [8, 16, 32, 64, 128, 256, 512, 1024];
  const { px, py, right, bottom, top, size, marks } = frame("size", view, {
    xs: powers,
    ys: [0, 1, 2, 3, 4],
    x: v => Math.log2(v / BR.least) / span,
    y: v => v / highest,
    xName: "rows of a tile of queries, Br",
    yName: "bytes moved; standard attention = 1",
    yTick: v => `${v} ×`,
  });
  let curve = "";
  for (let i = 0; i <= 100; i++) {
    const value = BR.least * 2 ** ((span * i) / 100),
      y = share(value, d);
    if (y <= highest) curve += `${curve ? "L" : "M"}${px(value).toFixed(1)} ${py(y).toFixed(1)}`;
  }
  const at = Math.min(share(br, d), highest),
    fits = br <= wall;
  marks.push(
    box("wall", px(wall), top, w - right - px(wall), h - bottom - top, "wall", { z: 0, round: 0 }),
    words("wall-name", (px(wall) + w - right) / 2, top + 16, small ? "full" : "registers full", "strong-text", {
      anchor: "middle",
      size,
    }),
  );
  marks.push(
    path("standard-line", `M${px(BR.least)} ${py(1)}H${w - right}`, "standard-line"),
    words("standard-name", px(wall) - 8, py(1) - 11, "standard attention", "strong-text", { anchor: "end", size }),
    path("curve", curve, "curve"),
  );
  marks.push(
    path("half", `M${px(d / 2)} ${py(0)}V${py(1)}`, "guide"),
    words("half-name", px(d / 2) + 5, py(0.12), "Br = d/2", "soft", { size }),
  );
  marks.push(
    box("dot", px(br) - 7, py(at) - 7, 14, 14, fits ? "dot" : "dot over", { round: 7, z: 3 }),
    words("dot-name", px(br) + (br > 200 ? -12 : 12), py(at) - 14, `${num(share(br, d), 3)} ×`, "strong-text", {
      anchor: br > 200 ? "end" : "start",
      size: small ? 13 : 17,
      z: 3,
    }),
  );
  const readout = `Br = ${br}, d = ${d}: FlashAttention moves ${share(br, d) === 1 ? "as many bytes as" : share(br, d) > 1 ? `${num(share(br, d), 3)} times as many bytes as` : `${num(share(br, d), 3)} of the bytes of`} standard attention${fits ? "" : ", but the tile does not fit"}.`;
  return { marks, readout, label: `Bytes moved against the rows of a tile. ${readout}` };
}

// ---- chapter 9 ---------------------------------------------------------------------------------------------------------------
/** state: { mask }. */
function maskTiles({ mask }, { w, h, small }) {
  const found = STORY.masks.find(m => m.name === mask),
    { n, block } = found,
    margin = small ? 46 : 62,
    side = Math.min(w - margin - 8, h - (small ? 60 : 96)),
    unit = side / n,
    x0 = margin + (w - margin - side) / 2,
    y0 = small ? 26 : 42,
    size = small ? 10 : 13,
    marks = [];
  let hidden = "";
  for (const { row, key, kind } of found.tiles) {
    marks.push(
      box(
        `mask-${row}-${key}`,
        x0 + key * block * unit,
        y0 + row * block * unit,
        block * unit - 2,
        block * unit - 2,
        { skip: "skipped", part: "p", whole: "s" }[kind],
        { round: 2 },
      ),
    );
    if (kind === "part")
      for (let i = row * block; i < (row + 1) * block; i++)
        for (let j = key * block; j < (key + 1) * block; j++)
          if (found.visible[i][j] === "0")
            hidden += `M${(x0 + (j + 0.22) * unit).toFixed(1)} ${(y0 + (i + 0.22) * unit).toFixed(1)}l${(0.5 * unit).toFixed(1)} ${(0.5 * unit).toFixed(1)}`;
  }
  marks.push(
    path("mask-hidden", hidden, "hatch", { z: 2 }),
    words("mask-keys", x0 + side / 2, y0 - (small ? 9 : 14), `${n} keys, in tiles of ${block}`, "letter k", {
      anchor: "middle",
      size,
    }),
    words("mask-queries", x0 - 8, y0 + side / 2, "queries", "letter q", { anchor: "end", size: small ? 9 : 12 }),
  );
  const count = kind => found.tiles.filter(t => t.kind === kind).length,
    key = [
      ["s", `whole: ${count("whole")}`],
      ["p", `masked: ${count("part")}`],
      ["skipped", `skipped: ${count("skip")}`],
    ];
  key.forEach(([cls, text], i) => {
    const x = x0 + (i * side) / 3,
      y = y0 + side + (small ? 10 : 18);
    marks.push(
      box(`mask-key-${i}`, x, y, small ? 10 : 14, small ? 10 : 14, cls, { round: 2 }),
      words(`mask-count-${i}`, x + (small ? 14 : 20), y + (small ? 5.5 : 7.5), text, "strong-text", { size }),
    );
  });
  const { real } = found,
    readout = `${found.about} At ${thousands(real.n)} tokens and tiles of ${real.block}: ${Math.round(100 * real.share)} % of the work (${real.mask}).`;
  return {
    marks,
    readout,
    label: `Tiles of the mask ${mask}: ${count("whole")} whole, ${count("part")} partly masked, ${count("skip")} skipped. ${readout}`,
  };
}

// ---- chapter 11 --------------------------------------------------------------------------------------------------------------
/** One head of the case that was measured, in 16 bits. Operations per byte of HBM: the scores of standard attention make four
 *  trips; FlashAttention moves Q, K, V and O once, because K and V stay in the L2 cache between blocks of rows. */
const CASE = DATA.measured.attention.case;
const work = {
  flops: 4 * CASE.heads * CASE.len_q * CASE.len_k * CASE.dim,
  standard: 2 * CASE.heads * (4 * CASE.len_q * CASE.len_k + 4 * CASE.len_q * CASE.dim),
  flash: 2 * CASE.heads * 4 * CASE.len_q * CASE.dim,
};
const roofOf = (gpu, intensity) => Math.min(gpu.tflops.float16, (intensity * gpu.bandwidth) / 1000);
const RATE = { low: 0.1, high: 2000 };
const rateScale = v => Math.log10(v / RATE.low) / Math.log10(RATE.high / RATE.low);
/** state: { gpu, points }: the roofline of a GPU with both methods under it. */
function roofline({ gpu: which }, view) {
  const gpu = DATA.gpus.find(g => g.name === which) || GPU0,
    { w, h, small } = view,
    low = 1,
    high = 10000,
    ridge = (1000 * gpu.tflops.float16) / gpu.bandwidth;
  const { px, py, right, size, marks } = frame("roof", view, {
    xs: [1, 10, 100, 1000, 10000],
    ys: [0.1, 1, 10, 100, 1000],
    x: v => Math.log10(v / low) / Math.log10(high / low),
    y: rateScale,
    xName: "operations per byte of HBM",
    yName: "TFLOP/s",
    xTick: thousands,
    yTick: thousands,
  });
  marks.push(
    path("roof", `M${px(low)} ${py(roofOf(gpu, low))}L${px(ridge)} ${py(gpu.tflops.float16)}H${w - right}`, "curve"),
    words(
      "roof-peak",
      w - right,
      py(gpu.tflops.float16) - (small ? 16 : 20),
      `${gpu.name}: ${gpu.tflops.float16} TFLOP/s`,
      "strong-text",
      { anchor: "end", size },
    ),
    words("roof-slope", px(3) + 12, py(roofOf(gpu, 3)) + 6, `${gpu.bandwidth} GB/s`, "strong-text", { size }),
  );
  for (const [name, text] of [
    ["standard", "standard"],
    ["flash", "FlashAttention"],
  ]) {
    const intensity = work.flops / work[name],
      most = roofOf(gpu, intensity);
    marks.push(
      path(`roof-guide-${name}`, `M${px(intensity)} ${py(most)}V${py(RATE.low)}`, "guide"),
      box(`roof-${name}`, px(intensity) - 7, py(most) - 7, 14, 14, "dot", { round: name === "flash" ? 7 : 0, z: 3 }),
      words(
        `roof-${name}-name`,
        name === "flash" ? w - right : px(intensity) + 12,
        py(most) + (name === "flash" ? 24 : 12),
        `${text}: ${small ? "≤" : "at most"} ${Math.round(most)}`,
        "strong-text over-lines",
        { anchor: name === "flash" ? "end" : "start", size, z: 3 },
      ),
    );
  }
  const floor = name => Math.max(work[name] / (gpu.bandwidth * 1e9), work.flops / (gpu.tflops.float16 * 1e12)),
    readout = `At best, ${CASE.heads} heads of ${thousands(CASE.len_q)} tokens: standard ${duration(floor("standard"))}, FlashAttention ${duration(floor("flash"))}.`;
  return { marks, readout, label: `Roofline of ${gpu.name}. ${readout}` };
}
const RUNGS = {
  "01": "standard",
  "02": "shared-memory tiles",
  "03": "fused, 16 rows",
  "04": "bigger tiles",
  "05": "queries outside",
  "06": "matrix units",
  "07": "swizzle",
  "08": "cp.async",
  "09": "P in registers",
  10: "TMA and wgmma",
  11: "warp specialised",
  12: "ping-pong",
  13: "overlap",
};
/** The ladder: measured speed of each rung, under the ceilings of the GPU it was measured on. */
function ladder(_, { w, h, small }) {
  const rungs = DATA.measured.ladder.rungs.filter(r => r.tflops && /^\d/.test(r.number)),
    gpu = GPU0,
    size = small ? 10 : 13,
    left = small ? 128 : 176,
    right = small ? 32 : 48, // the numbers stand there
    top = small ? 30 : 44,
    bottom = small ? 30 : 46,
    tall = (h - top - bottom) / rungs.length,
    px = v => left + rateScale(v) * (w - left - right);
  const marks = [
    words(
      "rate-name",
      (left + w - right) / 2,
      h - (small ? 6 : 10),
      "TFLOP/s, measured",
      "soft",
      { anchor: "middle", size },
    ),
  ];
  for (const value of [0.1, 1, 10, 100, 1000])
    marks.push(
      path(`rate-line-${value}`, `M${px(value)} ${top}V${h - bottom}`, "gridline", { z: 0 }),
      words(`rate-${value}`, px(value), h - bottom + (small ? 10 : 14), thousands(value), "tick", {
        anchor: "middle",
        size: small ? 9.5 : 12,
      }),
    );
  rungs.forEach((rung, i) => {
    const y = top + i * tall;
    marks.push(
      words(
        `rung-${rung.number}-name`,
        left - 7,
        y + tall / 2,
        `${rung.number} ${RUNGS[rung.number]}`,
        "",
        { anchor: "end", size },
      ),
      box(`rung-${rung.number}`, left, y + tall * 0.17, px(rung.tflops) - left, tall * 0.66, "rung", {
        round: 1,
        title: `${rung.number} ${rung.title}: ${num(rung.tflops, 3)} TFLOP/s`,
        enter: { w: 0, o: 1 },
      }),
      words(`rung-${rung.number}-rate`, w - 2, y + tall / 2, num(rung.tflops, rung.tflops < 1 ? 1 : rung.tflops < 10 ? 2 : 3), "strong-text", {
        anchor: "end",
        size: small ? 9.5 : 12,
      }),
    );
  });
  for (const [key, value, text, line] of [
    ["scalar", gpu.tflops.float32, "32-bit units", 0],
    ["matrix", gpu.tflops.float16, "matrix units", 1],
  ])
    marks.push(
      path(`ceiling-${key}`, `M${px(value)} ${top - 4}V${h - bottom}`, "standard-line", { z: 0 }),
      words(
        `ceiling-${key}-name`,
        Math.min(px(value) + (line ? 0 : 30), w - 2),
        line ? top - (small ? 10 : 13) : top - (small ? 22 : 31),
        `${text}: ${value}`,
        "strong-text",
        { anchor: "end", size },
      ),
    );
  const third = rungs.find(r => r.number === "03"),
    second = rungs.find(r => r.number === "02"),
    last = rungs.at(-1);
  const readout = `${DATA.measured.device}, ${CASE.heads} heads, ${thousands(CASE.len_q)} tokens, d = ${CASE.dim}: from ${num(rungs[0].tflops, 2)} to ${num(last.tflops, 3)} TFLOP/s.`;
  return {
    marks,
    readout,
    label: `Measured speed of the ladder's kernels. ${readout} Rung 03 reaches ${num(third.tflops, 2)}, rung 02 ${num(second.tflops, 2)}.`,
  };
}
