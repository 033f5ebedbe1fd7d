// The frontiers, how they move, and who holds what.

import { fill, h } from "./dom.js";
import { holdInWords, holdsDrawing, movementDrawing } from "./draw.js";
import { frontier, many, seconds } from "./format.js";
import { panel, renew, table, whenSized } from "./panel.js";

const SAMPLES_MAX = 600;
const TICK_MS = 5_000; // when a lease lapses is told anew

export function holdsPanel(shard) {
  let width = 0, trace = null, came = 0;
  const samples = [];
  const line = h("div"), moves = h("div"), list = h("div"), told = h("p", { class: "soft" });
  const made = panel("Frontiers, and who holds them");
  made.loading();

  function draw() {
    if (!trace || !width) return;
    fill(line, holdsDrawing(trace, width));
    fill(moves, movementDrawing(samples, width));
  }

  /** The server tells what it has seen lapse by now; between two versions the time goes on here. */
  function lapse() {
    if (!trace) return;
    const passed = (performance.now() - came) / 1000;
    const rows = trace.holds.map((hold) => [
      h("td", { class: "wrap", textContent: holdInWords(hold) }),
      frontier(hold.since),
      hold.lapses_in_s === null ? "never" : lapsesIn(hold.lapses_in_s - passed),
    ]);
    if (rows.length) renew(list, table("Holds", [["who", false], ["holds", true], ["lapses in", true]], rows));
    else fill(list);
  }

  const timer = setInterval(() => document.hidden || lapse(), TICK_MS);
  shard.signal.addEventListener("abort", () => clearInterval(timer));
  shard.onTrace((found) => {
    if (!trace) {
      made.show(line, told, list, h("h3", { textContent: "As they moved while this page was open" }), moves);
      whenSized(line, shard.signal, (value) => {
        width = value;
        draw();
      });
    }
    trace = found;
    samples.push([Date.now(), found.since[0] ?? null, found.upper[0] ?? null]);
    if (samples.length > SAMPLES_MAX) samples.shift();
    const history = found.history_ms === null
      ? "for ever"
      : found.history_ms
      ? `for ${seconds(found.history_ms / 1000)}`
      : "as long as readers hold it";
    told.textContent = `${many(found.readers, "reader")}, ${many(found.cursors, "cursor")}, ${
      many(found.tags, "tag")
    }, ${many(found.writers, "writer")}. History is kept ${history}.`;
    came = performance.now();
    lapse();
    draw();
  });
  return made.element;
}

function lapsesIn(leftS) {
  return leftS > 0 ? seconds(leftS) : "due";
}
