// Drawings: from data to SVG, without a request and without state. The page of the demo is drawn by the same code.

import { s } from "./dom.js";
import { bytes, count, frontier, instant, many, seconds, short } from "./format.js";

const LEVEL_MAX = 6;
const TICK_CHARS = 7.2; // pixels of a digit
const GUTTER = 54; // pixels for the scale of sizes, beside the batches
const SCALE = [[64, "64 B"], [4096, "4 KiB"], [262144, "256 KiB"], [16777216, "16 MiB"], [1073741824, "1 GiB"]];

function drawing(width, height, label, ...parts) {
  return s(
    "svg",
    { class: "drawing", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...parts,
  );
}

function text(x, y, words, anchor = "start", kind = null) {
  return s("text", { x, y, "text-anchor": anchor, class: kind }, words);
}

function line(kind, x1, y1, x2, y2) {
  return s("line", { class: kind, x1, y1, x2, y2 });
}

/** What was written last: a bar for each commit, by its rows. `recent`: [milliseconds, rows, bytes] each. */
export function sparkline(recent, width = 120, height = 24) {
  const most = Math.max(1, ...recent.map(([, rows]) => Math.log1p(rows)));
  const step = width / 32, first = 32 - recent.length;
  const bars = recent.map(([, rows], index) => {
    const tall = Math.max(1.5, (height * Math.log1p(rows)) / most);
    return `M${((first + index) * step).toFixed(1)} ${height}v-${tall.toFixed(1)}h${(step - 1).toFixed(1)}v${
      tall.toFixed(1)
    }z`;
  });
  return s(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    line("axis", 0, height - 0.5, width, height - 0.5),
    s("path", { class: "bar-rows", d: bars.join("") }),
  );
}

/** Where each batch stands, in pixels `[left, right)`: by time, or each as wide as the others. */
export function places(batches, width, byTime) {
  if (!batches.length) return [];
  const lower = Number(batches[0].lower[0] ?? 0);
  const last = batches[batches.length - 1];
  const upper = last.upper.length ? Number(last.upper[0]) : Number(last.lower[0]) + 1;
  const span = Math.max(1, upper - lower);
  return batches.map((batch, index) => {
    if (!byTime) return [(width * index) / batches.length, (width * (index + 1)) / batches.length];
    const end = batch.upper.length ? Number(batch.upper[0]) : upper;
    return [(width * (Number(batch.lower[0]) - lower)) / span, (width * (end - lower)) / span];
  });
}

/** Whether most batches would be seen if their width was their time. */
export function isEvenInTime(batches, width) {
  const seen = places(batches, width, true).filter(([left, right]) => right - left >= 3);
  return seen.length * 5 >= batches.length * 4;
}

/** In words what a batch is. */
export function batchInWords(batch) {
  const what = batch.batches > 1 ? `${count(batch.batches)} batches` : "batch";
  const where = batch.rows === 0
    ? "no updates"
    : batch.inline_bytes >= batch.bytes
    ? "inline, in the State"
    : batch.inline_bytes
    ? "partly inline"
    : "in the blob store";
  return `${what} [${frontier(batch.lower)}, ${batch.upper.length ? batch.upper[0] : "∞"}): ${
    many(batch.rows, "update")
  }, ${bytes(batch.bytes)}, ` +
    `${many(batch.runs, "run")}, ${many(batch.parts, "part")}, level ${batch.level}, ${where}${
      batch.merging ? ", being merged" : ""
    }`;
}

/** The batches of a trace: where in time, how large, of how many runs, on which level, and what is being merged. */
export function traceDrawing(trace, wholeWidth, { byTime, selected = -1 }) {
  const height = wholeWidth < 500 ? 190 : 240, base = height - 40, top = 18;
  const gutter = trace.batches.length ? GUTTER : 0, width = wholeWidth - gutter;
  const most = Math.max(2, ...trace.batches.map((batch) => Math.log2(batch.bytes + 1)));
  const spots = places(trace.batches, width, byTime);
  const slots = trace.batches.map((batch, index) =>
    slot(batch, spots[index], { base, top, most, index, isAt: index === selected })
  );
  const scale = SCALE.filter(([size]) => gutter && Math.log2(size) < most).map(([size, words]) => {
    const y = base - ((base - top) * Math.log2(size)) / most;
    return [line("axis", gutter, y, wholeWidth, y), text(gutter - 6, y + 4, words, "end", "scale")];
  });
  const label = `${many(trace.batch_count, "batch", "batches")}, ${many(trace.rows, "update")}, ${
    bytes(trace.bytes)
  }`;
  return drawing(
    wholeWidth,
    height,
    label,
    scale.flat(),
    s(
      "g",
      { transform: `translate(${gutter} 0)` },
      line("axis", 0, base, width, base),
      slots,
      merges(trace, spots, base, top),
      frontiers(trace, spots, width, base, byTime),
    ),
  );
}

function slot(batch, [left, right], { base, top, most, index, isAt }) {
  const wide = Math.max(1, right - left - (right - left > 4 ? 1.5 : 0));
  const tall = batch.bytes ? Math.max(3, ((base - top) * Math.log2(batch.bytes + 1)) / most) : 3;
  const isInline = batch.rows > 0 && batch.inline_bytes >= batch.bytes;
  const kind = batch.rows === 0 ? "empty" : isInline ? "inline" : `batch l${Math.min(LEVEL_MAX, batch.level)}`;
  const runs = Math.min(batch.runs, Math.floor(tall / 4), 24);
  const seams = Array.from({ length: Math.max(0, runs - 1) }, (_, n) => base - (tall * (n + 1)) / runs);
  const shape = { x: left.toFixed(2), width: wide.toFixed(2) };
  return s(
    "g",
    { class: `slot${isAt ? " at" : ""}`, "data-index": index },
    s("rect", { class: "hit", ...shape, y: 0, height: base }),
    s("rect", {
      class: kind,
      ...shape,
      y: (base - tall).toFixed(2),
      height: tall.toFixed(2),
      rx: wide > 6 ? 2 : 0,
    }),
    seams.map((y) => line("run", left, y, left + wide, y)),
    s("title", {}, batchInWords(batch)),
  );
}

function merges(trace, spots, base, top) {
  return trace.merges.filter((merge) => merge.lower !== null).map((merge) => {
    const inside = trace.batches.map((batch, index) => [batch, spots[index]]).filter(([batch]) =>
      batch.merging &&
      batch.lower[0] >= merge.lower[0] &&
      (!merge.upper.length || (batch.upper.length && batch.upper[0] <= merge.upper[0]))
    );
    if (!inside.length) return null;
    const left = inside[0][1][0], right = inside[inside.length - 1][1][1];
    const part = merge.rows ? Math.min(1, merge.done_rows / merge.rows) : 0;
    return s(
      "g",
      {},
      s("rect", {
        class: "merging",
        x: left,
        y: top - 8,
        width: Math.max(4, right - left),
        height: base - top + 8,
        rx: 3,
      }),
      s("rect", { class: "done", x: left, y: base + 2, width: Math.max(0, (right - left) * part), height: 3 }),
      s(
        "title",
        {},
        `merge of ${many(merge.batches, "batch", "batches")}: ${count(merge.done_rows)} of ${
          many(merge.rows, "update")
        } written`,
      ),
    );
  });
}

/** Times below the batches; since and upper as lines. */
function frontiers(trace, spots, width, base, byTime) {
  if (!trace.batches.length) return [text(width / 2, base / 2, "no updates yet", "middle")];
  const lower = trace.batches[0].lower[0] ?? 0;
  const parts = [];
  const x = trace.since.length ? xOf(trace, spots, trace.since[0], byTime) : width;
  parts.push(line("since", x, 6, x, base + 6), line("upper", width - 0.8, 6, width - 0.8, base + 6));
  const sinceText = `since ${frontier(trace.since)}`, upperText = `upper ${frontier(trace.upper)}`;
  const room = width - (upperText.length + sinceText.length) * TICK_CHARS - 24;
  parts.push(text(width, base + 20, upperText, "end", "strong"));
  if (x < room) {
    parts.push(text(x < 60 ? Math.max(0, x) : x, base + 20, sinceText, x < 60 ? "start" : "middle", "strong"));
  } else parts.push(text(Math.max(0, Math.min(x, width - 4)), base + 35, sinceText, "end", "strong"));
  if (x > 90 + String(lower).length * TICK_CHARS) parts.push(text(0, base + 20, String(lower)));
  return parts;
}

function xOf(trace, spots, time, byTime) {
  const at = trace.batches.findIndex((batch) => !batch.upper.length || batch.upper[0] > time);
  if (at < 0) return spots[spots.length - 1][1];
  const [left, right] = spots[at], batch = trace.batches[at];
  const span = batch.upper.length ? Number(batch.upper[0]) - Number(batch.lower[0]) : 1;
  return byTime || span
    ? left + ((right - left) * (Number(time) - Number(batch.lower[0]))) / Math.max(1, span)
    : left;
}

/** A line of times with what is readable, and a mark for each that holds one. */
export function holdsDrawing(trace, width) {
  const height = 76, y = 28;
  const times = trace.holds.filter((hold) => hold.since.length).map((hold) => Number(hold.since[0]));
  const upper = trace.upper.length ? Number(trace.upper[0]) : Math.max(0, ...times) + 1;
  const first = Math.min(
    trace.since.length ? Number(trace.since[0]) : upper,
    ...times,
    trace.batches.length ? Number(trace.batches[0].lower[0] ?? 0) : 0,
  );
  const span = Math.max(1, upper - first), left = 6, right = width - 6;
  const x = (time) => left + ((right - left) * (Math.min(Number(time), upper) - first)) / span;
  const since = trace.since.length ? x(trace.since[0]) : right;
  const marks = trace.holds.filter((hold) => hold.since.length).map((hold) => {
    const at = x(hold.since[0]);
    return s(
      "g",
      {},
      s("path", { class: `hold ${hold.kind}`, d: `M${at} ${y - 9} l-5 -9 h10 z` }),
      s("title", {}, `${holdInWords(hold)} holds ${hold.since[0]}`),
    );
  });
  return drawing(
    width,
    height,
    `since ${frontier(trace.since)}, upper ${frontier(trace.upper)}, ${many(trace.holds.length, "hold")}`,
    s("rect", { class: "gone", x: left, y: y - 5, width: Math.max(0, since - left), height: 10, rx: 2 }),
    s("rect", { class: "readable", x: since, y: y - 5, width: Math.max(0, right - since), height: 10, rx: 2 }),
    line("since", since, y - 12, since, y + 12),
    line("upper", right, y - 12, right, y + 12),
    marks,
    text(
      since < width / 3 ? Math.max(left, since - 4) : since,
      y + 26,
      `since ${frontier(trace.since)}`,
      since < width / 3 ? "start" : since > (width * 2) / 3 ? "end" : "middle",
      "strong",
    ),
    text(right, since > (width * 2) / 3 ? y + 41 : y + 26, `upper ${frontier(trace.upper)}`, "end", "strong"),
  );
}

/** In words who holds a time. */
export function holdInWords(hold) {
  const kinds = {
    cursor: ["cursor", "cursors"],
    reader: ["reader", "readers"],
    point: ["reader of one time", "readers of one time"],
    tag: ["tag", "tags"],
  };
  if (hold.kind === "history") return "the shard's history";
  const names = hold.names.length ? ` ${hold.names.join(", ")}` : "";
  return `${hold.count > 1 ? many(hold.count, ...kinds[hold.kind]) : kinds[hold.kind][0]}${names}`;
}

/** Two frontiers as they moved while somebody looked. `samples`: [milliseconds, since, upper] each, ascending. */
export function movementDrawing(samples, width) {
  const height = 130, left = 6, right = width - 6, top = 16, base = height - 22;
  const hasMoved = [1, 2].some((which) => new Set(samples.map((one) => one[which])).size > 1);
  if (!hasMoved) {
    return drawing(
      width,
      height,
      "No movement seen yet",
      line("axis", left, base, right, base),
      text(width / 2, height / 2, "neither has moved yet", "middle"),
    );
  }
  const start = samples[0][0], [end, since, upper] = samples[samples.length - 1];
  const values = samples.flatMap(([, since, upper]) => [since, upper]).filter((value) => value !== null).map(
    Number,
  );
  const least = Math.min(...values), most = Math.max(...values);
  const x = (at) => left + ((right - left) * (at - start)) / Math.max(1, end - start);
  const y = (value) => base - ((base - top) * (Number(value) - least)) / Math.max(1, most - least);
  const steps = (which) =>
    samples.filter((one) => one[which] !== null).map((one, index, all) =>
      `${index ? `H${x(one[0]).toFixed(1)} V` : `M${x(one[0]).toFixed(1)} `}${y(one[which]).toFixed(1)}${
        index === all.length - 1 ? ` H${right}` : ""
      }`
    ).join(" ");
  return drawing(
    width,
    height,
    `since and upper over the last ${seconds((end - start) / 1000)}`,
    line("axis", left, base, right, base),
    s("path", { class: "curve second", d: steps(1) }),
    s("path", { class: "curve", d: steps(2) }),
    text(left, height - 4, `${seconds((end - start) / 1000)} ago`),
    text(right, height - 4, "now", "end"),
    text(right, top - 4, `upper ${upper ?? "closed"}`, "end", "strong"),
    text(left, top - 4, `since ${since ?? "closed"}`),
  );
}

/** Commits by the clock: a bar for each, by what it added. `recent` as the trace tells it, the newest first. */
export function commitsDrawing(recent, width, nowMs) {
  const height = 150, left = 44, right = width - 6, top = 14, base = height - 24;
  const added = recent.filter((one) => one.rows > 0 && one.operation !== "merge" && one.operation !== "bundle");
  if (!added.length) {
    return drawing(
      width,
      height,
      "No recent commits",
      text(width / 2, height / 2, "nothing was written lately", "middle"),
    );
  }
  const oldest = Math.min(...added.map((one) => one.at_ms)), span = Math.max(1000, nowMs - oldest);
  const most = Math.max(...added.map((one) => one.rows));
  const x = (at) => left + ((right - left) * (at - oldest)) / span;
  const bars = added.map((one) => {
    const tall = Math.max(2, ((base - top) * one.rows) / most);
    return s(
      "g",
      {},
      s("rect", {
        class: "bar-rows",
        x: (Math.min(x(one.at_ms), right - 3)).toFixed(1),
        y: (base - tall).toFixed(1),
        width: 3,
        height: tall.toFixed(1),
        rx: 1,
      }),
      s(
        "title",
        {},
        `v${one.seqno} ${one.operation}: ${many(one.rows, "update")}, ${bytes(one.bytes)}, ${instant(one.at_ms)}`,
      ),
    );
  });
  return drawing(
    width,
    height,
    `${many(added.length, "commit")} of the last ${seconds(span / 1000)}`,
    line("axis", left, base, right, base),
    line("axis", left, top, right, top),
    text(left - 6, top + 4, short(most), "end"),
    text(left - 6, base + 4, "0", "end"),
    bars,
    text(left, height - 6, `${seconds(span / 1000)} ago`),
    text(right, height - 6, "now", "end"),
  );
}
