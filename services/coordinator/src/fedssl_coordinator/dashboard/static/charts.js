/* uPlot in this page's style: few light gridlines, no legend box, a label at each line's end. */
import { onPaint, token } from "./layout.js";
import { FONT, GLYPHS, clear, hideTip, showTip, slotColor, zoom } from "./canvas.js";
import { number, short } from "./format.js";

const charts = new Set();

/* `options.series`: {label, y, end?, slot?, width?, color?, dash?, band?}; `marks`: {y, text, zone?, color?, right?} */
export function chart(element, options) {
  const current = {
    height: 176,
    y: [null, null],
    right: 54,
    left: 42,
    places: 0,
    unit: "",
    marks: [],
    sync: "round",
    axis: number,
    isWhole: true /* the horizontal axis counts rounds, so there is nothing between two of them */,
    ...options,
  };
  let plot;
  const build = () => {
    const width = element.clientWidth;
    if (plot) {
      charts.delete(plot);
      plot.destroy();
      plot = undefined;
    }
    if (!width) return;
    clear(element);
    plot = new uPlot(described(current, width), [current.x, ...current.series.map((line) => line.y)], element);
    plot.root.addEventListener("mouseleave", hideTip);
    plot.clients = current.series.map((line) => line.client);
    charts.add(plot);
  };
  build();
  onPaint(build);
  let before = element.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(element.clientWidth - before) < 1) return;
    before = element.clientWidth;
    if (plot) plot.setSize({ width: before, height: current.height * zoom() });
    else build();
  }).observe(element);
  return {
    set: (changes) => {
      const sameLines =
        plot &&
        changes.series &&
        changes.series.length === current.series.length &&
        !changes.marks &&
        changes.series.every(
          (line, i) => line.client === current.series[i].client && line.label === current.series[i].label,
        );
      Object.assign(current, changes); /* in place: the plot's hooks read this object */
      if (sameLines) plot.setData([current.x, ...current.series.map((line) => line.y)]);
      else build();
    },
  };
}

function described(options, width) {
  const { series, marks, y, places, unit } = options;
  const size = zoom();
  const axis = {
    stroke: token("text-3"),
    font: `${11 * size}px Inter, system-ui, sans-serif`,
    gap: 6 * size,
    ticks: { show: false },
  };
  const [low, high] = ["low", "high"].map((end) => 1 + series.findIndex((line) => line.band === end));
  return {
    width,
    height: options.height * size,
    padding: [8 * size, options.right * size, 0, 0],
    legend: { show: false },
    focus: { alpha: 0.14 },
    cursor: {
      sync: options.sync ? { key: options.sync } : undefined,
      points: { one: true, size: 7 },
      y: false,
      drag: { x: true, y: false },
    },
    scales: {
      x: {
        time: false,
        distr: options.isLogX ? 3 : 1,
        range: options.isLogX ? undefined : (_, a, b) => (options.x.length === 1 ? around(options) : [a, b]),
      },
      y: options.isLog
        ? { distr: 3 }
        : { range: (_, a, b) => extent(y, a, Math.max(b, ...marks.map((mark) => mark.y))) },
    },
    axes: [
      {
        ...axis,
        size: 24 * size,
        grid: { show: false },
        space: 56 * size,
        values: (_, ticks) =>
          unrepeated(
            ticks.map((tick) =>
              tick != null && (Number.isInteger(tick) || !options.isWhole) ? options.axis(tick) : "",
            ),
          ),
      },
      {
        ...axis,
        size: (_, labels) => size * Math.max(options.left, ...(labels ?? []).map((label) => 14 + 6.5 * label.length)),
        space: 34 * size,
        grid: { stroke: token("line"), width: 1 },
        values: (_, ticks) =>
          unrepeated(
            ticks.map((tick) =>
              tick == null
                ? ""
                : tick === 0
                  ? "0"
                  : (options.tick ?? ((v) => (places ? number(v, places) : short(v)) + unit))(tick),
            ),
          ),
      },
    ],
    series: [
      {},
      ...series.map((line) => ({
        label: line.label,
        stroke: color(line),
        width: line.width ?? 1.5,
        dash: line.dash,
        spanGaps: line.bridge ?? false,
        points: { show: line.y.filter((value) => value != null).length < 3 && !line.band, size: 5, fill: color(line) },
        paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        fill: line.fill ? token("band") : undefined,
      })),
    ],
    bands: low && high ? [{ series: [high, low], fill: token("band") }] : [],
    hooks: { draw: [(plot) => annotate(plot, options)], setCursor: [(plot) => showPoint(plot, options)] },
  };
}

/* two ticks that round to one label show it once */
const unrepeated = (labels) => labels.map((label, i) => (i && label === labels[i - 1] ? "" : label));

const color = (line) =>
  line.band ? "transparent" : line.slot != null ? slotColor(line.slot) : token(line.color ?? "text");

