"use strict";
// The last chapter: what a run costs in bytes and, where the sizes are those of a real problem, in time.
const FLOWS = {
  begin: ["Q tile", "down", null],
  load: ["K and V tile", "down", null],
  scores: [null, null, "Q and K, down to the matrix units ↓"],
  max: [null, null, "m and α: in registers, nothing moves"],
  rescale: [null, null, "l and o times α: in registers, nothing moves"],
  add: [null, null, "V, down to the matrix units ↓"],
  store: ["O and LSE", "up", "o / l ↑"],
  skip: ["nothing: the tile is skipped", null, null],
};
const LARGE = 512; // tokens from which on a time means anything
function meter(name, parts, of, caption, { ceiling, measured } = {}) {
  const share = value => `${Math.min(100, (100 * value) / of)}%`;
  const track = el(
    "div",
    { class: "track" },
    ...parts.map(([style, value]) =>
      el("i", { class: style, style: `width:${share(value)}${value > 0 ? ";min-width:3px" : ""}` }),
    ),
    ceiling ? el("i", { class: "ceiling", style: `left:0;width:${share(ceiling)}` }) : null,
    measured ? el("i", { class: "measured", style: `left:0;width:${share(measured)}` }) : null,
  );
  return el("div", { class: "meter" }, el("span", {}, name), track, el("div", { class: "text" }, caption));
}
const totalOf = sums => sums.hbm_read + sums.hbm_written;

function drawLanes(trace, moment, sums, gpu) {
  const now = { flash: sums.flash[moment.index], standard: sums.standard[moment.index] },
    end = { flash: sums.flash.at(-1), standard: sums.standard.at(-1) };
  const most = Math.max(totalOf(end.flash), totalOf(end.standard)),
    names = { standard: "standard", flash: "flash" };
  const hbm = ["standard", "flash"].map(who =>
    meter(
      names[who],
      [
        ["read", now[who].hbm_read],
        ["written", now[who].hbm_written],
      ],
      most,
      `${bytes(now[who].hbm_read)} read + ${bytes(now[who].hbm_written)} written; in the end ${bytes(totalOf(end[who]))}`,
      { ceiling: totalOf(end[who]) },
    ),
  );
  const h = held(trace),
    shared = h.q + h.k + h.v,
    registers = h.s + h.o + h.stats,
    kind = moment.kind,
    flow = FLOWS[kind] || [null, null, null];
  const busy = moment.step && moment.step.kind !== "store",
    loaded = moment.tile && busy,
    active = kind === "scores" || kind === "max" || kind === "rescale" || kind === "add";
  const room = (used, capacity) =>
    used > capacity * 1024
      ? el("span", { class: "overflow" }, `does not fit: ${bytes(used)} of ${capacity} KiB`)
      : el("span", {}, `${bytes(used)} of ${capacity} KiB per multiprocessor`);
  const key = (style, name) => [el("span", { class: `swatch held-${style}` }), name],
    ratio = totalOf(end.flash) / totalOf(end.standard),
    moves = moment.step ? moment.step.flash : moved();
  const compared =
    ratio < 1
      ? `${+(1 / ratio).toPrecision(3)} times less than`
      : ratio === 1
        ? "as much as"
        : `${+ratio.toPrecision(3)} times more than`;
  const kept = `Besides Q, K, V and O: standard keeps S, ${bytes(trace.n * trace.n * ITEMSIZE[trace.dtype])}; flash keeps one number per row, ${bytes(trace.n * (trace.dtype === "float64" ? 8 : 4))}.`;
  $("lanes").replaceChildren(
    el(
      "div",
      { class: "lane" },
      el("h4", {}, `GPU memory (${gpu.memory})`, el("span", {}, `${gpu.bandwidth} GB/s · L2 ${gpu.l2} MiB`)),
      ...hbm,
      el("div", { class: "text" }, `In the end flash moves ${compared} standard.`),
      el("div", { class: "text" }, kept),
    ),
    el(
      "div",
      { class: `flow${flow[0] && flow[1] ? " on" : ""}` },
      flow[0]
        ? `${flow[1] === "down" ? "↓ " : flow[1] === "up" ? "↑ " : ""}${flow[0]}${flow[1] ? `, ${bytes(moves.hbm_read + moves.hbm_written)}` : ""}`
        : "no traffic with GPU memory in this step",
    ),
    el(
      "div",
      { class: "lane" },
      el("h4", {}, "Shared memory", room(shared, gpu.shared)),
      meter(
        "holds",
        [
          ["held-q", busy ? h.q : 0],
          ["held-k", loaded ? h.k : 0],
          ["held-v", loaded ? h.v : 0],
        ],
        gpu.shared * 1024,
        "",
      ),
      el("div", { class: "text" }, ...key("q", "Q"), ...key("k", "K"), ...key("v", "V")),
    ),
    el("div", { class: `flow${flow[2] ? " on" : ""}` }, flow[2] || " "),
    el(
      "div",
      { class: "lane" },
      el("h4", {}, "Registers", room(registers, gpu.registers)),
      meter(
        "holds",
        [
          ["held-s", active ? h.s : 0],
          ["held-o", busy ? h.o + h.stats : 0],
        ],
        gpu.registers * 1024,
        "",
      ),
      el("div", { class: "text" }, ...key("s", "S, then P"), ...key("o", "o, m, l")),
    ),
  );
}

