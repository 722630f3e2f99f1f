/* The map of embeddings, one evaluated round at a time: one point per test image, coloured by its class. */
import { $, isDark, token } from "./layout.js";
import { BOLD, FONT, hideTip, picture, pointed, showTip } from "./canvas.js";
import { number } from "./format.js";

const TALL = 330;
const PAD = 14;
const NAMED = 20;
const STEP = 700;
/* Petroff's ten colours (2021), as in the command line's figures; the palest are darker on white */
const COLOURS = [
  "#3f90da",
  "#ffa90e",
  "#bd1f01",
  "#832db6",
  "#94a4a2",
  "#a96b59",
  "#e76300",
  "#b9ac70",
  "#717581",
  "#92dadd",
];
const ON_WHITE = { 1: "#e09000", 4: "#7f918f", 7: "#a3954f", 9: "#4fb3b8" };
const ON_BLACK = { 2: "#e8523a", 3: "#b072dc" };
const colour = (label) => (isDark() ? ON_BLACK : ON_WHITE)[label % 10] ?? COLOURS[label % 10];
const when = (round) => (round ? `Round ${number(round)}` : "Before training");
const middle = (values) => values.sort((a, b) => a - b)[values.length >> 1];

export function embedding(load) {
  const element = $("#embedding");
  const slider = $("#embedding-round");
  const play = $("#embedding-play");
  const caption = $("#embedding-says");
  let list = null;
  let shown = null;
  let redraw = null;
  let focused = null;
  let dots = [];
  let timer = null;
  let wanted = 0;
  const kept = new Map();

  function draw(g, w, h) {
    if (!shown) return;
    const { points, labels } = shown;
    const half = Math.min(w, h * 1.7) / 2;
    const reach = points
      .map(([x, y]) => Math.max((Math.abs(x) * (h / 2 - PAD)) / (half - PAD), Math.abs(y)))
      .sort((a, b) => a - b);
    const scale =
      (h / 2 - PAD) / Math.max(reach[Math.floor(reach.length * 0.995)], 1e-6); /* outliers are drawn at the edge */
    const at = (value, most) => Math.max(4, Math.min(most - 4, most / 2 + value * scale));
    dots = points.map(([x, y]) => [at(x, w), at(-y, h)]);
    const size = points.length > 800 ? 1.6 : 2.4;
    const order = dots.map((_, i) => (i * 7919) % dots.length); /* mixed, so that no class covers the others */
    for (const i of order) {
      g.globalAlpha = focused == null || labels[i] === focused ? 0.8 : 0.08;
      g.fillStyle = colour(labels[i]);
      g.beginPath();
      g.arc(dots[i][0], dots[i][1], size, 0, 7);
      g.fill();
    }
    g.globalAlpha = 1;
    name(g, w, h);
  }

  function name(g, w, h) {
    const classes = [...new Set(shown.labels)].sort((a, b) => a - b);
    if (classes.length > NAMED) return;
    const taken = [];
    g.font = BOLD;
    g.textAlign = "center";
    g.lineWidth = 3;
    g.lineJoin = "round";
    g.strokeStyle = token("surface");
    g.fillStyle = token("text");
    const places = classes.map((label) => {
      const own = dots.filter((_, i) => shown.labels[i] === label);
      return [middle(own.map(([x]) => x)), middle(own.map(([, y]) => y)), title(label)];
    });
    for (const [x, start, text] of places.sort((a, b) => a[1] - b[1])) {
      const wide = g.measureText(text).width / 2 + 2;
      const left = Math.max(wide, Math.min(w - wide, x));
      let y = start;
      while (
        taken.some(([otherX, otherY, other]) => Math.abs(otherX - left) < wide + other && Math.abs(otherY - y) < 13)
      )
        y += 1;
      y = Math.min(h - 8, y);
      taken.push([left, y, wide]);
      g.strokeText(text, left, y);
      g.fillText(text, left, y);
    }
    g.font = FONT;
  }

  const title = (label) => shown.class_names[label] ?? `class ${label}`;

  async function show(index) {
    wanted = index;
    const { id, round } = list.rounds[index];
    if (!kept.has(id)) {
      kept.set(id, await load(`embedding.json?evaluation=${id}`));
      if (kept.size > 40) kept.delete(kept.keys().next().value);
    }
    if (wanted !== index) return; /* the slider has moved meanwhile */
    shown = kept.get(id);
    slider.value = index;
    slider.setAttribute("aria-valuetext", when(round));
    if (caption.textContent !== when(round)) caption.textContent = when(round); /* screen readers announce a change */
    element.setAttribute(
      "aria-label",
      `Map of ${number(shown.points.length)} test images of ${list.dataset}, coloured by class: ` +
        `${when(round).toLowerCase()}. The Jobs tab has the scores of the round.`,
    );
    if (redraw) redraw();
    else {
      redraw = picture(element, TALL, draw);
      $("#embedding-frame").hidden = false;
    }
  }

  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.setAttribute("aria-pressed", "false");
  };
  slider.addEventListener("input", () => {
    stop();
    show(+slider.value);
  });
  play.addEventListener("click", () => {
    if (timer) {
      stop();
      return;
    }
    play.setAttribute("aria-pressed", "true");
    let next = +slider.value >= list.rounds.length - 1 ? 0 : +slider.value + 1;
    show(next);
    timer = setInterval(() => {
      next += 1;
      if (next < list.rounds.length) show(next);
      else stop();
    }, STEP);
  });
  const focus = (label) => {
    if (label !== focused) {
      focused = label;
      redraw?.();
    }
  };
  element.addEventListener("mousemove", (event) => {
    if (!shown) return;
    const [x, y] = pointed(element, event);
    let best = -1;
    let least = 64;
    dots.forEach(([a, b], i) => {
      const far = (a - x) ** 2 + (b - y) ** 2;
      if (far < least) {
        least = far;
        best = i;
      }
    });
    if (best < 0) {
      hideTip();
      focus(null);
      return;
    }
    focus(shown.labels[best]);
    showTip(
      title(shown.labels[best]),
      [["images", number(shown.labels.filter((label) => label === shown.labels[best]).length)]],
      event.clientX,
      event.clientY,
    );
  });
  element.addEventListener("mouseleave", () => {
    hideTip();
    focus(null);
  });

  /* Add newly evaluated rounds. The shown round stays, unless it was the newest. */
  return async () => {
    const before = list;
    const found = await load("embeddings.json");
    if (!found.rounds.length) return;
    list = found;
    slider.max = found.rounds.length - 1;
    slider.disabled = play.disabled = found.rounds.length < 2;
    $("#embedding-sub").textContent = `${found.dataset}, ${{ pca: "PCA", tsne: "t-SNE" }[found.method]}`;
    const at = before ? found.rounds.findIndex(({ id }) => id === before.rounds[+slider.value]?.id) : -1;
    const follows = !before || +slider.value === before.rounds.length - 1;
    if (!timer && (follows || at < 0)) await show(found.rounds.length - 1);
    else if (at >= 0) slider.value = at;
  };
}
