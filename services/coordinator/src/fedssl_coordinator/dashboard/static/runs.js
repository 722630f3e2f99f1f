/* The list of runs: select runs to compare them. */
import { $, $$, keys } from "./layout.js";
import { here } from "./row_keys.js";

const bar = $("#compare");
const list = $("#list");
const boxes = () => $$('input[name="runs"]', list);
const show = () => {
  const chosen = boxes().filter((box) => box.checked);
  for (const box of boxes()) box.closest("tr").classList.toggle("sel", box.checked);
  bar.hidden = chosen.length === 0;
  $("output", bar).textContent = chosen.length;
  $("button.pri", bar).disabled = chosen.length < 2;
};
list.addEventListener("change", show);
bar.addEventListener("reset", () => setTimeout(show)); /* after the reset has cleared the boxes */
document.body.addEventListener("htmx:afterSwap", show);
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
  show();
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
    if (boxes().filter((box) => box.checked).length > 1) bar.requestSubmit();
  },
});
