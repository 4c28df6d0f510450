"use strict";
// The algorithm again, for what the reader changes. No element of the page is touched here. `recompute` returns what `strobe.trace`
// returns, except that rows are computed when asked for; a test compares the two.

const ITEMSIZE = { float64: 8, float32: 4, float16: 2, bfloat16: 2 };
const LARGEST = {
  float64: Number.MAX_VALUE,
  float32: 3.4028234663852886e38,
  float16: 65504,
  bfloat16: 3.3895313892515355e38,
};

// ---- rounding --------------------------------------------------------------------------------------------------------
function halfEven(x) {
  const floor = Math.floor(x),
    rest = x - floor;
  return rest > 0.5 || (rest === 0.5 && floor % 2 !== 0) ? floor + 1 : floor;
}
function roundBits(x, fraction, smallest, largest) {
  if (x === 0 || !Number.isFinite(x)) return x;
  let exponent = Math.floor(Math.log2(Math.abs(x)));
  if (2 ** exponent > Math.abs(x)) exponent -= 1;
  else if (2 ** (exponent + 1) <= Math.abs(x)) exponent += 1;
  const ulp = 2 ** (Math.max(exponent, smallest) - fraction),
    rounded = halfEven(x / ulp) * ulp;
  return Math.abs(rounded) > largest ? Math.sign(x) * Infinity : rounded;
}
const ROUND = {
  float64: x => x,
  float32: Math.fround,
  float16: x => roundBits(Math.fround(x), 10, -14, LARGEST.float16),
  bfloat16: x => roundBits(Math.fround(x), 7, -126, LARGEST.bfloat16),
};

// ---- inputs ----------------------------------------------------------------------------------------------------------
function hashed(index, stream) {
  let h = (Math.imul(index + 1, 0x9e3779b1) + Math.imul(stream, 0x7f4a7c15)) >>> 0;
  h = Math.imul(h ^ (h >>> 15), 0x85ebca6b) >>> 0;
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35) >>> 0;
  return ((h >>> 16) & 0xff) / 64 - 2;
}
const matrix = (rows, columns, value) =>
  Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => value(i, j)));
const sample = (n, d, seed = 0) => [0, 1, 2].map(which => matrix(n, d, (i, j) => hashed(i * d + j, 3 * seed + which)));

// ---- masks: row i sees lo(i) <= key < hi(i) ------------------------------------------------------------------------------
function maskOf(kind, n, left, right) {
  const clip = x => Math.min(Math.max(x, 0), n);
  if (kind === "causal") return { name: "causal", open: false, lo: () => 0, hi: i => clip(i + 1) };
  if (kind === "window")
    return { name: `window(${left}, ${right})`, open: false, lo: i => clip(i - left), hi: i => clip(i + right + 1) };
  return { name: "full", open: true, lo: () => 0, hi: () => n };
}
/** The tiles a block of rows visits: Map from tile to { keys: [first, end], masked }. */
function visitedTiles(mask, rows, blockK) {
  const [start, stop] = rows,
    low = mask.lo(start),
    high = mask.hi(stop - 1),
    lowLast = mask.lo(stop - 1),
    highFirst = mask.hi(start);
  const first = Math.floor(low / blockK),
    end = Math.max(first, Math.ceil(high / blockK));
  const firstFull = Math.min(Math.max(Math.ceil(lowLast / blockK), first), end);
  const endFull = Math.min(Math.max(Math.floor(highFirst / blockK), firstFull), end);
  const found = new Map();
  for (let t = first; t < end; t++) {
    const keys = [Math.max(t * blockK, low), Math.min((t + 1) * blockK, high)];
    if (keys[1] > keys[0]) found.set(t, { keys, masked: !(mask.open || (firstFull <= t && t < endFull)) });
  }
  return found;
}

