/* Before the first paint: the theme that was chosen. Without a choice the style sheet follows the system. */
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("fedssl-theme");
  } catch {
    /* the browser keeps nothing: follow the system */
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
