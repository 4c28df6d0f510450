"use strict";
// The story: which step is being read, what it shows, its controls, its address, its keys.

const SCENES = {
  attention,
  squares,
  trips,
  tiles,
  oneRow,
  brokenRow,
  race,
  tileSize,
  maskTiles,
  backwards,
  roofline,
  ladder,
};
const stage = new Stage($("stage"));
const STEPS = [...document.querySelectorAll("#text .step")].map((node, index) => ({
  node,
  index,
  id: node.id,
  scene: node.dataset.scene,
  given: JSON.parse(node.dataset.state),
  state: JSON.parse(node.dataset.state),
}));
const PLAY_ID = "play";
const story = { active: null, pinned: null };

const phone = () => matchMedia("(max-width: 899px)").matches;
const byId = id => STEPS.find(step => step.id === id);

const MARGIN = 1.5; // around the scene, for the lines of boxes that fill it
// ---- drawing -------------------------------------------------------------------------------------------------------------
function viewOf() {
  const { width, height } = $("stage").getBoundingClientRect();
  return { w: width - 2 * MARGIN, h: height - 2 * MARGIN, small: width < 480 };
}
/** What a step shows at this size: { marks, readout, label }. */
const sceneOf = step => SCENES[step.scene](step.state, viewOf());
function drawStory(instant = false) {
  const step = story.active,
    view = viewOf();
  if (!step || view.w < 10) return;
  const { marks, readout, label } = SCENES[step.scene](step.state, view);
  $("stage").setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${view.w + 2 * MARGIN} ${view.h + 2 * MARGIN}`);
  $("stage").setAttribute("aria-label", label);
  $("readout").replaceChildren(...rich(readout));
  stage.show(marks, { instant });
}
function activate(step, instant = false) {
  if (story.active === step) return;
  story.active?.node.classList.remove("active");
  story.active = step;
  step.node.classList.add("active");
  markRail();
  drawStory(instant);
  remember();
}

// ---- scrolling -------------------------------------------------------------------------------------------------------------
/** The step at the reading line: the middle of what the figure leaves free. */
function readingLine() {
  const top = phone() ? $("figure").getBoundingClientRect().bottom : 0;
  return top + (innerHeight - top) * 0.45;
}
function stepAtLine() {
  const line = readingLine();
  return STEPS.reduce((best, step) => {
    const { top, bottom } = step.node.getBoundingClientRect(),
      away = top > line ? top - line : bottom < line ? line - bottom : 0;
    return !best || away < best.away ? { step, away } : best;
  }, null).step;
}
function scrolled() {
  if (story.pinned) return;
  activate(stepAtLine());
  document.documentElement.dataset.part = playing() ? "play" : "story";
  markRail();
}
/** Whether the reader has arrived at the last chapter. */
const playing = () => $(PLAY_ID).getBoundingClientRect().top < innerHeight * 0.5;
/** Keeps the step that the page scrolls to, until nothing moves any more. A busy machine scrolls for seconds. */
function hold(ms) {
  const from = scrollY;
  clearTimeout(story.timer);
  story.timer = setTimeout(() => (scrollY === from ? letGo() : hold(200)), ms);
}
function letGo() {
  if (!story.pinned) return;
  clearTimeout(story.timer);
  story.pinned = null;
  scrolled();
  remember();
}
/** Scrolls so that a step stands at the reading line; it is active at once, and stays so until the scrolling ends. */
function goTo(id, { instant = false } = {}) {
  const step = byId(id),
    node = step ? step.node : $(id);
  if (!node) return;
  const box = node.getBoundingClientRect(),
    line = readingLine();
  const free_ = phone() ? innerHeight - $("figure").getBoundingClientRect().bottom : innerHeight;
  const to = !step
    ? scrollY + box.top
    : phone()
      ? scrollY + box.top - $("figure").offsetHeight
      : scrollY + (box.height < free_ ? box.top + box.height / 2 : box.top + free_ * 0.45) - line;
  if (step) activate(step, instant);
  story.pinned = id;
  scrollTo({ top: Math.max(0, to), behavior: instant || stillness.matches ? "instant" : "smooth" });
  hold(instant || stillness.matches ? 60 : 900);
}
function stepBy(by) {
  const order = [...STEPS.map(step => step.id), PLAY_ID];
  const now = document.documentElement.dataset.part === "play" ? order.length - 1 : story.active.index;
  goTo(order[Math.min(Math.max(now + by, 0), order.length - 1)]);
}

// ---- the address: #step?what=the reader has changed -------------------------------------------------------------------------
function addressOf(step) {
  const changed = Object.entries(step.state).filter(
    ([key, value]) => JSON.stringify(value) !== JSON.stringify(step.given[key]),
  );
  const query = changed
    .map(([key, value]) => `${key}=${encodeURIComponent(typeof value === "object" ? JSON.stringify(value) : value)}`)
    .join("&");
  return `#${step.id}${query ? `?${query}` : ""}`;
}
function remember() {
  clearTimeout(story.remembering);
  story.remembering = setTimeout(() => {
    const address = document.documentElement.dataset.part === "play" ? playAddress() : addressOf(story.active);
    if (location.hash !== address) history.replaceState(null, "", address);
  }, 150);
}
/** { id, values } of an address. */
function parseAddress(hash) {
  const [id, query = ""] = hash.replace(/^#/, "").split("?");
  return { id, values: Object.fromEntries([...new URLSearchParams(query)]) };
}
function followAddress(instant) {
  const { id, values } = parseAddress(location.hash),
    step = byId(id);
  if (id === PLAY_ID) {
    restorePlay(values);
    goTo(PLAY_ID, { instant });
    return true;
  }
  if (!step) return false;
  for (const [key, text] of Object.entries(values))
    if (key in step.given) {
      const like = step.given[key];
      try {
        step.state[key] = typeof like === "number" ? Number(text) : typeof like === "object" ? JSON.parse(text) : text;
      } catch {
        /* an address that was typed wrongly changes nothing */
      }
    }
  showControls(step);
  if (story.active === step) drawStory(instant);
  goTo(id, { instant });
  return true;
}

// ---- controls in the text ----------------------------------------------------------------------------------------------------
function set(step, name, value) {
  step.state[name] = value;
  showControls(step);
  activate(step);
  drawStory(name === "clock" || name === "gain" || name === "pick");
  remember();
}
function showControls(step) {
  for (const control of step.node.querySelectorAll("[data-control]")) {
    const value = step.state[control.dataset.control];
    if (control.tagName === "INPUT") {
      control.value = control.dataset.power ? Math.log2(value) : value;
      control.parentElement.querySelector("output").textContent = thousands(value);
      control.setAttribute("aria-valuetext", String(value));
    } else if (control.tagName === "SELECT") control.value = value;
    else
      for (const button of control.querySelectorAll("button"))
        button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
  }
}
function wireControls(step) {
  for (const control of step.node.querySelectorAll("[data-control]")) {
    const name = control.dataset.control,
      like = step.given[name];
    if (control.tagName === "SELECT") {
      DATA.gpus.forEach(gpu => control.append(el("option", {}, gpu.name)));
      control.addEventListener("change", () => set(step, name, control.value));
    } else if (control.tagName === "INPUT")
      control.addEventListener("input", () =>
        set(step, name, control.dataset.power ? 2 ** Number(control.value) : Number(control.value)),
      );
    else
      for (const button of control.querySelectorAll("button"))
        button.addEventListener("click", () =>
          set(step, name, typeof like === "number" ? Number(button.dataset.value) : button.dataset.value),
        );
  }
  for (const quiz of step.node.querySelectorAll(".quiz"))
    for (const button of quiz.querySelectorAll("button"))
      button.addEventListener("click", () => {
        for (const other of quiz.querySelectorAll("button")) other.removeAttribute("data-chosen");
        button.dataset.chosen = "right" in button.dataset ? "right" : "wrong";
        quiz.querySelector(".feedback").replaceChildren(...rich(button.dataset.says));
        if ("right" in button.dataset && quiz.dataset.then)
          setTimeout(() => {
            if (story.active === step) drawStoryOf(byId(quiz.dataset.then));
          }, 400);
      });
  showControls(step);
}
/** The figure runs ahead to another step, without leaving this one: the answer to a question. */
function drawStoryOf(step) {
  const { marks, readout, label } = sceneOf(step);
  $("readout").replaceChildren(...rich(readout));
  $("stage").setAttribute("aria-label", label);
  stage.show(marks);
}

// ---- pointing at a number ----------------------------------------------------------------------------------------------------
function pickFrom(target) {
  const node = target.closest?.("[data-pick]");
  if (!node || !story.active || !("pick" in story.active.given)) return false;
  const [m, i, j] = node.dataset.pick.split(",");
  const pick = { m, i: Number(i), j: Number(j) };
  if (JSON.stringify(pick) !== JSON.stringify(story.active.state.pick)) set(story.active, "pick", pick);
  return true;
}
function movePick(event) {
  const step = story.active,
    { pick } = step.state,
    by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!by || !event.target.closest?.("#stage [tabindex]") || !pick || pick.m === "o") return;
  event.preventDefault();
  event.stopPropagation();
  const clamp = x => Math.min(Math.max(x, 0), STORY.n - 1),
    oneRowOnly = step.state.reveal === "row" || step.state.reveal === "softmax";
  set(step, "pick", { ...pick, i: oneRowOnly ? pick.i : clamp(pick.i + by[0]), j: clamp(pick.j + by[1]) });
  document.querySelector("#stage [tabindex]")?.focus();
}

