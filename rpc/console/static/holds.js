// The frontiers, how they move, and who holds what.

import { fill, h } from "./dom.js";
import { holdInWords, holdsDrawing, movementDrawing } from "./draw.js";
import { frontier, many, seconds } from "./format.js";
import { panel, table, whenSized } from "./panel.js";

const SAMPLES_MAX = 600;

export function holdsPanel(shard) {
  let width = 0, trace = null;
  const samples = [];
  const line = h("div"), moves = h("div"), list = h("div"), told = h("p", { class: "soft" });
  const made = panel("Frontiers, and who holds them");
  made.loading();

  function draw() {
    if (!trace || !width) return;
    fill(line, holdsDrawing(trace, width));
    fill(moves, movementDrawing(samples, width));
  }

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
    fill(
      list,
      found.holds.length
        ? table(
          "Holds",
          [["who", false], ["holds", true], ["lapses in", true]],
          found.holds.map((
            hold,
          ) => [
            h("td", { class: "wrap", textContent: holdInWords(hold) }),
            frontier(hold.since),
            hold.lapses_in_s === null ? "never" : seconds(hold.lapses_in_s),
          ]),
        )
        : null,
    );
    draw();
  });
  return made.element;
}
