"use strict";
// Chapters 2 and 3: how large the scores are, and how often they travel.

const GPU0 = DATA.gpus[0],
  MIB = 2 ** 20;
const chipMiB = gpu => (gpu.sms * gpu.shared) / 1024;
const scoresMiB = n => (4 * n * n) / MIB;

// ---- chapter 2: squares and a bar, to scale -------------------------------------------------------------------------------
/** state: { upTo }: "words" (6 in 60), or the longest length drawn. */
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
    size = small ? 11 : 14,
    area = { w: w - 8, h: h - bar - 24 };
  const side4 = Math.min(area.h - (small ? 30 : 44), area.w * 0.8),
    perToken = side4 / 4096,
    chip = Math.sqrt((chipMiB(GPU0) * MIB) / 4) * perToken;
  const x = 6,
    y = area.h + 4,
    marks = [],
    at = n => n * perToken,
    far = upTo >= 16384;
  const square = (n, cls, z) =>
    box(`square-${n}`, x, y - at(n), at(n), at(n), cls, { z, round: 0, enter: { x, y, w: 0, h: 0 } });
  const label = (n, text) =>
    words(`square-${n}-name`, x + 8, Math.max(y - at(n) + (small ? 14 : 18), 14), text, "strong-text", { size, z: 3 });
  if (far)
    marks.push(
      square(16384, "p", 0),
      words(
        "square-16384-name",
        w - 6,
        y - side4 - 18,
        `16,384 tokens: ${bytes(scoresMiB(16384) * MIB)}, far beyond this figure →`,
        "strong-text",
        { anchor: "end", size, z: 3 },
      ),
    );
  marks.push(square(4096, "s", 1), label(4096, `4,096 tokens: ${scoresMiB(4096)} MiB of scores`));
  marks.push(
    box("square-chip", x, y - chip, chip, chip, "chip solid", { z: 2, round: 0 }),
    words(
      "square-chip-name",
      x + 8,
      y - chip + (small ? 14 : 18),
      `all on-chip memory of an ${GPU0.name}: ${chipMiB(GPU0).toFixed(0)} MiB`,
      "strong-text",
      { size: small ? 10 : 13, z: 3 },
    ),
  );
  marks.push(
    square(1024, "s lit", 2),
    words(
      "square-1024-name",
      x + at(1024) + 7,
      y - at(1024) / 2,
      `1,024 tokens: ${scoresMiB(1024)} MiB`,
      "strong-text",
      { size: small ? 10 : 13, z: 3 },
    ),
  );
  // the same on a linear axis
  const axis = h - bar + (small ? 22 : 30),
    perMiB = (w - 16) / 96,
    thick = small ? 9 : 13,
    most = upTo >= 16384 ? 16384 : 4096;
  const length = Math.min(scoresMiB(most) * perMiB, 4 * w);
  marks.push(
    box("bar-scores", 6, axis, length, thick, "s", { z: 1, round: 0 }),
    box("bar-chip", 6, axis + thick + 3, chipMiB(GPU0) * perMiB, thick, "chip solid", { z: 1, round: 0 }),
  );
  marks.push(
    words(
      "bar-name",
      6,
      axis - 9,
      `bytes, on a linear axis: scores of ${thousands(most)} tokens, ${bytes(scoresMiB(most) * MIB)}`,
      "soft",
      { size: small ? 10 : 13 },
    ),
    words("bar-chip-name", 10 + chipMiB(GPU0) * perMiB, axis + 1.5 * thick + 3, "on the chip", "soft", {
      size: small ? 10 : 12,
    }),
  );
  const longer = (scoresMiB(16384) * perMiB) / w;
  const readout =
    upTo >= 16384
      ? `The bar of 16,384 tokens would be ${longer.toFixed(0)} times as wide as this figure.`
      : "One head of one sequence, 32-bit numbers; areas to scale.";
  return {
    marks,
    readout,
    label: `Squares to scale: the scores of 1,024 tokens fit on the chip, those of 4,096 do not. ${readout}`,
  };
}

// ---- chapter 3: four trips -------------------------------------------------------------------------------------------------
const REAL = { n: 4096, d: 64, size: 2 }; // what the counter counts: one head in 16 bits
const trip = { bytes: REAL.n ** 2 * REAL.size, seconds: t => (t * REAL.n ** 2 * REAL.size) / (GPU0.bandwidth * 1e9) };
const arithmeticSeconds = (4 * REAL.n ** 2 * REAL.d) / (GPU0.tflops.float16 * 1e12);

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
    ? `${done} of 4 trips: ${megabytes(done * trip.bytes)} at ${thousands(REAL.n)} tokens, d = ${REAL.d}, 16 bits.`
    : `In the time of one byte from HBM an ${GPU0.name} can do ${Math.round((GPU0.tflops.float16 * 1000) / GPU0.bandwidth)} operations.`;
  return { marks, readout, label: `HBM below, the chip above. ${readout}` };
}
const megabytes = b => `${Math.round(b / 1e6)} MB`;
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