/** What was measured of just this problem, if it was: { flash, standard } in seconds. */
function measuredFor(trace, gpu) {
  const { case: known, flash, standard } = DATA.measured.attention;
  const same =
    DATA.measured.device.endsWith(gpu.name) &&
    trace.n === known.len_q &&
    trace.d === known.dim &&
    trace.mask === known.mask &&
    trace.dtype === known.dtype;
  return same ? { flash: flash.ms / 1e3, standard: standard.ms / 1e3 } : null;
}
function drawRoof(trace, moment, sums, gpu) {
  if (trace.n < LARGE) {
    $("roof").replaceChildren();
    $("times").replaceChildren(
      el(
        "p",
        { class: "soft" },
        `A GPU needs microseconds to start anything, so ${trace.n} tokens say nothing about speed. Choose an example with ${thousands(LARGE)} tokens or more.`,
      ),
    );
    return;
  }
  const heads = CASE.heads,
    width = widthOf("roof"),
    height = Math.min(Math.max(0.5 * width, 210), 300),
    left = 44,
    right = 8,
    top = 14,
    bottom = 32,
    lows = [-1, -1],
    spans = [5, 5];
  const peak = gpu.tflops[trace.dtype] || gpu.tflops.float32,
    bandwidth = gpu.bandwidth / 1000;
  const x = v => left + ((Math.log10(v) - lows[0]) / spans[0]) * (width - left - right),
    y = v => height - bottom - ((Math.log10(v) - lows[1]) / spans[1]) * (height - top - bottom);
  const total = who => totalOf(sums[who].at(-1)),
    flops = who => sums.flops[who].at(-1),
    limit = who => modelled(heads * total(who), heads * flops(who), gpu, trace.dtype),
    real = measuredFor(trace, gpu);
  const model = { flash: limit("flash"), standard: limit("standard") },
    ratio = model.standard.seconds / model.flash.seconds,
    faster = ratio >= 1 ? `${+ratio.toPrecision(2)} times faster` : `${+(1 / ratio).toPrecision(2)} times slower`;
  const root = svg(
    width,
    height,
    `Roofline of ${gpu.name}: ridge at ${+(peak / bandwidth).toPrecision(3)} operations per byte. In this model flash is ${faster} than standard.`,
  );
  for (let e = 0; e <= spans[0]; e++)
    root.append(
      el("svg:line", {
        class: "gridline",
        x1: x(10 ** (e + lows[0])),
        x2: x(10 ** (e + lows[0])),
        y1: top,
        y2: height - bottom,
      }),
      width < 400 && e % 2 === 0
        ? ""
        : svgText(x(10 ** (e + lows[0])), height - bottom + 13, String(10 ** (e + lows[0])), {
            "text-anchor": e === spans[0] ? "end" : "middle",
          }),
    );
  for (let e = 0; e <= spans[1]; e++)
    root.append(
      el("svg:line", {
        class: "gridline",
        x1: left,
        x2: width - right,
        y1: y(10 ** (e + lows[1])),
        y2: y(10 ** (e + lows[1])),
      }),
      e % 2 ? svgText(left - 4, y(10 ** (e + lows[1])) + 4, String(10 ** (e + lows[1])), { "text-anchor": "end" }) : "",
    );
  const ridge = peak / bandwidth;
  root.append(
    el("svg:path", {
      class: "roofline",
      d: `M${x(0.1)} ${y(0.1 * bandwidth)}L${x(ridge)} ${y(peak)}L${width - right} ${y(peak)}`,
    }),
    svgText(width - right, y(peak) - 5, `${peak} TFLOP/s`, { "text-anchor": "end", class: "strong" }),
    svgText(width / 2, height - 4, "operations per byte of GPU memory", { "text-anchor": "middle" }),
    svgText(left + 4, top + 4, "TFLOP/s"),
  );
  for (const who of ["standard", "flash"]) {
    const intensity = flops(who) / total(who),
      px = x(Math.min(Math.max(intensity, 0.1), 1e4)),
      py = y(Math.min(peak, intensity * bandwidth));
    root.append(
      el("svg:line", { class: "guide", x1: px, x2: px, y1: py, y2: height - bottom }),
      el("svg:rect", { class: "point", x: px - 7, y: py - 7, width: 14, height: 14, rx: who === "flash" ? 7 : 0 }),
      svgText(px + (who === "flash" ? 10 : -10), py + (who === "flash" ? 18 : -6), who, {
        class: "strong",
        "text-anchor": who === "flash" ? "start" : "end",
      }),
    );
  }
  $("roof").replaceChildren(root);
  const most = Math.max(model.flash.seconds, model.standard.seconds, ...(real ? Object.values(real) : []));
  const one = who =>
    meter(
      who,
      [["read", model[who].seconds]],
      most,
      `at best ${duration(model[who].seconds)}, ${model[who].bound === "memory" ? "waiting for memory" : "limited by arithmetic"}${real ? `; measured ${duration(real[who])}` : ""}`,
      { measured: real?.[who] },
    );
  const missing = gpu.tflops[trace.dtype]
    ? ""
    : ` ${gpu.name} has no matrix units for ${trace.dtype}; its float32 units are shown.`;
  const verdict = real
    ? `Measured on ${DATA.measured.device}: strobe is ${+(real.standard / real.flash).toPrecision(2)} times faster than the fastest standard attention of the same run. The model bounds both from below, for ${heads} heads.`
    : `In this model, for ${heads} heads on ${gpu.name}, flash is ${faster}. It was not measured.`;
  $("times").replaceChildren(one("standard"), one("flash"), el("p", {}, `${verdict}${missing}`));
}

/** The figures that the panels reckon with. The ridge is where a kernel stops waiting for memory. */
function gpuTable(gpus) {
  const columns = {
    GPU: g => g.name,
    multiprocessors: g => g.sms,
    "shared memory of each, KiB": g => g.shared,
    "registers of each, KiB": g => g.registers,
    "L2, MiB": g => g.l2,
    "memory, GB": g => g.capacity,
    "GB/s": g => g.bandwidth,
    "float16, TFLOP/s": g => g.tflops.float16,
    "float32, TFLOP/s": g => g.tflops.float32,
    "ridge in float16, operations per byte": g => Math.round((1000 * g.tflops.float16) / g.bandwidth),
  };
  const head = el("thead", {}, el("tr", {}, ...Object.keys(columns).map(name => el("th", { scope: "col" }, name))));
  return [
    head,
    el(
      "tbody",
      {},
      ...gpus.map(g =>
        el(
          "tr",
          {},
          ...Object.values(columns).map((value, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, String(value(g)))),
        ),
      ),
    ),
  ];
}
