// What time it is at the server. The clock of this machine may be wrong by a day, and every age would be with it.

const EXACT_MS = 2_000; // the header Date has whole seconds, and comes after some time

let aheadMs = 0;

/** Take the header Date of an answer that has just come; null: there is none. */
export function heard(date) {
  const told = Date.parse(date ?? "");
  if (Number.isNaN(told)) return;
  const found = Date.now() - told;
  aheadMs = Math.abs(found) <= EXACT_MS ? 0 : found;
}

/** Milliseconds since 1970, by the server's clock. */
export function nowMs() {
  return Date.now() - aheadMs;
}
