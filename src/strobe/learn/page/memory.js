"use strict";
// Chapters 2 and 3: how large the scores are, and how often they travel.

const GPU0 = DATA.gpus[0],
  MIB = 2 ** 20;
/** What lies on the chip, in MiB: registers and shared memory in pieces, one for each multiprocessor; the L2 cache once. */
const ON_CHIP = [
  ["registers", (GPU0.sms * GPU0.registers) / 1024],
  ["shared memory", (GPU0.sms * GPU0.shared) / 1024],
  ["L2 cache", GPU0.l2],
];
const chipMiB = ON_CHIP.reduce((sum, [, size]) => sum + size, 0);
const HEADS = 16; // of a layer
const scoresMiB = n => (4 * n * n) / MIB;

// ---- chapter 2: squares and a bar, to scale -------------------------------------------------------------------------------
/** state: { upTo }: "words" (6 in 60), "head" or "heads" (the scores of one, or of all, beside the chip). */
function squares({ upTo }, { w, h, small }) {
  return upTo === "words" ? sixInSixty(w, h, small) : toScale(upTo, w, h, small);
}
function sixInSixty(w, h, small) {
  const side = Math.min(w - 30, h - 70),
    x = (w - side) / 2,
    y = (h - side) / 2 - 10,
    unit = side / 60,
    size = small ? 12 : 15;
  let lines = "";
  for (let i = 0; i <= 60; i++) lines += `M${x + i * unit} ${y}v${side}M${x} ${y + i * unit}h${side}`;
  const marks = [
    box("sixty", x, y, side, side, "p", { z: 0, round: 0 }),
    path("sixty-lines", lines, "hairline", { z: 1 }),
    box("six", x, y, 6 * unit, 6 * unit, "s", { z: 2, round: 0 }),
    words("six-name", x + 6 * unit + 8, y + 3 * unit, "6 × 6 = 36 scores", "strong-text", { size }),
    words("sixty-name", x + side / 2, y + side + 24, "60 × 60 = 3,600 scores", "strong-text", {
      anchor: "middle",
      size,
    }),
  ];
  return {
    marks,
    readout: "Ten times as many words, a hundred times as many scores.",
    label: "The square of 36 scores of six words in the corner of the square of 3,600 scores of sixty words.",
  };
}
function toScale(upTo, w, h, small) {
  const bar = small ? 46 : 70,
    size = small ? 10 : 13,
    area = { w: w - 12, h: h - bar - (small ? 34 : 50) },
    chipSide = Math.sqrt(chipMiB),
    scoreSide = Math.sqrt(scoresMiB(4096)),
    gap = small ? 10 : 18;
  const unit = Math.min((area.w - gap) / (chipSide + scoreSide), area.h / chipSide), // pixels to the root of a MiB
    y = area.h + (small ? 22 : 34),
    left = 6 + (area.w - gap - (chipSide + scoreSide) * unit) / 2,
    x = left + chipSide * unit + gap,
    far = upTo === "heads",
    marks = [];
  marks.push(
    words("chip-name", left, y - chipSide * unit - (small ? 9 : 13), `${GPU0.name}: ${chipMiB.toFixed(0)} MiB on the chip`, "strong-text", {
      size,
      z: 3,
    }),
  );
  let top = y;
  for (const [name, mib] of ON_CHIP) {
    const tall = (mib / chipSide) * unit;
    top -= tall;
    marks.push(
      box(`chip-${name}`, left, top, chipSide * unit, tall, "chip solid", { z: 2, round: 0 }),
      words(
        `chip-${name}-name`,
        left + 8,
        top + tall / 2,
        `${name}: ${mib.toFixed(0)} MiB`,
        "strong-text",
        { size, z: 3 },
      ),
    );
  }
  const square = (key, side, cls, z) =>
    box(key, x, y - side * unit, side * unit, side * unit, cls, { z, round: 0, enter: { x, y, w: 0, h: 0 } });
  if (far)
    marks.push(
      square("square-heads", Math.sqrt(HEADS * scoresMiB(4096)), "p", 0),
      words(
        "square-heads-name",
        w - 6,
        y - scoreSide * unit - (small ? 24 : 34),
        `${HEADS} heads:`,
        "strong-text",
        { anchor: "end", size, z: 3 },
      ),
      words(
        "square-heads-size",
        w - 6,
        y - scoreSide * unit - (small ? 11 : 15),
        `${bytes(HEADS * scoresMiB(4096) * MIB)} →`,
        "strong-text",
        { anchor: "end", size, z: 3 },
      ),
    );
  marks.push(
    square("square-4096", scoreSide, "s", 1),
    words(
      "square-4096-name",
      x + 8,
      y - scoreSide * unit + (small ? 13 : 18),
      "scores, one head,",
      "strong-text",
      { size, z: 3 },
    ),
    words(
      "square-4096-size",
      x + 8,
      y - scoreSide * unit + (small ? 26 : 36),
      `4,096 tokens: ${scoresMiB(4096)} MiB`,
      "strong-text",
      { size, z: 3 },
    ),
    square("square-1024", Math.sqrt(scoresMiB(1024)), "s lit", 2),
    words(
      "square-1024-name",
      x + Math.sqrt(scoresMiB(1024)) * unit + 6,
      y - (Math.sqrt(scoresMiB(1024)) * unit) / 2,
      `1,024: ${scoresMiB(1024)} MiB`,
      "strong-text",
      { size, z: 3 },
    ),
  );
  // the same on a linear axis
  const axis = h - bar + (small ? 22 : 30),
    perMiB = (w - 16) / (chipMiB + 20),
    thick = small ? 9 : 13,
    heads = far ? HEADS : 1;
  marks.push(
    box("bar-scores", 6, axis, Math.min(heads * scoresMiB(4096) * perMiB, 4 * w), thick, "s", { z: 1, round: 0 }),
    box("bar-chip", 6, axis + thick + 3, chipMiB * perMiB, thick, "chip solid", { z: 1, round: 0 }),
    words(
      "bar-name",
      6,
      axis - 9,
      `on a linear axis: scores of ${heads === 1 ? "one head" : `${HEADS} heads`}, ${bytes(heads * scoresMiB(4096) * MIB)}; the chip, ${chipMiB.toFixed(0)} MiB`,
      "soft",
      { size },
    ),
  );
  const wider = (HEADS * scoresMiB(4096) * perMiB) / w;
  const readout = far
    ? `The bar of ${HEADS} heads would be ${wider.toFixed(0)} times as wide as this figure.`
    : "Scores in 32-bit numbers; areas to scale.";
  return {
    marks,
    readout,
    label: `Squares to scale: all memory on the chip, the scores of one head${far ? ` and of ${HEADS} heads` : ""} at 4,096 tokens. ${readout}`,
  };
}

