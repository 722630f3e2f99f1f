/* A new run: errors next to their fields while the user types, and only the settings of what is chosen. */
import { $, $$ } from "./layout.js";

const form = $("#new");
const method = $("#method");
$("#show").hidden = true;
method.addEventListener("input", (event) => event.stopPropagation()); /* no check: the page is left */
method.addEventListener("change", () => form.requestSubmit($("#show")));

function showChosen() {
  for (const select of $$("select[data-shows]", form))
    for (const part of $$(`fieldset[data-for="${select.dataset.shows}"]`, form))
      part.hidden = part.dataset.option !== select.value;
}
form.addEventListener("change", showChosen);
showChosen();

/* the aggregator needs a moment for the bytes of a model that it has not seen */
let asked = 0;
const ask = () => {
  if ($("#estimate[data-measuring]") && asked++ < 5)
    setTimeout(() => form.dispatchEvent(new CustomEvent("estimate")), 1500);
};
form.addEventListener("input", () => {
  asked = 0;
});
document.body.addEventListener("htmx:afterSwap", () => {
  const verdict = $("#check .st")?.textContent.trim() ?? "";
  if ($("#checked").textContent !== verdict) $("#checked").textContent = verdict; /* announced if it changes */
  const found = new Map($$("#check [data-key]").map((item) => [item.dataset.key, item.dataset.text]));
  for (const place of $$(".err", form)) {
    const text = found.get(place.dataset.for) ?? "";
    const field = document.getElementById(`f-${place.dataset.for}`);
    if (place.textContent !== text) place.textContent = text;
    if (text) field?.setAttribute("aria-invalid", "true");
    else field?.removeAttribute("aria-invalid");
  }
  ask();
});
ask();
if ("refused" in form.dataset) ($('[aria-invalid="true"]', form) ?? $(".mistakes a", form) ?? $("#check")).focus();
