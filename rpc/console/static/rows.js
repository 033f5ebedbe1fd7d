// Rows as of any time, and what changed between two. Read when somebody asks, and never by itself.

import { json, rows as csv, shardPath } from "./api.js";
import { fill, h } from "./dom.js";
import { many } from "./format.js";
import { choice, failure, panel } from "./panel.js";

const ROWS_MAX = 200;
const STEPS_MAX = 2_000;
const WAIT_MS = 200;
const DIFF = "__diff";
const TIME_MAX = 2n ** 63n - 2n;

export function rowsPanel(shard) {
  const view = new Rows(shard);
  shard.onTrace((trace) => view.take(trace));
  return view.element;
}

/** The times on which a slider stops, ascending BigInts: all of them where they are few, else those that are known. */
export function steps(trace) {
  if (!trace.since.length) return [];
  const since = BigInt(trace.since[0]), upper = endOf(trace);
  if (upper <= since) return [];
  if (upper - since <= BigInt(STEPS_MAX)) {
    return Array.from({ length: Number(upper - since) }, (_, index) => since + BigInt(index));
  }
  const ends = [...trace.batches, ...trace.recent].filter((one) => one.upper.length).map((one) =>
    BigInt(one.upper[0]) - 1n
  );
  const found = [since, upper - 1n, ...ends].filter((time) => time >= since && time < upper);
  return [...new Set(found)].sort((a, b) => (a < b ? -1 : a > b ? 1 : 0)).slice(-STEPS_MAX);
}

/** Before it lie the times that a slider offers. A shard that is closed to writes can be read at all times. */
function endOf(trace) {
  if (trace.upper.length) return BigInt(trace.upper[0]);
  const last = trace.batches[trace.batches.length - 1];
  if (!last || (last.batches === 1 && last.rows === 0)) return BigInt(last?.lower[0] ?? 0);
  return TIME_MAX + 1n;
}

class Rows {
  #isShown = false;
  #mode = "contents";
  #asking = new AbortController();
  #timer = 0;

