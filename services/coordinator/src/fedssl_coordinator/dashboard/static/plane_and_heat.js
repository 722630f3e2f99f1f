/* Two drawings of a run: uniformity against alignment by round, and one metric per client and round. */
import { $, token } from "./layout.js";
import { BOLD, FONT, drawGlyph, hideTip, picture, pointed, ramp, showTip } from "./canvas.js";
import { short } from "./format.js";

const TALL = 288;
const nice = (low, high) => {
  const span = high - low || 1;
  const unit = 10 ** Math.floor(Math.log10(span));
  const step = [1, 2, 5, 10].map((k) => (k * unit) / 2).find((s) => span / s <= 5) ?? unit;
  const first = Math.ceil(low / step);
  const count = Math.floor(high / step + 1e-9) - first + 1; /* at most six, however small the numbers are */
  return Array.from({ length: count }, (_, i) => +((first + i) * step).toPrecision(12));
};

/* `paths`: [{label, slot?, points: [[alignment, uniformity, round], ...]}] */
export function plane(element, read) {
  return picture(element, TALL, (g, w, h) => {
    const paths = read();
    const all = paths.flatMap((path) => path.points);
    if (!all.length) return;
    const B = 36;
    const R = 12;
    const T = 10;
    const grow = (a, b) => {
      const pad = (b - a || Math.abs(a) || 1) * 0.08;
      return [a - pad, b + pad];
    };
    const [x0, x1] = grow(Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0])));
    const [y0, y1] = grow(Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1])));
    const upward = nice(y0, y1);
    const L = Math.max(44, ...upward.map((tick) => g.measureText(short(tick)).width + 22));
    const X = (a) => L + ((a - x0) / (x1 - x0)) * (w - L - R);
    const Y = (u) => T + ((y1 - u) / (y1 - y0)) * (h - T - B);
    for (const tick of upward) {
      g.fillStyle = token("line");
      g.fillRect(L, Y(tick), w - L - R, 1);
      g.fillStyle = token("text-3");
      g.textAlign = "right";
      g.fillText(short(tick), L - 6, Y(tick));
    }
    g.textAlign = "center";
    for (const tick of nice(x0, x1)) g.fillText(short(tick), X(tick), h - B + 13);
    g.fillText("alignment", L + (w - L - R) / 2, h - 6);
    g.save();
    g.translate(7, T + (h - T - B) / 2);
    g.rotate(-Math.PI / 2);
    g.fillText("uniformity", 0, 0);
    g.restore();
    for (const path of paths) {
      g.lineWidth = 1.8;
      g.lineCap = "round";
      path.points.forEach((point, i) => {
        if (!i) return;
        g.strokeStyle =
          path.slot != null ? token(`c${path.slot}`) : `rgb(${ramp(0.28 + 0.62 * (i / path.points.length))})`;
        g.beginPath();
        g.moveTo(X(path.points[i - 1][0]), Y(path.points[i - 1][1]));
        g.lineTo(X(point[0]), Y(point[1]));
        g.stroke();
      });
      g.lineCap = "butt";
      const [first, end] = [path.points[0], path.points.at(-1)];
      const right = X(end[0]) < w - 60;
      if (path.slot != null) {
        drawGlyph(g, path.slot, X(end[0]), Y(end[1]), 11);
        continue;
      }
      g.fillStyle = token("surface");
      g.strokeStyle = token("text-2");
      g.lineWidth = 1.5;
      g.beginPath();
      g.arc(X(first[0]), Y(first[1]), 3.2, 0, 7);
      g.fill();
      g.stroke();
      g.fillStyle = token("text-2");
      g.textAlign = X(first[0]) < w - 60 ? "left" : "right";
      g.fillText(
        `r${first[2]}`,
        X(first[0]) + (X(first[0]) < w - 60 ? 8 : -8),
        Y(first[1]) + (path.points.length > 1 && Math.abs(Y(first[1]) - Y(end[1])) < 14 ? -10 : 0),
      );
      if (path.points.length > 1) {
        g.fillStyle = token("accent");
        g.beginPath();
        g.arc(X(end[0]), Y(end[1]), 4.5, 0, 7);
        g.fill();
        g.font = BOLD;
        g.textAlign = right ? "left" : "right";
        g.fillText(`r${end[2]}`, X(end[0]) + (right ? 8 : -8), Y(end[1]) + 9);
        g.font = FONT;
      }
    }
  });
}

