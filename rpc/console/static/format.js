// How figures are written: units always, digits aligned, exact where they are times.

import { nowMs } from "./clock.js";

const COUNT = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SPANS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

/** A whole number with separators. */
export function count(value) {
  return COUNT.format(value);
}

/** A number in a few characters, such as 1.2K. */
export function short(value) {
  return SHORT.format(value);
}

/** Bytes, with a unit. */
export function bytes(value) {
  let left = Number(value), unit = 0;
  while (left >= 1024 && unit < UNITS.length - 1) [left, unit] = [left / 1024, unit + 1];
  return `${unit === 0 ? left : left.toFixed(left < 10 ? 2 : left < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

/** Seconds, with a unit, from microseconds to days. */
export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : 1)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  const [unit, size] = SPANS.find(([, one]) => value >= one);
  return `${(value / size).toFixed(unit === "s" ? 0 : 1)} ${unit}`;
}

/** How long ago an instant (milliseconds since 1970) was. */
export function ago(atMs, now = nowMs()) {
  const passed = (now - atMs) / 1000;
  if (passed < 2) return "just now";
  const [unit, size] = SPANS.find(([, one]) => passed >= one);
  return `${Math.floor(passed / size)} ${unit} ago`;
}

/** An instant in UTC, to the second. */
export function instant(atMs) {
  return new Date(atMs).toISOString().replace("T", " ").replace(/\.\d+Z$/, "Z");
}

/** A frontier: its time, or what it means to have none. */
export function frontier(value) {
  return value.length ? String(value[0]) : "closed";
}

/** `n` things, with the right ending. */
export function many(n, one, more = `${one}s`) {
  return `${count(n)} ${Number(n) === 1 ? one : more}`;
}

/** A value as JSON, whose numbers keep all their digits: JSON of the browser would refuse a BigInt. */
export function exact(value) {
  if (typeof value === "bigint") return String(value);
  if (Object.is(value, -0)) return "-0";
  if (Array.isArray(value)) return `[${value.map(exact).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, inner]) => `${JSON.stringify(name)}:${exact(inner)}`).join(",")}}`;
}
