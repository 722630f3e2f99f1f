/* One EventSource while the page is visible. What arrives is merged into one change a second. */
import { $ } from "./shell.js";

const BEAT = 5000; /* progress is no event: while work goes on it is asked for */

export function live(root, url, onChange) {
  const sign = $(".top .live"), ago = $("#ago");
  let source = null, after = root.dataset.after, pending = null, kinds = new Set(), changed = Date.now(), beat = null, again = null;
  const say = (text, isOff) => { sign.hidden = false; sign.classList.toggle("off", isOff); $("span", sign).textContent = text; };
  const change = (kind) => {
    kinds.add(kind);
    pending ??= setTimeout(() => { pending = null; onChange(kinds); kinds = new Set(); }, 1000);
  };
  const open = () => {
    if (source || document.hidden || !root.dataset.live) return;
    source = new EventSource(`${url}/stream?after=${after}`);
    source.onopen = () => say("Live", false);
    source.onerror = () => {
      say("No connection", true);
      if (source?.readyState !== EventSource.CLOSED) return;
      close(); /* after an answer of an error, a proxy's say, the browser does not try again itself */
      again = setTimeout(open, BEAT);
    };
    source.onmessage = (message) => {
      after = message.lastEventId;
      const { kind } = JSON.parse(message.data);
      change(kind);
      if (kind === "run.finished") { root.dataset.live = ""; close(); say("Finished", false); sign.classList.add("still"); }
    };
    beat = setInterval(() => change("beat"), BEAT);
  };
  const close = () => { source?.close(); source = null; clearInterval(beat); clearTimeout(again); };
  document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else { open(); if (root.dataset.live) change("beat"); } });
  addEventListener("pagehide", close);
  document.body.addEventListener("htmx:afterRequest", (event) => { if (event.detail.successful) changed = Date.now(); });
  if (ago && root.dataset.live) {
    ago.hidden = false;
    setInterval(() => { const passed = Math.round((Date.now() - changed) / 1000); ago.textContent = root.dataset.live ? `Updated ${passed ? `${passed} s ago` : "now"}` : ""; }, 1000);
  }
  open();
}
