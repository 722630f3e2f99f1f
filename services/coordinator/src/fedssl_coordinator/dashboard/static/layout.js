/* Every page: theme, keyboard, dialogs. Without this script, pages can still be read and forms still work. */
export const $ = (query, root = document) => root.querySelector(query);
export const $$ = (query, root = document) => [...root.querySelectorAll(query)];

const keep = (name, value) => {
  try {
    return value === undefined ? localStorage.getItem(name) : localStorage.setItem(name, value);
  } catch {
    return null;
  }
};

/* theme: light, dark, or the system's */
const system = matchMedia("(prefers-color-scheme: dark)");
const painters = new Set();
export const onPaint = (paint) => {
  painters.add(paint);
  return () => painters.delete(paint);
};
export const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
export const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const repaint = () => {
  for (const paint of painters) paint();
};
system.addEventListener("change", repaint);
document.fonts.ready.then(repaint);

const PICTURES = {
  light:
    '<circle cx="8" cy="8" r="3"/><path d="M8 .9v1.4m0 11.4v1.4M.9 8h1.4m11.4 0h1.4M3 3l1 1m8 8 1 1m0-10-1 1m-8 8-1 1"/>',
  dark: '<path d="M13.5 9.6A6 6 0 0 1 6.4 2.5a6 6 0 1 0 7.1 7.1z"/>',
  auto: '<circle cx="8" cy="8" r="6.25"/><path d="M8 1.75v12.5a6.25 6.25 0 0 0 0-12.5z" fill="currentColor" stroke="none"/>',
};
const NAMES = { light: "light", dark: "dark", auto: "system" };
const themeButton = $("#theme");
const theme = () => document.documentElement.dataset.theme ?? "auto";
const showTheme = () => {
  $("svg", themeButton).innerHTML = PICTURES[theme()];
  themeButton.setAttribute("aria-label", `Theme: ${NAMES[theme()]}`);
};
const nextTheme = () => {
  const order = ["auto", "light", "dark"];
  const chosen = order[(order.indexOf(theme()) + 1) % 3];
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  keep("fedssl-theme", chosen);
  showTheme();
  repaint();
};
if (themeButton) {
  themeButton.hidden = false;
  showTheme();
  themeButton.addEventListener("click", nextTheme);
}

/* paper is white */
let onScreen;
addEventListener("beforeprint", () => {
  onScreen = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  repaint();
});
addEventListener("afterprint", () => {
  if (onScreen) document.documentElement.dataset.theme = onScreen;
  else delete document.documentElement.dataset.theme;
  repaint();
});

/* on narrow pages a table's rows are cards, in which each cell has its column's heading */
const labelCells = () => {
  for (const table of $$("table.cards, table.byrun, table.ledger")) {
    const heads = $$("thead th", table).map((head) => head.textContent);
    for (const row of $$("tbody tr", table))
      if (row.cells.length === heads.length)
        [...row.cells].forEach((cell, i) => {
          if (cell.matches(".opt, .num") && !/^\s*–?\s*$/.test(cell.textContent)) cell.dataset.label = heads[i];
        });
  }
};
labelCells();
document.body.addEventListener("htmx:afterSwap", labelCells);

/* screen readers announce what a filter has left, and not the whole list */
document.body.addEventListener("htmx:afterSwap", ({ target }) => {
  if (target.id !== "list") return;
  const count = $$("tbody tr", target).length;
  $("#found").textContent = $("h2", target)?.textContent ?? `${count} ${count === 1 ? "row" : "rows"}`;
});

/* keyboard: single letters, which users can switch off (WCAG 2.1.4) */
export const keys = { "?": () => $("#keys")?.showModal(), t: nextTheme, "/": () => ($("#q") ?? $("#find"))?.focus() };
let prefix = "";
const places = { r: "/runs", c: "/clients", d: "/public-data", e: "/events" };
addEventListener("keydown", (event) => {
  if (
    event.target.closest("input:not([type=checkbox]), textarea, select, dialog[open]") ||
    event.metaKey ||
    event.ctrlKey ||
    event.altKey
  )
    return;
  if (keep("fedssl-keys") === "off" && event.key !== "?") return;
  if (prefix === "g") {
    prefix = "";
    if (places[event.key]) location.href = places[event.key];
    return;
  }
  if (event.key === "g") {
    prefix = "g";
    setTimeout(() => {
      prefix = "";
    }, 900);
    return;
  }
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key](event);
  }
});
const off = $("#keys-off");
if (off) {
  off.checked = keep("fedssl-keys") === "off";
  off.addEventListener("change", () => keep("fedssl-keys", off.checked ? "off" : "on"));
  $("#keys-open").hidden = false;
  $("#keys-open").addEventListener("click", () => $("#keys").showModal());
}

/* the coordinator's explanation in its answer, if this is one of its answers */
export const problem = (html) =>
  new DOMParser().parseFromString(html, "text/html").querySelector(".note.bad")?.textContent;

/* If a request fails, replace its target with the error: what the target showed may be out of date. */
const explain =
  (text) =>
  ({ detail: { elt, target, xhr } }) => {
    if (elt.getAttribute("hx-swap") === "none") return; /* the live page has its own indicator */
    const note = Object.assign(document.createElement("div"), { className: "note bad", role: "alert" });
    note.textContent = problem(xhr.responseText) ?? text(xhr.status);
    target.replaceChildren(note);
  };
document.addEventListener(
  "htmx:responseError",
  explain((status) => `The coordinator, or a proxy in front of it, returned an error (${status}). Try again later.`),
);
for (const kind of ["htmx:sendError", "htmx:timeout"])
  document.addEventListener(
    kind,
    explain(() => "No connection to the coordinator. Try again later."),
  );

/* Over plain HTTP, Safari shows a page as it was when a person goes back to it. Their session may have ended since. */
addEventListener("pageshow", async ({ persisted }) => {
  if (!persisted) return;
  document.body.style.visibility = "hidden"; /* until the coordinator has answered */
  const asked = fetch("/session", { redirect: "manual", signal: AbortSignal.timeout(10_000) });
  const answer = await asked.catch(() => null);
  if (answer?.ok) document.body.style.visibility = "";
  else location.reload();
});

/* a link to a confirmation page opens the same question as a dialog */
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-dialog]");
  const dialog = link && document.getElementById(link.dataset.dialog);
  if (dialog) {
    event.preventDefault();
    dialog.showModal();
    /* an update may replace the link meanwhile: the browser returns the focus only to the link that had it */
    dialog.addEventListener("close", () => document.getElementById(link.id)?.focus(), { once: true });
  }
});
/* a menu closes when the focus or a click is elsewhere, and with Escape */
const closeMenus = ({ target }) => {
  for (const menu of $$("details.menu[open]")) if (!menu.contains(target)) menu.open = false;
};
for (const kind of ["click", "focusin"]) document.addEventListener(kind, closeMenus);
addEventListener("keydown", (event) => {
  const menu = event.key === "Escape" && event.target.closest("details.menu[open]");
  if (!menu) return;
  menu.open = false;
  $("summary", menu).focus();
});
document.addEventListener("input", (event) => {
  /* enable a button only once the required text has been typed */
  const wanted = event.target.dataset?.confirm;
  if (wanted !== undefined) $("button[data-armed]", event.target.form).disabled = event.target.value !== wanted;
});
for (const input of $$("[data-confirm]"))
  $("button[data-armed]", input.form).disabled = input.value !== input.dataset.confirm;
