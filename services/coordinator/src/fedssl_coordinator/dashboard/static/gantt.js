/* Rounds and clients: four rounds in clock time, or the outcome of every round. Drawn on a canvas, for many clients. */
import { $, $$, token } from "./layout.js";
import { BOLD, FONT, hatch, hideTip, picture, pointed, showTip, zoom } from "./canvas.js";
import { bytes, clock, seconds } from "./format.js";

const ROW = 22;
const TOP = 62;
const MARKS = {
  a: [3, 16, "quiet"],
  e: [9, 10, "warn-fill"],
  r: [1, 20, "bad-fill"],
  d: [9, 4, "text-3"],
  l: [6, 10, "fill"],
  o: [10, 2, "text-3"],
};
const STATES = { a: "accepted", e: "expired", r: "rejected", d: "declined", l: "leased", o: "offered" };
const WORDS = {
  offered: "has not claimed the work",
  leased: "is working",
  submitted: "update sent, not checked yet",
  accepted: "update accepted",
  expired: "no update came in time",
  rejected: "update rejected",
  declined: "work declined",
};
const RIBBON = { a: [7, "quiet"], p: [13, "warn-fill"], s: [4, "quiet"], f: [20, "bad-fill"], d: [7, "fill"] };
const KEYS = {
  clock: [
    ["wait", "waiting"],
    ["train", "working"],
    ["distil", "distilling"],
    ["lost", "lost work"],
  ],
  all: [
    ["ok", "accepted"],
    ["exp", "expired"],
    ["rej", "rejected"],
    ["dec", "declined"],
  ],
};