// ---- chapter 3: four trips -------------------------------------------------------------------------------------------------
const REAL = { n: 4096, d: 64, heads: HEADS, size: 2 }; // what the counter counts: the heads of a layer in 16 bits
const tripBytes = REAL.heads * REAL.n ** 2 * REAL.size;
const trip = { bytes: tripBytes, seconds: t => (t * tripBytes) / (GPU0.bandwidth * 1e9) };
const arithmeticSeconds = (4 * REAL.heads * REAL.n ** 2 * REAL.d) / (GPU0.tflops.float16 * 1e12);

/** state: { kernel: 0 … 4 }: nothing yet, the three kernels, the account. */
function trips({ kernel }, view) {
  const { w, h, small } = view,
    { n, d } = STORY;
  const mini = Math.min((w - (small ? 60 : 120)) / 28, small ? 10 : 18),
    accountHeight = small ? 50 : 84,
    inner = { ...view, h: h - accountHeight };
  const { chip, hbm, label, between, marks } = memories(inner, Math.max(n * mini + (small ? 40 : 70), inner.h * 0.46), {
    chip: "on the chip: where the arithmetic is",
    hbm: `HBM: ${GPU0.capacity} GB, ${GPU0.bandwidth / 1000} TB per second`,
  });
  const size = small ? 11 : 15,
    made = { s: kernel >= 1, p: kernel >= 2, o: kernel >= 3 };
  const shape = { q: d, k: d, v: d, s: n, p: n, o: d },
    order = ["q", "k", "v", "s", "p", "o"];
  const total = order.reduce((sum, name) => sum + shape[name], 0) * mini,
    space = (hbm.w - 20 - total) / 5;
  let x = hbm.x + 10;
  const place = {};
  for (const name of order) {
    place[name] = { x, y: hbm.y + label + (hbm.h - label - n * mini) / 2 + (small ? 4 : 8) };
    x += shape[name] * mini + Math.min(space, 34);
  }
  const shift = (hbm.x + hbm.w - 10 - (x - Math.min(space, 34))) / 2;
  for (const name of order) place[name].x += shift;
  const blank = columns => zeros(n, columns);
  const uses = [[], ["q", "k"], ["s"], ["p", "v"], []][kernel],
    gives = [null, "s", "p", "o", null][kernel];
  const spots = [...uses, gives].filter(Boolean),
    chipCell = mini * (small ? 1.15 : 1.25),
    wide = spots.reduce((sum, name) => sum + shape[name] * chipCell, 0) + (spots.length - 1) * (small ? 20 : 38);
  let at = chip.x + (chip.w - wide) / 2;
  const cy = chip.y + label + (chip.h - label - n * chipCell) / 2 - (small ? 2 : 6),
    onChip = {};
  for (const name of spots) {
    onChip[name] = { x: at, y: cy };
    at += shape[name] * chipCell + (small ? 20 : 38);
  }
  for (const name of order) {
    const there = place[name],
      exists = !(name in made) || made[name];
    const enter =
      name === gives && onChip[name] ? { x: onChip[name].x, y: onChip[name].y, w: chipCell - 1, h: chipCell - 1 } : {};
    marks.push(
      ...grid(`h${name}`, blank(shape[name]), there.x, there.y, mini, exists ? name : "slot", {
        numbers: false,
        title: undefined,
        enter: () => enter,
      }),
    );
    marks.push(
      words(
        `h${name}-name`,
        there.x + (shape[name] * mini) / 2,
        there.y - (small ? 6 : 9),
        name.toUpperCase(),
        `letter ${exists ? name : "soft"}`,
        { anchor: "middle", size },
      ),
    );
  }
  spots.forEach((name, i) => {
    const there = onChip[name],
      source = place[name];
    marks.push(
      ...grid(`c${name}`, blank(shape[name]), there.x, there.y, chipCell, name, {
        numbers: false,
        title: undefined,
        enter: () => (name === gives ? {} : { x: source.x, y: source.y, w: mini - 1, h: mini - 1 }),
      }),
    );
    marks.push(
      words(
        `c${name}-name`,
        there.x + (shape[name] * chipCell) / 2,
        there.y + n * chipCell + (small ? 9 : 14),
        name.toUpperCase(),
        `letter ${name}`,
        { anchor: "middle", size },
      ),
    );
    if (i)
      marks.push(
        words(
          `c-op-${i}`,
          there.x - (small ? 10 : 19),
          there.y + (n * chipCell) / 2,
          name === gives ? "→" : "·",
          "soft",
          { anchor: "middle", size: size + 4 },
        ),
      );
  });
  if (kernel >= 1 && kernel <= 3)
    marks.push(
      words("kernel-name", chip.x + chip.w - 10, chip.y + label - 3, `kernel ${kernel} of 3`, "soft", {
        anchor: "end",
        size: small ? 10 : 13,
      }),
    );
  const travel = (key, name, up, text) => {
    const px = place[name].x + (shape[name] * mini) / 2;
    const ends = up ? [between.bottom + 2, between.top - 3] : [between.top - 3, between.bottom + 2];
    marks.push(
      arrow(key, px, ends[0], px, ends[1], "strong"),
      words(`${key}-name`, px + 8, (between.top + between.bottom) / 2, text, "strong-text", { size: small ? 10 : 13 }),
    );
  };
  if (kernel === 1) travel("trip-1", "s", false, "trip 1");
  if (kernel === 2) {
    travel("trip-2", "s", true, "trip 2");
    travel("trip-3", "p", false, "trip 3");
  }
  if (kernel === 3) travel("trip-4", "p", true, "trip 4");
  marks.push(...account(kernel, w, h, accountHeight, small));
  const done = [0, 1, 3, 4, 4][kernel];
  const readout = done
    ? `${done} of 4 trips: ${gigabytes(done * trip.bytes)} at ${thousands(REAL.n)} tokens, ${REAL.heads} heads of ${REAL.d}, 16 bits.`
    : `In the time of one byte from HBM an ${GPU0.name} can do ${Math.round((GPU0.tflops.float16 * 1000) / GPU0.bandwidth)} operations.`;
  return { marks, readout, label: `HBM below, the chip above. ${readout}` };
}
const gigabytes = b => `${(b / 1e9).toFixed(1)} GB`;
/** Time: what the trips take, what the arithmetic takes. */
function account(kernel, w, h, height, small) {
  const done = [0, 1, 3, 4, 4][kernel],
    left = small ? 66 : 104,
    wide = (w - left - (small ? 60 : 84)) / 4,
    y = h - height + (small ? 12 : 20),
    thick = small ? 13 : 18,
    size = small ? 10 : 13,
    marks = [];
  const all = trip.seconds(4),
    x = t => left + (4 * wide * t) / all;
  marks.push(words("account-trips", left - 8, y + thick / 2, "trips", "soft", { anchor: "end", size }));
  for (let i = 0; i < 4; i++)
    marks.push(box(`trip-box-${i}`, left + i * wide, y, wide - 2, thick, i < done ? "moved" : "slot", { round: 2 }));
  marks.push(
    words("account-time", left + 4 * wide + 6, y + thick / 2, done ? duration(trip.seconds(done)) : "", "strong-text", {
      size,
    }),
  );
  if (kernel === 4)
    marks.push(
      words("account-sums", left - 8, y + 1.5 * thick + 8, "arithmetic", "soft", { anchor: "end", size }),
      box("sums-box", left, y + thick + 8, Math.max(3, x(arithmeticSeconds) - left), thick, "busy", { round: 2 }),
      box("idle-box", x(arithmeticSeconds), y + thick + 8, x(all) - x(arithmeticSeconds) - 2, thick, "slot", {
        round: 2,
      }),
      words("sums-time", left + 4 * wide + 6, y + 1.5 * thick + 8, duration(arithmeticSeconds), "strong-text", {
        size,
      }),
      words("idle-name", (x(arithmeticSeconds) + x(all)) / 2, y + 1.5 * thick + 8, "idle", "soft", {
        anchor: "middle",
        size,
      }),
    );
  return marks;
}
