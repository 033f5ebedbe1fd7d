// A shard: its panels, all of which live on one stream of what it is made of.

import { events, parse, Problem, shardPath } from "./api.js";
import { fill, h } from "./dom.js";
import { ago, bytes, count, frontier, instant, many } from "./format.js";
import { failure, pause, seen } from "./panel.js";
import { commitsPanel } from "./commits.js";
import { holdsPanel } from "./holds.js";
import { latencyPanel } from "./metrics.js";
import { checkPanel, historyPanel } from "./told.js";
import { rowsPanel } from "./rows.js";
import { tailPanel } from "./tail.js";
import { tracePanel } from "./trace.js";

const WAIT_MS_MAX = 30_000;
const TICK_MS = 5_000; // how long ago something was is told anew
const FINAL = new Set([400, 401, 403, 404]);

/** Show a shard in `main` until the signal. */
export function showShard(main, name, signal) {
  const live = h("span", { class: "live", role: "status", textContent: "connecting" });
  const tiles = h("div", { class: "tiles" });
  const listeners = [];
  const shard = {
    name,
    signal,
    trace: null,
    onTrace: (take) => {
      listeners.push(take);
      if (shard.trace) take(shard.trace);
    },
  };
  const panels = [
    tracePanel,
    rowsPanel,
    holdsPanel,
    commitsPanel,
    tailPanel,
    checkPanel,
    latencyPanel, // as broad as two: with the four before it, it fills rows of two, and of three
    historyPanel,
  ];
  const trouble = h("div");
  fill(
    main,
    h("div", { class: "head" }, h("h1", { textContent: name }), live),
    trouble,
    tiles,
    h("div", { class: "panels" }, panels.map((made) => made(shard))),
  );
  shard.onTrace((trace) => fill(tiles, tilesOf(trace)));
  const timer = setInterval(() => document.hidden || !shard.trace || fill(tiles, tilesOf(shard.trace)), TICK_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  const tell = (kind, words, problem = null) => {
    live.className = `live ${kind}`;
    live.textContent = words;
    fill(trouble, problem ? failure(problem) : null);
  };
  follow(shard, (trace) => {
    shard.trace = trace;
    for (const take of listeners) take(trace);
  }, tell);
}

/** Take every version that the server tells. A page that nobody sees asks for none. */
async function follow({ name, signal }, take, tell) {
  for (let waitMs = 1_000; !signal.aborted;) {
    const stream = new AbortController();
    const stop = () => (document.hidden || signal.aborted) && stream.abort();
    document.addEventListener("visibilitychange", stop);
    signal.addEventListener("abort", stop);
    try {
      if (document.hidden) await seen(signal);
      else {
        for await (const event of events(shardPath(name, "trace"), {}, { signal: stream.signal })) {
          if (event.event !== "trace") continue;
          waitMs = 1_000;
          tell("on", "live");
          take(parse(event.data));
        }
        throw new Problem(0, "ended", "The server has ended the stream.");
      }
    } catch (problem) {
      if (problem.name !== "AbortError") {
        if (!(problem instanceof Problem)) {
          tell("off", "stopped", new Problem(0, "broken", "The page has failed to show this shard. Load it again."));
          throw problem;
        }
        tell(
          "off",
          FINAL.has(problem.status) ? "stopped" : "reconnecting",
          FINAL.has(problem.status) ? problem : null,
        );
        if (FINAL.has(problem.status)) return;
        await pause(waitMs, signal);
        waitMs = Math.min(WAIT_MS_MAX, waitMs * 2);
      }
    } finally {
      stream.abort();
      signal.removeEventListener("abort", stop);
      document.removeEventListener("visibilitychange", stop);
    }
  }
}

function tilesOf(trace) {
  const at = Date.parse(trace.at);
  const found = [
    [frontier(trace.since), "since"],
    [frontier(trace.upper), "upper"],
    [count(trace.rows), "updates kept"],
    [bytes(trace.bytes), "in batches"],
    [count(trace.batch_count), "batches"],
    [bytes(trace.inline_bytes), "inline"],
    [`v${trace.seqno}`, many(trace.writers, "writer")],
    [ago(at), "last commit", instant(at)],
  ];
  return found.map(([value, label, title]) =>
    h(
      "div",
      { class: "tile", title: title ?? String(value) },
      h("b", { textContent: value }),
      h("span", { textContent: label }),
    )
  );
}
