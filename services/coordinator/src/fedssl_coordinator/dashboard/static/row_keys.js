/* Move through the rows of a table with j and k. */
import { $, $$, keys } from "./layout.js";

let current = -1;
export const rows = () => $$("#list tbody tr");
export const here = () => rows()[current];
const move = (step) => {
  if (!rows().length) return;
  current = Math.max(0, Math.min(rows().length - 1, current + step));
  rows().forEach((row, index) => row.classList.toggle("cur", index === current));
  $("a", here())?.focus();
};
document.body.addEventListener("htmx:afterSwap", () => {
  current = -1;
});
Object.assign(keys, { j: () => move(1), k: () => move(-1) });