export function gantt(root, load) {
  const element = $("#gantt");
  const named = () => $$("#names [data-client]").map((item) => item.dataset.client);
  let names = named();
  let mode = "clock";
  let last = null;
  let verdicts = "";
  let frame = null;
  let ahead = 0;
  let asked = 0;
  let outcomes = null;
  let hits = [];
  let cell = [0, 0];
  let focused = [0, 0];
  const everybody = () => Object.keys(outcomes?.clients ?? {});
  const dense = () =>
    mode === "all" && everybody().length > 24; /* one row per client, three pixels high, without names */
  const rows = () => (dense() ? everybody() : names);
  const outcomeOf = (client, index) => WORDS[STATES[outcomes?.clients[client]?.[index]]];
  const height = () => (dense() ? TOP + rows().length * 3 + 24 : TOP + (names.length + 1) * ROW + 24);
  const redraw = picture(element, height, draw);

  function draw(g, w, h) {
    hits = [];
    const count = Math.max(verdicts.length, 1);
    const bar = w / count;
    const base = 24;
    [...verdicts].forEach((letter, index) => {
      const [tall, name] = RIBBON[letter];
      g.fillStyle = token(name);
      g.fillRect(index * bar, base - tall, Math.max(1, bar - (bar > 2 ? 1 : 0)), tall);
    });
    g.fillStyle = token("line");
    g.fillRect(0, base + 1, w, 1);
    if (mode === "all") drawAll(g, w, bar);
    else if (frame?.rounds.length) drawClock(g, w, h, bar);
    else {
      g.fillStyle = token("text-3");
      g.fillText(frame ? "No round has been opened" : "The rounds are not loaded", 12, TOP + 12);
    }
  }

  function drawAll(g, w, bar) {
    const step = Math.max(1, Math.round(verdicts.length / (w / 70) / 5) * 5);
    g.fillStyle = token("text-3");
    for (let n = 1; n <= verdicts.length; n += step) {
      g.textAlign = n === 1 ? "left" : "center";
      g.fillText(n === 1 ? "round 1" : String(n), (n - 1) * bar + (n === 1 ? 0 : bar / 2), 44);
    }
    const tall = dense() ? 3 : ROW;
    const colors = Object.fromEntries(Object.entries(MARKS).map(([key, [, , name]]) => [key, token(name)]));
    rows().forEach((client, row) =>
      [...(outcomes.clients[client] ?? "")].forEach((letter, index) => {
        if (!MARKS[letter]) return;
        const [from, size] = dense() ? [0, MARKS[letter][1] < 8 ? 1.2 : 2.6] : MARKS[letter];
        g.fillStyle = colors[letter];
        g.fillRect(index * bar, TOP + row * tall + from, Math.max(0.8, bar - (bar > 3 ? 0.8 : 0)), size);
      }),
    );
    if (document.activeElement === element)
      drawFocus(g, cell[0] * bar, TOP + cell[1] * tall, Math.max(bar, 4), Math.max(tall, 4));
  }

  function drawFocus(g, x, y, w, h) {
    focused = [x + w / 2, y + h];
    g.strokeStyle = token("accent");
    g.lineWidth = 2;
    g.strokeRect(x, y, w, h);
  }

  function drawClock(g, w, h, bar) {
    const now = Date.now() / 1000 + ahead;
    const rounds = frame.rounds;
    const start = rounds[0].opened;
    const ended = rounds.at(-1).closed;
    const end = ended ?? now;
    const span = Math.max(end - start, 1);
    const X = (t) => ((t - start) / (span * (ended ? 1.03 : 1.06))) * w;
    const from = (rounds[0].number - 1) * bar;
    g.strokeStyle = token("text-2");
    g.lineWidth = 1.25;
    g.strokeRect(from, 2, Math.max(3, rounds.length * bar - 1), 22.5);
    rounds.forEach((round, index) => {
      const x = X(round.opened);
      const room = X(rounds[index + 1]?.opened ?? end) - x;
      if (index) {
        g.fillStyle = token("line");
        g.fillRect(Math.round(x) - 2, 32, 1, h - 32);
      }
      g.textAlign = "left";
      g.font = BOLD;
      g.fillStyle = token("text");
      g.fillText(round.number, x + 4, 46);
      const inset = g.measureText(round.number).width + 9;
      g.font = FONT;
      g.fillStyle = token({ partial: "warn", failed: "bad", distilling: "accent" }[round.state] ?? "text-3");
      if (g.measureText(round.state).width + inset + 6 < room || index === rounds.length - 1)
        g.fillText(round.state, x + inset, 46);
      hits.push([
        x,
        32,
        room,
        26,
        `Round ${round.number}: ${round.state}`,
        [
          [round.reason ?? "", ""],
          ["took", seconds((round.closed ?? now) - round.opened)],
        ],
      ]);
    });
    const middle = (row) => TOP + row * ROW + ROW / 2;
    g.fillStyle = token("line");
    for (let row = 0; row <= names.length; row += 1) g.fillRect(0, TOP + row * ROW - 0.5, w, 1);
    for (const part of frame.parts)
      if (names.includes(part.client)) drawPart(g, part, X, middle(names.indexOf(part.client)), now, w);
    drawServer(g, X, middle(names.length), now);
    const steps = Math.max(w < 140 ? 1 : 2, Math.min(8, Math.floor(w / 110)));
    g.fillStyle = token("text-3");
    for (let i = 0; i < steps; i += 1) {
      const at = start + (span * i) / steps;
      g.textAlign = i ? "center" : "left";
      g.fillText(clock(at, span < 600), Math.max(2, X(at)), h - 11);
    }
    if (!ended && root.dataset.live) {
      g.fillStyle = token("accent");
      g.fillRect(Math.round(X(now)), 32, 1.5, h - 54);
      g.textAlign = "center";
      g.fillText("now", Math.min(X(now), w - 12), h - 11);
    }
    if (document.activeElement === element) {
      const round = rounds[Math.min(cell[0], rounds.length - 1)];
      const wide = Math.max(8, X(round.closed ?? end) - X(round.opened) - 4);
      drawFocus(g, X(round.opened) + 1, TOP + cell[1] * ROW + 1, wide, ROW - 2);
    }
  }

  function drawPart(g, part, X, y, now, w) {
    const lost = ["expired", "rejected", "declined"].includes(part.state);
    const until = part.closed ?? now;
    const begun = part.leased ?? until;
    const title = `${part.client}, round ${part.round}${part.attempt > 1 ? `, attempt ${part.attempt}` : ""}`;
    g.fillStyle = token("quiet");
    g.fillRect(X(part.offered), y - 1, Math.max(1, X(begun) - X(part.offered)), 2);
    hits.push([
      X(part.offered),
      y - ROW / 2,
      X(begun) - X(part.offered),
      ROW,
      title,
      [["waited", seconds(begun - part.offered)]],
    ]);
    if (part.leased) {
      const x = X(part.leased);
      const wide = Math.max(2, X(until) - x);
      if (lost) {
        hatch(g, x, y - 6, wide, 12, token("bad-fill"));
        g.strokeStyle = token("bad-fill");
        g.lineWidth = 1;
        g.strokeRect(x + 0.5, y - 5.5, wide - 1, 11);
      } else {
        g.fillStyle = token("fill");
        g.fillRect(x, y - 6, wide, 12);
      }
      const facts = [
        [
          lost ? `lost: ${part.reason ?? WORDS[part.state]}` : part.closed ? "worked" : "working for",
          seconds(until - part.leased),
        ],
      ];
      if (part.bytes) facts.push(["sent", bytes(part.bytes)]);
      hits.push([x, y - ROW / 2, wide, ROW, title, facts]);
    }
    if (part.closed) {
      const x = X(part.closed) + 5;
      mark(g, part.state, x, y);
      if (lost) {
        g.textAlign = "left";
        g.fillStyle = token(part.state === "declined" ? "text-3" : part.state === "rejected" ? "bad" : "warn");
        if (x + 70 < w) g.fillText(part.state, x + 13, y);
      }
      hits.push([
        x - 3,
        y - ROW / 2,
        16,
        ROW,
        title,
        [[part.reason ? `${WORDS[part.state]}: ${part.reason}` : WORDS[part.state], ""]],
      ]);
    }
  }

  function drawServer(g, X, y, now) {
    for (const round of frame.rounds) {
      const work = frame.parts.filter((part) => part.round === round.number).map((part) => part.closed ?? now);
      const until = round.closed ?? now;
      const done = Math.min(until, Math.max(round.opened, ...work));
      g.fillStyle = token("quiet");
      g.fillRect(X(round.opened), y - 1, X(done) - X(round.opened), 2);
      if (round.closed) {
        g.fillStyle = token("text-2");
        g.fillRect(X(done), y - 6, Math.max(2, X(until) - X(done)), 12);
        hits.push([
          X(done) - 2,
          y - ROW / 2,
          Math.max(6, X(until) - X(done)),
          ROW,
          `Coordinator, round ${round.number}`,
          [["aggregated in", seconds(until - done)]],
        ]);
      }
    }
    for (const job of frame.jobs) {
      const until = job.finished ?? now;
      hatch(g, X(job.started), y - 6, Math.max(2, X(until) - X(job.started)), 12, token("fill"), token("accent-bg"));
      hits.push([
        X(job.started),
        y - ROW / 2,
        X(until) - X(job.started),
        ROW,
        `Coordinator, round ${job.round}`,
        [[`distillation ${job.state}`, seconds(until - job.started)]],
      ]);
    }
  }

  element.addEventListener("mousemove", (event) => {
    const [x, y, w] = pointed(element, event);
    if (mode === "all" && outcomes && y > TOP) {
      const row = Math.floor((y - TOP) / (dense() ? 3 : ROW));
      const client = rows()[row];
      const index = Math.floor(x / (w / Math.max(verdicts.length, 1)));
      if (client) {
        showTip(
          client,
          [[`round ${index + 1}`, outcomeOf(client, index) ?? "did not take part"]],
          event.clientX,
          event.clientY,
        );
        return;
      }
    }
    const hit = hits.findLast(([l, t, wide, tall]) => x >= l && x <= l + wide && y >= t && y <= t + tall);
    if (hit) showTip(hit[4], hit[5], event.clientX, event.clientY);
    else hideTip();
  });
  element.addEventListener("mouseleave", hideTip);
  element.addEventListener("click", (event) => {
    /* a click on the ribbon shows that round */
    const [x, y, w] = pointed(element, event);
    if (y < 28) {
      const n = Math.ceil(x / (w / Math.max(verdicts.length, 1)));
      show(Math.min(verdicts.length, n + 1));
    }
  });
  element.addEventListener("keydown", (event) => {
    const step = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
      Home: [-Infinity, 0],
      End: [Infinity, 0],
    }[event.key];
    const width = mode === "all" ? verdicts.length : frame?.rounds.length;
    if (!step || !width) return;
    event.preventDefault();
    cell = [
      Math.max(0, Math.min(width - 1, cell[0] + step[0])),
      Math.max(0, Math.min(rows().length - 1, cell[1] + step[1])),
    ];
    const client = rows()[cell[1]];
    const number = mode === "all" ? cell[0] + 1 : frame.rounds[cell[0]].number;
    const part = frame?.parts.findLast((one) => one.client === client && one.round === number);
    const outcome = (mode === "all" ? outcomeOf(client, cell[0]) : WORDS[part?.state]) ?? "did not take part";
    const text = part?.reason ? `${outcome}: ${part.reason}` : outcome;
    $("#gantt-say").textContent = `${client}, round ${number}: ${text}`;
    redraw();
    const box = element.getBoundingClientRect();
    showTip(client, [[`round ${number}`, text]], box.left + focused[0] * zoom(), box.top + focused[1] * zoom());
  });
  for (const kind of ["focus", "blur"]) element.addEventListener(kind, redraw);
  element.addEventListener("blur", hideTip);

  const drawKey = () => {
    $("#gantt-sub").textContent = mode === "clock" ? "clock time in UTC, four rounds" : "outcome of every round";
    $("#gantt-key").replaceChildren(
      ...KEYS[mode].map(([key, text]) => {
        const item = document.createElement("span");
        const box = document.createElement("i");
        box.className = `k-${key}`;
        item.append(box, text);
        return item;
      }),
    );
  };
  $("#gantt-mode").addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const other of $$("#gantt-mode button")) other.setAttribute("aria-pressed", other === button);
    if (button.dataset.mode === "all") outcomes = await load("outcomes.json");
    if (button.getAttribute("aria-pressed") !== "true") return; /* the other was chosen meanwhile */
    mode = button.dataset.mode;
    cell = [0, 0];
    element.parentElement.classList.toggle("dense", dense());
    drawKey();
    redraw();
  });
  drawKey();

  async function show(number) {
    last = number;
    const query = new URLSearchParams(names.map((name) => ["client", name]));
    if (last) query.set("last", last);
    const mine = (asked += 1);
    const found = await load(`timeline.json?${query}`);
    if (mine !== asked) return; /* another view was requested meanwhile */
    frame = found;
    ahead = found.now - Date.now() / 1000; /* the axis shows the server's clock */
    redraw();
  }
  /* Read the clients in the list next to the canvas again. Return whether they have changed. */
  const rename = () => {
    const found = named();
    const isNew = found.join() !== names.join();
    names = found;
    cell = [cell[0], Math.max(0, Math.min(rows().length - 1, cell[1]))];
    if (isNew) redraw();
    return isNew;
  };
  const move = (step) => {
    if (frame?.rounds.length) show(Math.max(1, Math.min(verdicts.length || 1, frame.rounds.at(-1).number + step)));
  };
  $("#earlier").addEventListener("click", () => move(-1));
  $("#later").addEventListener("click", () => move(1));
  return {
    redraw,
    show,
    move,
    rename,
    refresh: async () => {
      await show(last && last < verdicts.length ? last : null);
      if (mode === "all") {
        outcomes = await load("outcomes.json");
        redraw();
      }
    },
    verdicts: (letters) => {
      verdicts = letters;
      redraw();
    },
  };
}

function mark(g, state, x, y) {
  g.strokeStyle = token({ expired: "warn", rejected: "bad" }[state] ?? "text-3");
  g.lineWidth = 1.6;
  g.lineCap = "round";
  g.beginPath();
  if (state === "accepted") {
    g.moveTo(x, y);
    g.lineTo(x + 2.4, y + 2.5);
    g.lineTo(x + 7, y - 3);
  } else if (state === "declined") {
    g.moveTo(x, y);
    g.lineTo(x + 7, y);
  } else if (state === "rejected") {
    g.moveTo(x, y - 3.2);
    g.lineTo(x + 6.4, y + 3.2);
    g.moveTo(x + 6.4, y - 3.2);
    g.lineTo(x, y + 3.2);
  } else {
    g.arc(x + 4, y, 4.2, 0, 7);
    g.moveTo(x + 4, y - 2.2);
    g.lineTo(x + 4, y);
    g.lineTo(x + 5.8, y + 1.2);
  }
  g.stroke();
  g.lineCap = "butt";
}
