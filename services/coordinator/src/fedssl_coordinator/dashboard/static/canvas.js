/* Canvas drawings: sharp on every screen, redrawn when the theme or size changes. One tooltip per page. */
import { $, isDark, onPaint, token } from "./layout.js";

export const GLYPHS = [
  "M8 3.4a4.6 4.6 0 1 0 0 9.2 4.6 4.6 0 0 0 0-9.2",
  "M4 4h8v8H4z",
  "M8 2.6 13.4 12H2.6z",
  "M8 2.4 13.6 8 8 13.6 2.4 8z",
  "M8 13.4 2.6 4h10.8z",
  "M6.4 2.8h3.2v3.6h3.6v3.2H9.6v3.6H6.4V9.6H2.8V6.4h3.6z",
];
export const FONT = "500 11px Inter, system-ui, sans-serif";
export const BOLD = "600 11px Inter, system-ui, sans-serif";
/* canvases grow with the browser's default text size, as the rest of the page: they are drawn in sixteenths of a rem */
export const zoom = () => parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
export const slotColor = (slot) => (slot < 12 ? token(`c${slot}`) : token("text-3"));

const RAMPS = {
  light: ["#eaf3f3", "#cfe4e5", "#add2d4", "#85bcc0", "#5aa3a9", "#2f878e", "#116a72", "#054e55", "#023338"],
  dark: ["#172023", "#1b3136", "#1d454b", "#1d5b63", "#1f747d", "#318f98", "#58aab2", "#8ac6cb", "#c6e6e8"],
};
const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
export const ramp = (share) => {
  const stops = RAMPS[isDark() ? "dark" : "light"];
  const x = Math.max(0, Math.min(0.9999, share)) * 8;
  const i = Math.floor(x);
  const from = parts(stops[i]);
  const to = parts(stops[i + 1]);
  return from.map((value, k) => Math.round(value + (to[k] - value) * (x - i)));
};

export const drawGlyph = (g, slot, x, y, size = 10) => {
  g.save();
  g.translate(x - size / 2, y - size / 2);
  g.scale(size / 16, size / 16);
  const path = new Path2D(GLYPHS[slot % 6]);
  if (slot < 6) {
    g.fillStyle = slotColor(slot);
    g.fill(path);
  } else {
    g.strokeStyle = slotColor(slot);
    g.lineWidth = 2.4;
    g.stroke(path);
  }
  g.restore();
};

export const hatch = (g, x, y, w, h, stroke, fill) => {
  g.save();
  g.beginPath();
  g.rect(x, y, w, h);
  g.clip();
  if (fill) {
    g.fillStyle = fill;
    g.fillRect(x, y, w, h);
  }
  g.strokeStyle = stroke;
  g.lineWidth = 1.4;
  for (let i = x - h; i < x + w; i += 4.2) {
    g.beginPath();
    g.moveTo(i, y + h);
    g.lineTo(i + h, y);
    g.stroke();
  }
  g.restore();
};

/* Put a canvas into an element. `draw(g, width, height)` runs again when the theme or the width changes. */
export function picture(element, height, draw) {
  clear(element);
  const canvas = element.appendChild(document.createElement("canvas"));
  const redraw = () => {
    const width = element.clientWidth / zoom();
    const ratio = (devicePixelRatio || 1) * zoom();
    const tall = typeof height === "function" ? height() : height;
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    canvas.style.width = `${width / 16}rem`;
    canvas.style.height = `${tall / 16}rem`;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = FONT;
    g.textBaseline = "middle";
    draw(g, width, tall);
  };
  redraw();
  let before = element.clientWidth;
  new ResizeObserver(() => {
    if (element.clientWidth === before) return; /* the drawing itself has changed the height */
    before = element.clientWidth;
    redraw();
  }).observe(element);
  onPaint(redraw);
  return redraw;
}

/* the place of the pointer in a picture, and the picture's width, as it is drawn */
export const pointed = (element, { clientX, clientY }) => {
  const box = element.getBoundingClientRect();
  return [(clientX - box.left) / zoom(), (clientY - box.top) / zoom(), box.width / zoom()];
};

/* The tooltip is filled with text, never with markup, because names come from clients. */
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
export const hideTip = () => {
  tip.hidden = true;
};
export function showTip(title, rows, x, y) {
  const head = document.createElement("b");
  head.textContent = title;
  tip.replaceChildren(
    head,
    ...rows.map(([label, value]) => {
      const row = document.createElement("div");
      const name = document.createElement("span");
      const shown = document.createElement("em");
      name.textContent = label;
      shown.textContent = value ?? "";
      row.append(name, shown);
      return row;
    }),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(innerWidth - box.width - 8, x + 14))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18}px`;
}

/* A sentence takes the place of the drawing. Screen readers read no text within an image. */
const write = (element, text) => {
  element.setAttribute("role", "group");
  element.textContent = text;
};
export const clear = (element) => {
  if (element.getAttribute("role") === "group") element.setAttribute("role", "img");
  delete element.dataset.empty;
  element.replaceChildren();
};

/* Load drawings. A place without one explains why there is none, but only once that is known. */
const failed = new Map();
export async function showLoaded(elements, work) {
  let failure;
  try {
    await work();
    failed.delete(work);
  } catch (error) {
    console.info(error.message);
    failed.set(work, elements);
    failure = "This could not be loaded. Reload the page to try again.";
  }
  for (const element of elements) if (!$("canvas", element)) write(element, failure ?? element.dataset.empty ?? "");
}

/* Safari interrupts requests when a person leaves a page, and shows that page again when they go back to it. */
addEventListener("pageshow", ({ persisted }) => {
  if (persisted) for (const [work, elements] of failed) showLoaded(elements, work);
});

const PATIENCE = 60_000; /* milliseconds until a request counts as lost */
export async function load(url) {
  const signal = AbortSignal.timeout(PATIENCE);
  const answer = await fetch(url, { headers: { Accept: "application/json" }, signal });
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
  return answer.json();
}
