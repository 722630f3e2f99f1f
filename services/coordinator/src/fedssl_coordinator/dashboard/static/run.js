/* A run's page: charts, timeline, and the patches that keep it up to date. */
import { $, $$, keys } from "./layout.js";
import { load as loadJson, showLoaded } from "./canvas.js";
import { chart, focusClient } from "./charts.js";
import { embedding } from "./embedding.js";
import { decoded, heat, plane, showScale } from "./plane_and_heat.js";
import { percent, short } from "./format.js";
import { gantt } from "./gantt.js";
import { live } from "./live.js";

const root = $("#run");
const url = `/runs/${root.dataset.run}`;
const load = (path) => loadJson(`${url}/${path}`);
const slots = new Map();
const readSlots = () => {
  slots.clear();
  for (const button of $$("#ckey [data-slot]"))
    slots.set(button.dataset.client, { slot: +button.dataset.slot, code: button.dataset.code });
};
readSlots();

/* one client key for all charts */
let pinned = null;
const key = $("#ckey");
key.addEventListener("mouseover", (event) => {
  const button = event.target.closest("button");
  if (button) focusClient(button.dataset.client);
});
key.addEventListener("mouseleave", () => focusClient(pinned));
const showPinned = () => {
  for (const button of $$("button", key)) button.setAttribute("aria-pressed", button.dataset.client === pinned);
};
key.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  pinned = pinned === button.dataset.client ? null : button.dataset.client;
  showPinned();
  focusClient(pinned);
});

/* accuracy and geometry, from evaluations */
let accuracy = null;
let drawPlane = null;
let track = [];
let scores = "";
async function showCurves() {
  const found = await load("curves.json");
  const { rounds, results, chance } = found;
  timeline.verdicts(found.verdicts);
  if (JSON.stringify([rounds, results]) === scores) return; /* no new scores: leave the charts as they are */
  scores = JSON.stringify([rounds, results]);
  const series = [
    ["probe", "Linear probe", "Probe", "accent", 2],
    ["knn", "kNN", "kNN", "text-2", 1.5],
  ]
    .filter(([name]) => results[name])
    .map(([name, label, end, color, width]) => ({ label, end, color, width, y: results[name], bridge: true }));
  if (series.length && rounds.length) {
    if (accuracy) accuracy.set({ x: rounds, series });
    else
      accuracy = chart($("#accuracy"), {
        x: rounds,
        series,
        y: [0, 1],
        tick: (value) => percent(value, 0),
        value: percent,
        marks:
          chance == null ? [] : [{ y: chance, text: `chance ${percent(chance, 0)}`, color: "text-3", right: true }],
      });
  }
  if (results.alignment && results.uniformity) {
    track = rounds
      .map((round, i) => [results.alignment[i], results.uniformity[i], round])
      .filter(([a, u]) => a != null && u != null);
    if (track.length) {
      if (drawPlane) drawPlane();
      else drawPlane = plane($("#plane"), () => [{ label: "global encoder", points: track }]);
    }
  }
}

/* client metrics: one line per client, or a band */
const NEW = 12; /* the slot of clients that the key does not have yet: no colour */
const dashes = (slot) => (slot >= 6 && slot < 12 ? [5, 3] : undefined);
function seriesOf({ lines, band, rounds }) {
  const clients = Object.entries(lines).map(([client, y]) => ({
    client,
    label: client,
    y,
    width: 1.2,
    slot: slots.get(client)?.slot ?? (slots.size ? NEW : 0),
    dash: dashes(slots.get(client)?.slot),
  }));
  if (!band) return { x: rounds, series: clients };
  return {
    x: rounds,
    series: [
      { label: "90th percentile", band: "high", y: band.high, width: 0 },
      { label: "10th percentile", band: "low", y: band.low, width: 0 },
      {
        label: "median",
        y: band.median,
        color: "accent",
        width: 2,
        end: short(band.median.findLast((value) => value != null)),
      },
      ...clients,
    ],
  };
}
const ALARMS = {
  effective_rank: root.dataset.rankAlarm,
  feature_std: root.dataset.stdAlarm,
  embedding_std: root.dataset.zAlarm,
};
function clientChart(selector, buttons) {
  const element = $(selector);
  const group = $(buttons);
  let shown = null;
  let name = null;
  const press = () => {
    for (const button of $$("button", group)) button.setAttribute("aria-pressed", button.dataset.name === name);
  };
  const show = async () => {
    const names = $$("button", group).map((button) => button.dataset.name);
    if (!names.length) return;
    if (!names.includes(name)) name = names[0];
    press();
    const wanted = name;
    const pin = chosen;
    const found = seriesOf(
      await load(`metric.json?${new URLSearchParams([["name", wanted], ...(pin ? [["pin", pin]] : [])])}`),
    );
    if (wanted !== name || pin !== chosen) return; /* another metric or client was chosen meanwhile */
    if (!found.series.some((line) => line.y.some((value) => value != null))) {
      if (!shown) element.dataset.empty = "No client has sent this metric yet";
      return;
    }
    const alarm = +ALARMS[name];
    const marks = alarm ? [{ y: alarm, text: `alarm below ${short(alarm)}`, zone: true }] : [];
    const settings = {
      ...found,
      right: found.series.some((line) => line.end) ? 44 : 14,
      y: alarm ? [0, null] : [null, null],
    };
    if (shown?.name === name) shown.chart.set(found);
    else if (shown) {
      shown.chart.set({ ...settings, marks });
      shown.name = name;
    } else shown = { name, chart: chart(element, { ...settings, marks }) };
    if (pinned) focusClient(pinned);
  };
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    name = button.dataset.name;
    press();
    quietly(show);
  });
  return show;
}
let chosen = $("#pin")?.value; /* browsers may keep the choice across a reload */
const showLoss = clientChart("#loss", "#terms");
const showWatch = clientChart("#watch", "#inside");
key.addEventListener("change", (event) => {
  chosen = event.target.value;
  quietly(showLoss);
  quietly(showWatch);
});

