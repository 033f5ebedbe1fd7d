// A run as it went: frontiers and a listener, bytes, batches, and what happened when. From data to SVG, as in draw.js.

import { s } from "./dom.js";
import { line, text } from "./draw.js";
import { bytes, seconds } from "./format.js";

const LANES = [["frontiers", 170], ["bytes", 110], ["batches", 70]];
const GAP = 34;
const NUMBER_ROWS = [10, 22, 34];
const NUMBER_WIDTH = 14;

/**
 * `run`: looks `[s, since, upper, batches, bytes, bytes of all blobs]`, heard `[s, upper]`, marks `[s, kind, words]`.
 */
export function timelineDrawing(run, width) {
  const left = 6, right = width - 6, top = 40;
  const end = Math.max(1, ...run.looks.map(([at]) => at), ...run.marks.map(([at]) => at));
  const x = (at) => left + ((right - left) * Math.max(0, at)) / end;
  const parts = [];
  let y = top;
  for (const [lane, tall] of LANES) {
    parts.push(...LANE[lane](run, { x, left, right, top: y + 16, base: y + tall }));
    y += tall + GAP;
  }
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part, index) =>
    text(x(end * part), y - 8, seconds(end * part), index === 0 ? "start" : index === 4 ? "end" : "middle")
  );
  const events = run.marks.filter(([, kind]) => kind === "event").map(([at], index) =>
    numbered(index + 1, x(at), top, y - GAP)
  );
  const commits = run.marks.filter(([, kind]) => kind === "commit").map(([at, , words]) =>
    s("g", {}, line("tick", x(at), y - GAP, x(at), y - GAP + 8), s("title", {}, words))
  );
  return s(
    "svg",
    {
      class: "drawing",
      viewBox: `0 0 ${width} ${y}`,
      role: "img",
      "aria-label": `The run of ${seconds(end)} as a timeline`,
    },
    spread(events),
    parts,
    commits,
    ticks,
  );
}

/** Numbers that would lie on one another stand in rows. */
function spread(events) {
  const last = NUMBER_ROWS.map(() => -Infinity);
  return events.map(({ at, group, label }) => {
    const free = last.findIndex((before) => at - before >= NUMBER_WIDTH);
    const row = free < 0 ? last.indexOf(Math.min(...last)) : free;
    label.setAttribute("y", NUMBER_ROWS[row]);
    last[row] = at;
    return group;
  });
}

function numbered(number, at, top, base) {
  const label = text(at, 12, String(number), "middle", "strong");
  return { at, label, group: s("g", {}, line("event-line", at, top, at, base), label) };
}

function steps(points, x, y) {
  return points.map(([at, value], index) =>
    `${index ? `H${x(at).toFixed(1)}V` : `M${x(at).toFixed(1)} `}${y(value).toFixed(1)}`
  ).join("");
}

function scale(values, { top, base }) {
  const most = Math.max(1, ...values);
  return (value) => base - ((base - top) * value) / most;
}

const LANE = {
  frontiers(run, lane) {
    const open = run.looks.filter(([, since, upper]) => since >= 0 && upper >= 0);
    const y = scale(open.map(([, , upper]) => upper), lane), { x, left, right, top, base } = lane;
    const upper = open.map((one) => [one[0], one[2]]), since = open.map((one) => [one[0], one[1]]);
    return [
      line("axis", left, base, right, base),
      text(left, top - 6, "upper, the listener (dashed), since (thin)", "start", "strong"),
      s("path", { class: "curve", d: steps(upper, x, y) }),
      s("path", { class: "curve heard", d: steps(run.heard, x, y) }),
      s("path", { class: "curve second", d: steps(since, x, y) }),
    ];
  },
  bytes(run, lane) {
    const { x, left, right, top, base } = lane, most = Math.max(0, ...run.looks.map((one) => one[5]));
    const y = scale(run.looks.map((one) => one[5]), lane);
    const all = run.looks.map((one) => [one[0], one[5]]), live = run.looks.map((one) => [one[0], one[4]]);
    const area = all.length
      ? `${steps(all, x, y)}H${x(all[all.length - 1][0]).toFixed(1)}V${base}H${x(all[0][0]).toFixed(1)}z`
      : "";
    return [
      line("axis", left, base, right, base),
      text(left, top - 6, "bytes: of batches, and of all blobs", "start", "strong"),
      text(right, top - 6, bytes(most), "end"),
      s("path", { class: "area", d: area }),
      s("path", { class: "curve", d: steps(live, x, y) }),
    ];
  },
  batches(run, lane) {
    const { x, left, right, top, base } = lane, y = scale(run.looks.map((one) => one[3]), lane);
    return [
      line("axis", left, base, right, base),
      text(left, top - 6, "batches", "start", "strong"),
      text(right, top - 6, String(Math.max(0, ...run.looks.map((one) => one[3]))), "end"),
      s("path", { class: "curve", d: steps(run.looks.map((one) => [one[0], one[3]]), x, y) }),
    ];
  },
};