// ---- steps and what they move --------------------------------------------------------------------------------------------
const moved = (hbm_read = 0, hbm_written = 0, shared_read = 0, shared_written = 0) => ({
  hbm_read,
  hbm_written,
  shared_read,
  shared_written,
});
function stepsOf({ n, d, blockQ, blockK, dtype }, mask) {
  const size = ITEMSIZE[dtype],
    wide = dtype === "float64" ? 8 : 4,
    steps = [];
  const push = (kind, block, tile, rows, keys, masked, flash = moved(), standard = moved()) =>
    steps.push({ kind, block, tile, rows, keys, masked, flash, standard });
  for (let start = 0, block = 0; start < n; start += blockQ, block++) {
    const rows = [start, Math.min(start + blockQ, n)],
      count = rows[1] - rows[0],
      q = count * d * size,
      visited = visitedTiles(mask, rows, blockK);
    push("begin", block, null, rows, null, false, moved(q, 0, 0, q), moved(q));
    for (let first = 0, tile = 0; first < n; first += blockK, tile++) {
      const every = [first, Math.min(first + blockK, n)],
        width = every[1] - every[0];
      const once = block === 0 ? width * 2 * d * size : 0,
        scores = count * width * size;
      if (!visited.has(tile)) {
        push("skip", block, tile, rows, every, true, moved(), moved(2 * scores + once, 2 * scores));
        continue;
      }
      const { keys, masked } = visited.get(tile),
        k = (keys[1] - keys[0]) * d * size;
      push("load", block, tile, rows, keys, masked, moved(2 * k, 0, 0, 2 * k), moved(once));
      push("scores", block, tile, rows, keys, masked, moved(0, 0, q + k), moved(0, scores));
      push("max", block, tile, rows, keys, masked, moved(), moved(scores));
      push("rescale", block, tile, rows, keys, masked);
      push("add", block, tile, rows, keys, masked, moved(0, 0, k), moved(scores, scores));
    }
    push("store", block, null, rows, null, false, moved(0, q + count * wide), moved(0, q));
  }
  return steps;
}

// ---- one row -------------------------------------------------------------------------------------------------------------
/** The tiles a row meets. `broken`: null, "rescale" (alpha is taken for 1) or "max" (nothing is subtracted before exp; P then has to
 *  fit the type in which the matrix units take it, and l into 32 bits). -Infinity is null, as in JSON. */
function rowOf(index, { q, k, v, scale, blockQ, blockK, dtype, broken }, mask) {
  const start = Math.floor(index / blockQ) * blockQ,
    rows = [start, Math.min(start + blockQ, q.length)];
  const narrow = ROUND[dtype],
    wide = dtype === "float64" ? ROUND.float64 : ROUND.float32;
  let m = -Infinity,
    l = 0,
    o = new Array(v[0].length).fill(0);
  const found = [],
    known = x => (x === -Infinity ? null : x);
  for (const [tile, { keys }] of visitedTiles(mask, rows, blockK)) {
    const s = [];
    for (let j = keys[0]; j < keys[1]; j++) {
      let dot = 0;
      for (let c = 0; c < q[index].length; c++) dot += q[index][c] * k[j][c];
      s.push(mask.lo(index) <= j && j < mask.hi(index) ? dot * scale : -Infinity);
    }
    const mNew = broken === "max" ? 0 : s.reduce((a, b) => Math.max(a, b), m);
    const exact = broken === "max" ? 1 : m === mNew ? 1 : Math.exp(m - mNew),
      alpha = broken === "rescale" ? 1 : exact;
    const p = s.map(x => (x === -Infinity ? 0 : broken === "max" ? narrow(wide(Math.exp(x))) : Math.exp(x - mNew)));
    l = alpha * l + p.reduce((a, b) => a + b, 0);
    o = o.map((x, c) => alpha * x + p.reduce((sum, weight, j) => sum + weight * v[keys[0] + j][c], 0));
    if (broken === "max") {
      l = wide(l);
      o = o.map(wide);
    }
    found.push({
      tile,
      keys,
      s: s.map(known),
      m_old: broken === "max" ? 0 : known(m),
      m_new: known(mNew),
      alpha,
      should: exact,
      p,
      l,
      o,
    });
    m = mNew;
  }
  const lse = broken === "max" ? Math.log(l) : m + Math.log(l);
  return { tiles: found, out: l === 0 ? o : o.map(x => x / l), lse: known(lse) };
}