  constructor(shard) {
    this.shard = shard;
    this.end = new Slider("As of", () => this.#soon(), shard);
    this.start = new Slider("Changes since", () => this.#soon(), shard);
    this.start.element.hidden = true;
    this.told = h("p", { class: "notice", role: "status" });
    this.newer = h("button", { type: "button", hidden: true, onclick: () => this.#latest() });
    this.out = h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Rows" });
    const what = choice(
      "What is shown",
      [["contents", "Contents"], ["changes", "Changes"]],
      "contents",
      (mode) => this.#choose(mode),
    );
    this.panel = panel("Rows at any time", { wide: true, tools: [this.newer, what] });
    this.element = this.panel.element;
    this.panel.loading();
    shard.signal.addEventListener("abort", () => this.#asking.abort());
  }

  take(trace) {
    const found = steps(trace);
    if (!found.length) {
      this.#isShown = false;
      this.newer.hidden = true;
      return this.panel.empty(
        !trace.since.length
          ? "The shard is closed to reads."
          : endOf(trace) > 0n
          ? "There is no time to read as of: since has come to upper."
          : "Nothing was written yet: there is no time to read as of.",
      );
    }
    this.end.offer(found);
    this.start.offer(found);
    if (!this.#isShown) {
      this.#isShown = true;
      this.panel.show(this.start.element, this.end.element, this.told, this.out);
      this.start.set(found[Math.max(0, found.length - 2)]);
      this.end.set(found[found.length - 1]);
      this.#soon();
    }
    const latest = found[found.length - 1];
    this.newer.hidden = this.end.time >= latest;
    this.newer.textContent = `Show ${latest}, the latest`;
    return undefined;
  }

  #choose(mode) {
    this.#mode = mode;
    this.start.element.hidden = mode === "contents";
    this.end.label(mode === "contents" ? "As of" : "up to");
    this.#soon();
  }

  #latest() {
    this.end.set(this.end.steps[this.end.steps.length - 1]);
    this.newer.hidden = true;
    this.#soon();
  }

  #soon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), WAIT_MS);
  }

  async #ask() {
    this.#asking.abort();
    const { signal } = (this.#asking = new AbortController());
    const { name } = this.shard, end = this.end.time, start = this.start.time;
    this.out.setAttribute("aria-busy", "true");
    try {
      const found = this.#mode === "contents"
        ? await csv(shardPath(name, "snapshot"), { as_of: end, limit: ROWS_MAX + 1 }, ROWS_MAX, { signal })
        : await csv(shardPath(name, "changes"), { start, end }, ROWS_MAX, { signal });
      if (signal.aborted) return;
      const what = this.#mode === "contents" ? `rows as of ${end}` : `changes from ${start} to ${end}`;
      this.told.textContent = found.more
        ? `The first ${found.rows.length} ${what}, in key order.`
        : `${found.rows.length ? many(found.rows.length, "line") : "None"}: ${what}.`;
      fill(this.out, rowsTable(found, this.#mode === "changes"));
      this.out.dataset.shown = this.#mode === "contents" ? String(end) : `${start}-${end}`;
      this.end.tellWhen();
      if (this.#mode === "changes") this.start.tellWhen();
    } catch (problem) {
      if (problem.name !== "AbortError") fill(this.out, failure(problem));
    } finally {
      if (!signal.aborted) this.out.removeAttribute("aria-busy");
    }
  }
}

/** A time to choose: a slider over the known ones, a field for any, and the wall clock from which it was shown. */
class Slider {
  steps = [];
  time = 0n;

  constructor(words, changed, shard) {
    this.shard = shard;
    this.words = h("span", { textContent: words });
    this.range = h("input", {
      type: "range",
      min: "0",
      step: "1",
      "aria-label": words,
      oninput: () => {
        this.set(this.steps[Number(this.range.value)]);
        changed();
      },
    });
    this.field = h("input", {
      type: "text",
      inputMode: "numeric",
      "aria-label": `${words}: the exact time`,
      class: "mono",
      spellcheck: false,
      onchange: () => this.#typed(changed),
    });
    this.when = h("span", { class: "when" });
    this.element = h("div", { class: "slider" }, this.words, this.range, this.field, this.when);
  }

  label(words) {
    this.words.textContent = words;
    this.range.setAttribute("aria-label", words);
  }

  offer(found) {
    this.steps = found;
    this.range.max = String(found.length - 1);
    if (this.time !== undefined) this.set(this.time);
  }

  /** Stand at this time, or at the next one that can be read. */
  set(time) {
    const least = this.steps[0], most = this.steps[this.steps.length - 1];
    this.time = time < least ? least : time > most ? most : time;
    const at = this.steps.findIndex((step) => step >= this.time);
    this.range.value = String(at);
    this.range.setAttribute("aria-valuetext", `time ${this.time}`);
    if (document.activeElement !== this.field) this.field.value = String(this.time);
  }

  #typed(changed) {
    const text = this.field.value.trim();
    if (!/^\d{1,19}$/.test(text)) {
      this.field.value = String(this.time);
      return;
    }
    this.set(BigInt(text));
    this.field.value = String(this.time);
    changed();
  }

  /** Ask from which wall clock on the time was shown. */
  async tellWhen() {
    const { time } = this;
    try {
      const { timestamp } = await json(shardPath(this.shard.name, "timestamp-of"), { time }, {
        signal: this.shard.signal,
      });
      if (time === this.time) {
        this.when.textContent = timestamp === null ? "Its wall clock is not known." : `Shown from ${timestamp} on.`;
      }
    } catch (problem) {
      if (problem.name !== "AbortError") this.when.textContent = "";
    }
  }
}

/** Rows as a table; with `signed` each says by a sign whether it came or left. */
export function rowsTable(found, signed) {
  const at = found.columns.indexOf(DIFF);
  const names = found.columns.filter((_, index) => index !== at);
  const body = found.rows.map((row) => {
    const diff = at < 0 ? "1" : row[at];
    const cells = row.filter((_, index) => index !== at).map(cell);
    return h(
      "tr",
      { class: signed ? (diff.startsWith("-") ? "left" : "came") : "" },
      h("td", { class: "sign n", textContent: signed ? signOf(diff) : `×${diff}` }),
      cells,
    );
  });
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col", class: "sign n", textContent: signed ? "±" : "times" }),
        names.map((name) => h("th", { scope: "col", textContent: name })),
      ),
    ),
    h("tbody", {}, body),
  );
}

export function cell(value) {
  if (value === null) return h("td", { class: "cell none", textContent: "null" });
  if (value === "") return h("td", { class: "cell none", textContent: "empty text" });
  return h("td", { class: "cell", textContent: value, title: value.length > 40 ? value.slice(0, 2_000) : null });
}

function signOf(diff) {
  return diff.startsWith("-") ? `−${diff.slice(1)}` : `+${diff}`;
}
