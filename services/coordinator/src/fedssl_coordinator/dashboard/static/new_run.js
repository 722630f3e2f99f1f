/* A new run: show mistakes next to their fields while the user types. */
import { $, $$ } from "./layout.js";

const form = $("#new");
const pick = $("#pick");
$("button", pick).hidden = true;
$("select", pick).addEventListener("change", () => pick.requestSubmit());
document.body.addEventListener("htmx:afterSwap", () => {
  const found = new Map($$("#check [data-key]").map((item) => [item.dataset.key, item.dataset.text]));
  for (const place of $$(".err", form)) {
    const text = found.get(place.dataset.for) ?? "";
    const field = document.getElementById(`f-${place.dataset.for}`);
    if (place.textContent !== text) place.textContent = text;
    if (text) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
});
