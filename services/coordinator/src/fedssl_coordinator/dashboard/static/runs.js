/* The list of runs: select runs to compare them. */
import { $, $$, keys } from "./layout.js";
import { here } from "./row_keys.js";

const bar = $("#compare");
const list = $("#list");
const boxes = () => $$('input[name="runs"]', list);
const chosen = new Set(); /* including those that the filter, the group or the page of the list hides */
const KEPT = "fedssl-chosen"; /* while this tab is open */
const show = () => {
  const shown = boxes();
  for (const box of shown) {
    box.closest("tr").classList.toggle("sel", box.checked);
    if (box.checked) chosen.add(box.value);
    else chosen.delete(box.value);
  }
  const hidden = new Set(chosen);
  for (const box of shown) hidden.delete(box.value);
  const fields = [...hidden].map((value) => Object.assign(document.createElement("input"), { name: "runs", value }));
  for (const field of fields) field.type = "hidden";
  $("#chosen", bar).replaceChildren(...fields);
  bar.hidden = chosen.size === 0;
  $("output", bar).textContent = chosen.size;
  $("button.pri", bar).disabled = chosen.size < 2;
  sessionStorage.setItem(KEPT, JSON.stringify([...chosen]));
};
const tick = () => {
  for (const box of boxes()) box.checked = chosen.has(box.value);
  show();
};
list.addEventListener("change", show);
bar.addEventListener("reset", () => {
  chosen.clear();
  setTimeout(show); /* after the reset has cleared the boxes */
});
document.body.addEventListener("htmx:afterSwap", tick);
/* another group of runs is searched for the same text */
const keepText = () => {
  for (const link of $$(".tools .seg a")) {
    const url = new URL(link.href);
    if ($("#q").value) url.searchParams.set("q", $("#q").value);
    else url.searchParams.delete("q");
    link.href = url;
  }
};
$("#q").addEventListener("input", keepText);
/* browsers restore boxes and text after the scripts have run, if a person goes back to this page */
addEventListener("pageshow", () => {
  chosen.clear();
  for (const run of JSON.parse(sessionStorage.getItem(KEPT) ?? "[]")) chosen.add(run);
  tick();
  keepText();
});
Object.assign(keys, {
  x: () => {
    const box = here() && $('input[name="runs"]', here());
    if (box) {
      box.checked = !box.checked;
      show();
    }
  },
  c: () => {
    if (chosen.size > 1) bar.requestSubmit();
  },
});