/** { n, d, blockQ, blockK, dtype, mask, left, right, q, k, v, broken } -> the trace. */
function recompute(wanted) {
  const round = rows => rows.map(row => row.map(ROUND[wanted.dtype])),
    { n, d, dtype } = wanted;
  const own = {
    ...wanted,
    scale: 1 / Math.sqrt(d),
    blockQ: Math.min(wanted.blockQ, n),
    blockK: Math.min(wanted.blockK, n),
    q: round(wanted.q),
    k: round(wanted.k),
    v: round(wanted.v),
  };
  const mask = maskOf(wanted.mask, n, wanted.left, wanted.right),
    rows = new Map();
  const row = i => {
    if (!rows.has(i)) rows.set(i, rowOf(i, own, mask));
    return rows.get(i);
  };
  return {
    n,
    n_keys: n,
    d,
    d_v: d,
    block_q: own.blockQ,
    block_k: own.blockK,
    dtype,
    mask: mask.name,
    scale: own.scale,
    steps: stepsOf(own, mask),
    row,
    from: "page",
  };
}
/** A trace recorded by the library (full or causal), in the form of `recompute`. */
function recorded(trace) {
  const mask = trace.mask === "causal" ? maskOf("causal", trace.n) : maskOf("full", trace.n);
  const steps = stepsOf(
    { n: trace.n, d: trace.d, blockQ: trace.block_q, blockK: trace.block_k, dtype: trace.dtype },
    mask,
  );
  return {
    ...trace,
    steps,
    row: i => ({ tiles: trace.rows[i], out: trace.out[i], lse: trace.lse[i] }),
    from: "library",
  };
}

// ---- what it costs -------------------------------------------------------------------------------------------------------
/** Bytes up to and including each step: arrays as long as the steps plus one. */
function runningBytes(trace, cached) {
  const names = ["hbm_read", "hbm_written", "shared_read", "shared_written"],
    sums = { flash: [moved()], standard: [moved()], flops: { flash: [0], standard: [0] } };
  const size = ITEMSIZE[trace.dtype],
    seen = new Set();
  for (const step of trace.steps) {
    for (const who of ["flash", "standard"]) {
      const before = sums[who][sums[who].length - 1],
        now = {};
      for (const name of names) now[name] = before[name] + step[who][name];
      sums[who].push(now);
    }
    if (step.kind === "load" && cached) {
      // K and V come from HBM only the first time
      const now = sums.flash[sums.flash.length - 1];
      for (let j = step.keys[0]; j < step.keys[1]; j++) {
        if (seen.has(j)) now.hbm_read -= 2 * trace.d * size;
        seen.add(j);
      }
    }
    const rows = step.rows[1] - step.rows[0],
      flops = { flash: sums.flops.flash.at(-1), standard: sums.flops.standard.at(-1) };
    if (step.tile !== null) {
      const first = step.tile * trace.block_k,
        width = Math.min(first + trace.block_k, trace.n) - first,
        half = 2 * rows * trace.d;
      if (step.kind === "skip") flops.standard += 2 * half * width;
      if (step.kind === "scores" || step.kind === "add") {
        flops.flash += half * (step.keys[1] - step.keys[0]);
        flops.standard += half * width;
      }
    }
    sums.flops.flash.push(flops.flash);
    sums.flops.standard.push(flops.standard);
  }
  return sums;
}
/** Bytes a block of threads holds while it works on a tile. */
function held(trace) {
  const size = ITEMSIZE[trace.dtype],
    wide = trace.dtype === "float64" ? 8 : 4,
    { block_q: br, block_k: bc, d } = trace;
  return {
    q: br * d * size,
    k: bc * d * size,
    v: bc * d * size,
    s: br * bc * wide,
    o: br * d * wide,
    stats: 2 * br * wide,
  };
}
/** Seconds on the roofline of a GPU, and which roof it is. */
function modelled(bytes, flops, gpu, dtype) {
  const memory = bytes / (gpu.bandwidth * 1e9),
    compute = flops / ((gpu.tflops[dtype] || gpu.tflops.float32) * 1e12);
  return { seconds: Math.max(memory, compute), memory, compute, bound: memory > compute ? "memory" : "arithmetic" };
}
