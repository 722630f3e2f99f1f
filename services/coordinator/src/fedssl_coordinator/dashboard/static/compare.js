/* Compare runs: one measure by round, bytes or time, and the paths of uniformity against alignment. */
import { $, $$ } from "./layout.js";
import { showLoaded } from "./canvas.js";
import { chart, focusClient } from "./charts.js";
import { plane } from "./plane_and_heat.js";
import { bytes, number, percent, seconds, short } from "./format.js";

/* each value as the mean of up to `width` values that end with it */
const smoothed = (values, width) =>
  values.map((value, i) => {
    const near = values.slice(Math.max(0, i + 1 - width), i + 1).filter((one) => one != null);
    return value == null ? null : near.reduce((sum, one) => sum + one, 0) / near.length;
  });

/* what a logarithmic axis has no place for is named, and not left out silently */
function showLeftOut(counts) {
  const found = counts
    .filter(([, count]) => count)
    .map(([name, count]) => `${number(count)} ${count === 1 ? "value" : "values"} of ${name}`);
  const place = $("#left-out");
  place.hidden = !found.length;
  place.textContent = `Not drawn, because a logarithmic axis begins above 0: ${found.join(", ")}.`;
}

const root = $("#compare");
function show() {
  const runs = JSON.parse(root.dataset.runs);
  const [axisName, write] = {
    round: ["rounds", (x) => number(x)],
    bytes: ["bytes", bytes],
    time: ["seconds", seconds],
  }[root.dataset.x];
  const title = {
    round: (x) => `Round ${number(x)}`,
    bytes: (x) => `${bytes(x)} uploaded`,
    time: (x) => `after ${seconds(x)}`,
  }[root.dataset.x];
  const isShare = ["probe", "knn"].includes(root.dataset.y);
  const isLog = ["log", "log-log"].includes(root.dataset.scale);
  const isLogX = ["log-x", "log-log"].includes(root.dataset.scale);
  const isShown = (x) => x != null && (!isLogX || x > 0);
  const isDrawn = (run, y, i) => (!isLog || y > 0) && isShown(run[axisName][i]);
  const xs = [...new Set(runs.flatMap((run) => run[axisName].filter(isShown)))].sort((a, b) => a - b);
  const series = runs.map((run, slot) => {
    const values = smoothed(run.values, +root.dataset.smooth);
    const at = new Map(run[axisName].map((x, i) => [x, isLog && values[i] <= 0 ? null : values[i]]));
    return {
      client: run.id,
      label: run.name,
      end: run.name.length > 24 ? `${run.name.slice(0, 10)}…${run.name.slice(-12)}` : run.name,
      slot,
      width: 1.6,
      dash: slot >= 6 ? [5, 3] : undefined,
      bridge: true,
      y: xs.map((x) => at.get(x) ?? null),
    };
  });
  showLeftOut(runs.map((run) => [run.name, run.values.filter((y, i) => y != null && !isDrawn(run, y, i)).length]));
  if (xs.length && series.some((line) => line.y.some((y) => y != null)))
    chart($("#probe"), {
      x: xs,
      series,
      y: isShare && !isLog ? [0, 1] : [null, null],
      isLog,
      isLogX,
      height: 288,
      right: matchMedia("(max-width: 40em)").matches ? 14 : 170,
      tick: isShare ? (y) => percent(y, 0) : short,
      value: isShare ? percent : short,
      axis: write,
      isWhole: root.dataset.x === "round",
      title,
    });
  const paths = runs
    .map((run, slot) => ({
      label: run.name,
      slot,
      points: run.path.filter(([a, u]) => a != null && u != null),
    }))
    .filter((path) => path.points.length);
  if (paths.length) plane($("#plane"), () => paths);
  let pinned = null;
  const key = $("#ckey");
  const of = (event) => event.target.closest("button")?.dataset.client;
  key.addEventListener("mouseover", (event) => {
    if (of(event)) focusClient(of(event));
  });
  key.addEventListener("mouseleave", () => focusClient(pinned));
  key.addEventListener("click", (event) => {
    if (!of(event)) return;
    pinned = pinned === of(event) ? null : of(event);
    for (const button of $$("button", key)) button.setAttribute("aria-pressed", button.dataset.client === pinned);
    focusClient(pinned);
  });
}
if (root) showLoaded([$("#probe"), $("#plane")], show);