/* divergence, one cell per client and round */
let cells = null;
let drawHeat = null;
async function showHeat() {
  if ($("#heat").dataset.empty && !drawHeat) return;
  const payload = await load("heat.json?name=divergence");
  if (payload.last.every((value) => value == null)) return;
  cells = decoded(payload);
  showScale(payload);
  if (drawHeat) drawHeat();
  else drawHeat = heat($("#heat"), () => cells, slots);
}

const showMaps = embedding(load);
const timeline = gantt(root, load);
keys["["] = () => timeline.move(-1);
keys["]"] = () => timeline.move(1);
keys.p = () => $("#pause")?.click();

/* Work that is requested again while it loads is repeated once afterwards, so that requests do not pile up on a slow
   connection. */
const loading = new Map();
const places = new Map([
  [showCurves, [$("#accuracy"), $("#plane")]],
  [showLoss, [$("#loss")]],
  [showWatch, [$("#watch")]],
  [showHeat, [$("#heat")]],
  [showMaps, [$("#embedding")]],
]);
async function quietly(work) {
  if (loading.has(work)) {
    loading.set(work, true);
    return;
  }
  do {
    loading.set(work, false);
    await showLoaded(places.get(work) ?? [], work);
  } while (loading.get(work));
  loading.delete(work);
}
quietly(() => timeline.show(null));
/* even what is below the fold: a page may be printed before it is scrolled */
for (const work of places.keys()) quietly(work);

/* Apply patches. An open dialog or menu is not replaced, nor anything unchanged: text may be selected in it. */
const patches = $("#patch");
let shape = $("#shape").value;
document.body.addEventListener("htmx:oobBeforeSwap", ({ detail }) => {
  const { target, fragment } = detail;
  const [only] = fragment.children;
  const next = document.createElement("div");
  next.append(...(only?.id === target.id ? only.cloneNode(true) : fragment.cloneNode(true)).childNodes);
  const isSame = target.matches(":not(input)") && next.innerHTML === target.innerHTML;
  if (isSame || target.closest("dialog[open], details[open]")) detail.shouldSwap = false;
});
/* screen readers announce a change of the run's status, but not those of each round */
const status = () => $("#state .st").textContent.split(" · ")[0].trim().replace("Distilling", "Running");
let announced = status();
patches.addEventListener("htmx:afterRequest", (event) => {
  if (!event.detail.successful) return;
  if (status() !== announced) {
    announced = status();
    $("#announced").textContent = `${announced}. ${$("#reason").textContent.trim()}`;
  }
  const now = $("#shape");
  if (timeline.rename()) quietly(timeline.refresh);
  if (pinned) focusClient(pinned);
  if (now.value === shape) return;
  shape = now.value;
  Object.assign(root.dataset, { live: now.dataset.live, state: now.dataset.state });
  for (const place of [...places.values()].flat()) if (!$("canvas", place)) place.dataset.empty = now.dataset[place.id];
  readSlots();
  showPinned();
  if ($("#pin")) $("#pin").value = chosen ?? "";
  if ($("#pin") && !$("#pin").value) chosen = "";
  for (const work of places.keys()) quietly(work);
});

live(root, url, (kinds) => {
  document.body.dispatchEvent(new CustomEvent("run:changed"));
  quietly(timeline.refresh);
  if ([...kinds].some((kind) => kind.startsWith("round.") || kind.startsWith("evaluation.") || kind.startsWith("run.")))
    for (const work of places.keys()) quietly(work);
});
