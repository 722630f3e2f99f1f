/* Apply the chosen theme before the first paint. Without a choice, the style sheet follows the system. */
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("fedssl-theme");
  } catch {
    /* no storage in this browser: follow the system */
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
