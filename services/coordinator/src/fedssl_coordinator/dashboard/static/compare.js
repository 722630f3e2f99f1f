/* Compare runs: the probe by round, bytes or time, and the paths of uniformity against alignment. */
import { $, $$ } from "./layout.js";
import { empties } from "./canvas.js";
import { chart, focusClient } from "./charts.js";
import { plane } from "./plane_and_heat.js";
import { bytes, number, percent, seconds } from "./format.js";

const root = $("#compare");
empties();
if (root) {
  const answer = await fetch(root.dataset.url);
  const { runs } = answer.ok ? await answer.json() : { runs: [] };
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
  const xs = [...new Set(runs.flatMap((run) => run[axisName].filter((x) => x != null)))].sort((a, b) => a - b);
  const series = runs.map((run, slot) => {
    const at = new Map(run[axisName].map((x, i) => [x, run.probe[i]]));
    return {
      client: run.id,
      label: run.name,
      end: run.name.slice(0, 22),
      slot,
      width: 1.6,
      dash: slot >= 6 ? [5, 3] : undefined,
      bridge: true,
      y: xs.map((x) => at.get(x) ?? null),
    };
  });
  if (xs.length && series.some((line) => line.y.some((y) => y != null)))
    chart($("#probe"), {
      x: xs,
      series,
      y: [0, 1],
      height: 288,
      right: innerWidth < 640 ? 14 : 170,
      tick: (y) => percent(y, 0),
      value: percent,
      axis: write,
      title,
    });
  const paths = runs
    .map((run, slot) => ({
      label: run.name,
      slot,
      points: run.rounds
        .map((round, i) => [run.alignment[i], run.uniformity[i], round])
        .filter(([a, u]) => a != null && u != null),
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
