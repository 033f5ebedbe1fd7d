// Throughput: what the newest commits have added, by the clock.

import { nowMs } from "./clock.js";
import { fill, h } from "./dom.js";
import { commitsDrawing } from "./draw.js";
import { bytes, count, many, seconds } from "./format.js";
import { panel, whenSized } from "./panel.js";

const TICK_MS = 5_000;
const UPKEEP = new Set(["merge", "bundle", "collect", "age"]);

export function commitsPanel(shard) {
  let width = 0, trace = null;
  const place = h("div"), told = h("p", { class: "soft" });
  const made = panel("Throughput");
  made.loading();

  function draw() {
    if (trace && width) fill(place, commitsDrawing(trace.recent, width, nowMs()));
  }

  const timer = setInterval(() => document.hidden || draw(), TICK_MS);
  shard.signal.addEventListener("abort", () => clearInterval(timer));
  shard.onTrace((found) => {
    if (!trace) {
      made.show(place, told);
      whenSized(place, shard.signal, (value) => {
        width = value;
        draw();
      });
    }
    trace = found;
    const written = found.recent.filter((one) => one.rows > 0 && !UPKEEP.has(one.operation));
    const span = written.length > 1
      ? Math.max(0.001, (written[0].at_ms - written[written.length - 1].at_ms) / 1000)
      : 0;
    const rows = written.reduce((sum, one) => sum + one.rows, 0),
      size = written.reduce((sum, one) => sum + one.bytes, 0);
    told.textContent = span
      ? `The last ${many(written.length, "commit")} with rows came within ${seconds(span)}: ${
        (written.length / span).toFixed(written.length < span ? 3 : 1)
      } commits, ` +
        `${count(Math.round(rows / span))} updates and ${bytes(Math.round(size / span))} a second.`
      : "";
    draw();
  });
  return made.element;
}
