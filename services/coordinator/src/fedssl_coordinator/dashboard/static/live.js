/* One EventSource while the page is visible. Events are merged into at most one change per second.

   The stream ends when the run ends. From then on the page polls, until the last evaluation has ended too. */
import { $, problem } from "./layout.js";

const BEAT = 5000; /* progress sends no events, so the page polls for it */

export function live(root, url, onChange) {
  const sign = $(".top .live");
  const ago = $("#ago");
  let source = null;
  let after = root.dataset.after;
  let pending = null;
  let kinds = new Set();
  let changed = Date.now();
  let beat = null;
  let again = null;
  let behind = null;
  const showStatus = (text, isOff) => {
    sign.hidden = false;
    sign.classList.toggle("off", isOff);
    const words = $("span", sign);
    if (words.textContent !== text) words.textContent = text; /* screen readers announce each change */
  };
  const change = (kind) => {
    kinds.add(kind);
    pending ??= setTimeout(() => {
      pending = null;
      onChange(kinds);
      kinds = new Set();
    }, 1000);
  };
  const isOver = () => root.dataset.state === "finished";
  const ask = () => {
    if (isOver()) {
      source?.close();
      source = null;
    }
    if (root.dataset.live) {
      change(isOver() ? "evaluation.awaited" : "beat");
      return;
    }
    close();
    showStatus("Finished", false);
    sign.classList.add("still");
  };
  const open = () => {
    if (beat || document.hidden || !root.dataset.live) return;
    beat = setInterval(ask, BEAT);
    if (isOver()) {
      showStatus("Live", false);
      return;
    }
    source = new EventSource(`${url}/stream?after=${after}`);
    source.onopen = () => showStatus("Live", false);
    source.onerror = () => {
      showStatus("No connection", true);
      if (source?.readyState !== EventSource.CLOSED) return;
      close(); /* the browser does not retry after an error response, such as a proxy's */
      again = setTimeout(() => (root.dataset.live ? open() : ask()), BEAT);
    };
    source.onmessage = (message) => {
      after = message.lastEventId;
      const { kind } = JSON.parse(message.data);
      change(kind);
      if (kind === "run.finished") {
        root.dataset.state = "finished";
        ask();
      }
    };
  };
  const close = () => {
    source?.close();
    source = null;
    clearInterval(beat);
    beat = null;
    clearTimeout(again);
  };
  /* A connection that was lost without a sign, as while a computer sleeps, reports no error. The stream is opened again
     if it has delivered nothing between two answers that are newer than its last event. */
  const checkStream = (newest) => {
    if (!source || !(newest > +after)) return;
    if (behind === after) {
      close();
      open();
    } else behind = after;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else {
      open();
      if (root.dataset.live) ask();
    }
  });
  addEventListener("pagehide", close);
  document.body.addEventListener("htmx:afterRequest", ({ detail }) => {
    if (detail.successful) {
      changed = Date.now();
      checkStream(+detail.xhr.getResponseHeader("Last-Event-ID"));
    }
    const gone = detail.xhr.status === 404 && problem(detail.xhr.responseText); /* a proxy's 404 explains nothing */
    if (gone) {
      root.dataset.live = "";
      close();
      $("#reason").textContent = gone;
      $("#actions").replaceChildren();
      showStatus("Deleted", true);
    } else if (!detail.successful) showStatus("No connection", true);
    else if (root.dataset.live && (isOver() || source?.readyState === EventSource.OPEN)) showStatus("Live", false);
  });
  if (ago && root.dataset.live) {
    ago.hidden = false;
    setInterval(() => {
      const passed = Math.round((Date.now() - changed) / 1000);
      ago.textContent = root.dataset.live ? `Updated ${passed ? `${passed} s ago` : "now"}` : "";
    }, 1000);
  }
  open();
}