export function heat(element, read, slots) {
  const ROW = 22;
  const L = 52;
  const R = 46;
  const T = 4;
  const tall = () => {
    const n = read()?.clients.length ?? 0;
    return n > 40 ? Math.max(TALL, T + n * 2.4 + 26) : Math.max(TALL, T + n * ROW + 26);
  };
  const redraw = picture(element, tall, (g, w, h) => {
    const data = read();
    if (!data) return;
    const { rounds, clients, bytes } = data;
    const rh = (h - T - 26) / Math.max(clients.length, 1);
    const bw = (w - L - R) / Math.max(rounds.length, 1);
    const image = new ImageData(Math.max(rounds.length, 1), Math.max(clients.length, 1));
    const colors = Array.from({ length: 255 }, (_, i) => ramp(0.06 + 0.92 * (i / 254)));
    bytes.forEach((cell, i) => {
      if (cell < 255) {
        image.data.set(colors[cell], i * 4);
        image.data[i * 4 + 3] = 255;
      }
    });
    const small = new OffscreenCanvas(image.width, image.height);
    small.getContext("2d").putImageData(image, 0, 0);
    g.imageSmoothingEnabled = false;
    const labelled = rowsWithLabel(data.last, rh);
    clients.forEach((client, i) => {
      const gap = rh > 8 ? 1 : 0;
      g.drawImage(small, 0, i, rounds.length, 1, L, T + i * rh + gap, w - L - R, rh - 2 * gap);
      if (!labelled.has(i)) return;
      const named = slots.get(client);
      const y = T + i * rh + rh / 2;
      const hasGlyph = named?.slot < 12;
      const left = hasGlyph ? 16 : 2;
      if (hasGlyph) drawGlyph(g, named.slot, 5, y);
      g.fillStyle = token("text-2");
      g.textAlign = "left";
      g.fillText(named?.code ?? (client.length > 6 ? `…${client.slice(-5)}` : client), left, y, L - left - 4);
      g.textAlign = "right";
      g.fillText(short(data.last[i]), w - 4, y);
    });
    g.fillStyle = token("text-3");
    g.textAlign = "center";
    const step = Math.max(1, Math.round(rounds.length / (w / 80) / 5) * 5);
    for (let i = 0; i < rounds.length; i += step) {
      const hasRoom = bw * step > 56; /* for the word, before the second number */
      g.textAlign = i ? "center" : "left";
      g.fillText(i || !hasRoom ? String(rounds[i]) : `round ${rounds[0]}`, L + i * bw, h - 10);
    }
  });
  element.addEventListener("mousemove", (event) => {
    const data = read();
    if (!data) return;
    const [x, y, w] = pointed(element, event);
    const row = Math.floor((y - T) / ((tall() - T - 26) / data.clients.length));
    const column = Math.floor(((x - L) / (w - L - R)) * data.rounds.length);
    if (!data.clients[row] || data.rounds[column] == null) {
      hideTip();
      return;
    }
    const cell = data.bytes[row * data.rounds.length + column];
    showTip(
      data.clients[row],
      [[`round ${data.rounds[column]}`, cell === 255 ? "no value" : short(valueOf(data, cell))]],
      event.clientX,
      event.clientY,
    );
  });
  element.addEventListener("mouseleave", hideTip);
  return redraw;
}

/* the rows that have room for a name and a value: all, or of those that overlap the one with the highest value */
const rowsWithLabel = (last, rowHeight) => {
  const chosen = [];
  const byValue = [...last.keys()].sort((a, b) => (last[b] ?? -Infinity) - (last[a] ?? -Infinity));
  for (const row of byValue) if (chosen.every((other) => Math.abs(other - row) * rowHeight >= 11)) chosen.push(row);
  return new Set(chosen);
};

const valueOf = ({ low, high, scale }, cell) =>
  scale === "log"
    ? Math.exp(Math.log(low) + (cell / 254) * (Math.log(high) - Math.log(low)))
    : low * (1 - cell / 254) + high * (cell / 254);
export const decoded = (payload) => ({
  ...payload,
  bytes: Uint8Array.from(atob(payload.cells), (c) => c.charCodeAt(0)),
});
export const showScale = (payload) => {
  $("#heat-low").textContent = short(payload.low);
  $("#heat-high").textContent = `${short(payload.high)}${payload.scale === "log" ? ", log scale" : ""}`;
  $("#heat-key").hidden = false;
};