/* around a single value: uPlot would draw an axis of 100 rounds for one at 0 */
const around = ({ x: [only], isWhole }) => (isWhole ? [only - 0.5, only + 0.5] : [0, 2 * only || 1]);

function extent([least, most], a, b) {
  if (a == null || b == null) return [least ?? 0, most ?? 1];
  const pad = (b - a || Math.abs(a) || 1) * 0.06;
  return [least ?? a - pad, most ?? b + pad];
}

function annotate(plot, { series, marks }) {
  const g = plot.ctx;
  const ratio = (devicePixelRatio || 1) * zoom();
  const { left, width, top, height } = plot.bbox;
  g.save();
  g.font = FONT.replace("11px", `${11 * ratio}px`);
  g.textBaseline = "middle";
  for (const mark of marks) {
    const at = plot.valToPos(mark.y, "y", true);
    if (at < top || at > top + height) continue;
    if (mark.zone) {
      g.globalCompositeOperation = "destination-over"; /* behind the lines, which it must not hide */
      g.fillStyle = token("zone");
      g.fillRect(left, at, width, top + height - at);
      g.globalCompositeOperation = "source-over";
    }
    g.strokeStyle = g.fillStyle = token(mark.color ?? "bad");
    g.lineWidth = ratio;
    g.setLineDash([4 * ratio, 3 * ratio]);
    g.beginPath();
    g.moveTo(left, at);
    g.lineTo(left + width, at);
    g.stroke();
    g.setLineDash([]);
    const room = top + height - at > 18 * ratio;
    g.textAlign = mark.right ? "right" : "left";
    g.fillText(
      mark.text,
      mark.right ? left + width - 4 * ratio : left + 6 * ratio,
      at + (mark.zone && room ? 9 : -8) * ratio,
    );
  }
  const used = [];
  g.textAlign = "left";
  const { min, max } = plot.scales.y;
  if (max - min < 1e-16 || Math.max(-min, max) >= 1e17) {
    g.fillStyle = token("text-3"); /* uPlot has no ticks for such numbers */
    g.fillText(short(max), left + 4 * ratio, top + 8 * ratio);
    g.fillText(short(min), left + 4 * ratio, top + height - 8 * ratio);
  }
  series
    .filter((line) => line.end)
    .map((line) => {
      let last = line.y.length - 1;
      while (last > 0 && line.y[last] == null) last -= 1;
      return { line, at: line.y[last] == null ? null : plot.valToPos(line.y[last], "y", true) };
    })
    .filter(({ at }) => at != null)
    .sort((a, b) => a.at - b.at)
    .forEach(({ line, at }) => {
      let place = at;
      for (const other of used) if (Math.abs(place - other) < 13 * ratio) place = other + 13 * ratio;
      used.push(place);
      const from = left + width + 7 * ratio;
      if (line.slot == null) {
        g.fillStyle = line.color === "accent" ? token("accent") : token("text-2");
        g.fillText(line.end, from, place);
        return;
      }
      g.save(); /* the glyph has the client's colour; small text needs more contrast */
      g.translate(from, place - 4.5 * ratio);
      g.scale((9 * ratio) / 16, (9 * ratio) / 16);
      const path = new Path2D(GLYPHS[line.slot % 6]);
      if (line.slot < 6) {
        g.fillStyle = slotColor(line.slot);
        g.fill(path);
      } else {
        g.strokeStyle = slotColor(line.slot);
        g.lineWidth = 2;
        g.stroke(path);
      }
      g.restore();
      g.fillStyle = token("text-2");
      g.fillText(line.end, from + 14 * ratio, place);
    });
  g.restore();
}

function showPoint(plot, { series, x, axis, title, value }) {
  const { left, top, idx } = plot.cursor;
  if (!plot.root.matches(":hover") || idx == null || left < 0) {
    if (plot.root.matches(":hover")) hideTip();
    return;
  }
  const box = plot.over.getBoundingClientRect();
  const rows = series
    .filter((line) => line.y[idx] != null)
    .map((line) => [line.label, line.y[idx]])
    .sort((a, b) => b[1] - a[1])
    .slice(0, 14);
  if (rows.length)
    showTip(
      title ? title(x[idx]) : `Round ${axis(x[idx])}`,
      rows.map(([label, shown]) => [label, (value ?? short)(shown)]),
      box.left + left,
      box.top + top,
    );
}

/* Highlight one client in every chart that has a line per client. */
export function focusClient(client) {
  for (const plot of charts) {
    if (!plot.clients.some((name) => name != null)) continue;
    const at = plot.clients.indexOf(client);
    plot.setSeries(client == null || at < 0 ? null : at + 1, { focus: client != null && at >= 0 });
  }
  for (const element of document.querySelectorAll("[data-client]"))
    element.classList.toggle("dim", client != null && element.dataset.client !== client);
}
