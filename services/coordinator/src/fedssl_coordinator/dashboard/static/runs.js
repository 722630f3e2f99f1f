/* The list of runs: select some and compare them. */
import { $, $$, keys } from "./shell.js";

const bar = $("#compare"), list = $("#list");
const boxes = () => $$('input[name="runs"]', list);
const show = () => {
  const chosen = boxes().filter((box) => box.checked);
  for (const box of boxes()) box.closest("tr").classList.toggle("sel", box.checked);
  bar.hidden = chosen.length === 0;
  $("output", bar).textContent = chosen.length;
  $("button.pri", bar).disabled = chosen.length < 2;
};
list.addEventListener("change", show);
bar.addEventListener("reset", () => { for (const box of boxes()) box.checked = false; setTimeout(show); });
document.body.addEventListener("htmx:afterSwap", () => { current = -1; show(); });
show();

let current = -1;
const move = (step) => {
  const rows = $$("tbody tr", list);
  if (!rows.length) return;
  current = Math.max(0, Math.min(rows.length - 1, current + step));
  rows.forEach((row, index) => row.classList.toggle("cur", index === current));
  $("a", rows[current]).focus();
};
Object.assign(keys, {
  j: () => move(1), k: () => move(-1),
  x: () => { const box = boxes()[current]; if (box) { box.checked = !box.checked; show(); } },
  c: () => { if (boxes().filter((box) => box.checked).length > 1) bar.requestSubmit(); },
});