// ---- the rail ------------------------------------------------------------------------------------------------------------------
const CHAPTERS = [...document.querySelectorAll(".chapter")].map((node, i) => ({
  number: i + 1,
  name: node.dataset.name,
  id: (node.querySelector(".step") || node).id,
  node,
}));
function buildRail() {
  $("rail").append(
    el(
      "ol",
      {},
      ...CHAPTERS.map(chapter => {
        const link = el("a", { href: `#${chapter.id}` }, el("span", {}, `${chapter.number} ${chapter.name}`));
        link.addEventListener("click", event => {
          event.preventDefault();
          goTo(chapter.id);
        });
        chapter.link = link;
        return el("li", {}, link);
      }),
    ),
  );
}
function markRail() {
  const inPlay = document.documentElement.dataset.part === "play";
  for (const chapter of CHAPTERS) {
    const here = inPlay ? chapter.id === PLAY_ID : chapter.node.contains(story.active?.node);
    if (here) chapter.link?.setAttribute("aria-current", "step");
    else chapter.link?.removeAttribute("aria-current");
  }
}

// ---- keys ------------------------------------------------------------------------------------------------------------------------
function storyKeys(event) {
  const typing = event.target.closest("input, select, textarea, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (document.documentElement.dataset.part === "play") {
    if (event.key === "ArrowLeft" && atPlayStart()) {
      event.preventDefault();
      goTo(STEPS.at(-1).id);
    } else playKeys(event);
    return;
  }
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  stepBy(by);
}

function startStory() {
  buildRail();
  STEPS.forEach(wireControls);
  for (const kind of ["pointerover", "click"]) $("stage").addEventListener(kind, event => pickFrom(event.target));
  $("stage").addEventListener("keydown", movePick);
  addEventListener("scroll", () => requestAnimationFrame(scrolled), { passive: true });
  for (const kind of ["wheel", "touchmove"]) addEventListener(kind, letGo, { passive: true });
  addEventListener("hashchange", () => followAddress(false));
  document.addEventListener("keydown", storyKeys);
  new ResizeObserver(() => drawStory(true)).observe($("stage"));
  $("theme").addEventListener("click", () => {
    const root = document.documentElement,
      dark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
  });
  document.documentElement.dataset.part = "story";
  if (!followAddress(true)) activate(stepAtLine(), true);
}
