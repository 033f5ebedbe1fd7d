// The list of shards. Names come page by page; what each holds is asked for those in sight. Only these are rows here.

import { ask, json } from "./api.js";
import { fill, h } from "./dom.js";
import { sparkline } from "./draw.js";
import { ago, bytes, frontier, instant, many, short } from "./format.js";
import { failure } from "./panel.js";

const ROW = 44; // pixels
const BEYOND = 8; // rows above and below those in sight
const ROWS_MAX = 160;
const NAMES_MAX = 100_000;
const NAMES_PAGE = 1_000;
const ACTIVITY_PAGE = 100;
const KNOWN_MAX = 5_000;
const LOOK_MS = 5_000;
const ANSWERS_MAX = 5; // of one look

/** Show in `main`, until the signal, the shards whose names begin so. */
export function showList(main, signal, prefix) {
  const list = new ShardList(signal);
  fill(main, list.element);
  list.field.value = prefix;
  list.search(prefix);
  return list;
}

class ShardList {
  #names = [];
  #known = new Map();
  #rows = new Map();
  #prefix = "";
  #selected = 0;
  #round = new AbortController();
  #looking = false;
  #isLoading = false;
  #isTroubled = false;
  #timers = {};

  constructor(signal) {
    this.field = h("input", {
      type: "search",
      id: "prefix",
      autocomplete: "off",
      spellcheck: false,
      maxLength: 260,
      placeholder: "eu/",
      oninput: () => this.#soon("search", () => this.#typed(this.field.value.trim()), 200),
      onkeydown: (event) => event.key === "ArrowDown" && (event.preventDefault(), this.view.focus()),
    });
    this.told = h("span", { class: "soft", role: "status" });
    this.space = h("div", { class: "space", role: "presentation" });
    this.view = h("div", {
      class: "list",
      tabIndex: 0,
      role: "listbox",
      "aria-label": "Shards",
      onkeydown: (event) => this.#key(event),
    }, this.space);
    this.view.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.note = h("div");
    const refresh = h("button", {
      type: "button",
      textContent: "Refresh",
      title: "Ask the store anew",
      onclick: () => this.search(this.#prefix, false),
    });
    this.element = h(
      "div",
      {},
      h("div", { class: "head" }, h("h1", { textContent: "Shards" }), this.told),
      h(
        "div",
        { class: "bar" },
        h("label", { for: "prefix", textContent: "Begins with" }),
        h("div", { class: "grow" }, this.field),
        refresh,
      ),
      h(
        "div",
        { class: "columns", "aria-hidden": "true" },
        h("span", { textContent: "name" }),
        ...[["updates", "n"], ["bytes", "n middle"]].map(([words, kind]) =>
          h("span", { class: kind, textContent: words })
        ),
        h("span", { class: "n wide", textContent: "upper" }),
        h("span", { class: "n wide", textContent: "batches" }),
        h("span", { class: "n wide", textContent: "last commit" }),
        h("span", { textContent: "written lately" }),
      ),
      this.view,
      this.note,
    );
    const again = setInterval(() => document.hidden || this.#look(), LOOK_MS);
    const sized = new ResizeObserver(() => this.#draw());
    sized.observe(this.view);
    signal.addEventListener("abort", () => {
      clearInterval(again);
      sized.disconnect();
      this.#round.abort();
    });
  }

  /** The address says what was typed, so that whoever comes back from a shard finds it again. */
  #typed(prefix) {
    history.replaceState(null, "", prefix ? `#/begins/${encodeURIComponent(prefix)}` : "#/");
    this.search(prefix);
  }

  /** Show the shards whose names begin so. The first page is shown before the next is asked for. */
  async search(prefix, cached = true) {
    this.#round.abort();
    const round = (this.#round = new AbortController());
    [this.#prefix, this.#names, this.#selected, this.#isLoading] = [prefix, [], 0, true];
    if (!cached) this.#known.clear();
    this.told.textContent = "Loading…";
    fill(this.note);
    try {
      for (let more = true; more && this.#names.length < NAMES_MAX;) {
        const after = this.#names[this.#names.length - 1] ?? "";
        const page = await json("v1/shards", { prefix, after, limit: NAMES_PAGE }, { signal: round.signal });
        const isFirst = !this.#names.length;
        this.#names.push(...page.shards);
        more = page.more;
        this.#isLoading = more && this.#names.length < NAMES_MAX;
        if (isFirst) {
          this.view.scrollTop = 0;
          this.#rows.clear();
          fill(this.space);
        }
        this.#count(more);
        this.#draw(cached);
      }
    } catch (problem) {
      if (problem.name === "AbortError") return;
      this.told.textContent = "";
      fill(this.space);
      this.#rows.clear();
      this.space.style.height = "0";
      fill(
        this.note,
        failure(problem),
        problem.status === 403
          ? h("p", { class: "soft", textContent: "Give the beginning of the names that this token is for." })
          : null,
      );
    }
  }

  #count(more) {
    const names = this.#names.length;
    this.told.textContent = more
      ? `${many(names, "shard")} and more${names >= NAMES_MAX ? ": give the beginning of a name" : "…"}`
      : many(names, "shard");
    this.space.style.height = `${names * ROW}px`;
    if (!names) {
      fill(
        this.note,
        h("p", {
          class: "state",
          textContent: this.#prefix
            ? `No shard that you may see begins with “${this.#prefix}”.`
            : "There is no shard yet that you may see. `persist create` makes one.",
        }),
      );
    }
  }

  #draw(cached = true) {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - BEYOND);
    const seen = Math.ceil(this.view.clientHeight / ROW) + 2 * BEYOND;
    const end = Math.min(this.#names.length, first + Math.min(seen, ROWS_MAX));
    for (const [index, row] of this.#rows) {
      if (index < first || index >= end) {
        row.remove();
        this.#rows.delete(index);
      }
    }
    for (let index = first; index < end; index += 1) {
      if (!this.#rows.has(index)) {
        const row = this.#row(index);
        this.#rows.set(index, row);
        this.space.append(row);
      }
    }
    if ([...this.#rows.keys()].some((index) => !this.#known.has(this.#names[index]))) {
      this.#soon("look", () => this.#look(cached), 60);
    }
  }

  #row(index) {
    const name = this.#names[index];
    const row = h("div", {
      class: "row",
      role: "option",
      id: `row-${index}`,
      "aria-posinset": index + 1,
      "aria-setsize": this.#names.length,
      "aria-selected": String(index === this.#selected),
      onclick: () => this.#open(index),
    });
    row.style.top = `${index * ROW}px`;
    row.dataset.seqno = "new";
    this.#renew(row, name);
    return row;
  }

  #contents(row, name) {
    const known = this.#known.get(name);
    const cell = (kind, words, title = null) => h("span", { class: kind, textContent: words, title });
    if (!known) return fill(row, cell("name", name, name), cell("n soft", known === null ? "gone" : "…"));
    const at = Date.parse(known.at);
    return fill(
      row,
      cell("name", name, name),
      cell("n", short(known.rows), many(known.rows, "update")),
      cell("n middle", bytes(known.bytes)),
      cell("n wide", frontier(known.upper)),
      cell("n wide", short(known.batches)),
      cell("n wide soft when", ago(at), instant(at)),
      sparkline(known.recent),
    );
  }

  /** Write a row anew where something new is known of it. */
  #renew(row, name) {
    const known = this.#known.get(name), seqno = known === undefined ? "" : String(known?.seqno ?? "gone");
    if (row.dataset.seqno === seqno) {
      if (known) row.querySelector(".when").textContent = ago(Date.parse(known.at));
      return;
    }
    row.dataset.seqno = seqno;
    this.#contents(row, name);
  }

  /** Ask what the shards in sight hold, and which are new there. With `cached` the server need not ask its store. */
  async #look(cached = true) {
    if (this.#looking || (this.#isLoading && !this.#names.length)) return;
    this.#looking = true;
    const { signal } = this.#round;
    try {
      await this.#ask(cached, signal);
      for (const [index, row] of this.#rows) this.#renew(row, this.#names[index]);
      if (this.#isTroubled) this.#count(this.#isLoading);
      this.#isTroubled = false;
    } catch (problem) {
      if (problem.name === "AbortError") return;
      this.told.textContent = problem.message;
      this.#isTroubled = true;
    } finally {
      this.#looking = false;
    }
    if (!signal.aborted && [...this.#rows.keys()].some((index) => !this.#known.has(this.#names[index]))) {
      this.#soon("look", () => this.#look(cached), 60);
    }
  }

  async #ask(cached, signal) {
    const places = [...this.#rows.keys()].sort((a, b) => a - b);
    const sought = places.map((index) => this.#names[index]), last = sought[sought.length - 1] ?? "";
    const isEnd = !this.#isLoading && last === (this.#names[this.#names.length - 1] ?? "");
    const limit = Math.min(ACTIVITY_PAGE, sought.length + (isEnd ? BEYOND : 0)), told = [];
    let after = this.#names[places[0] - 1] ?? "", answers = 0;
    if (!limit) return;
    do {
      const page = await json("v1/activity", { prefix: this.#prefix, after, limit, cached }, { signal });
      told.push(...page.shards);
      after = page.following;
      answers += 1;
    } while (after !== null && after < last && answers < ANSWERS_MAX);
    // What lies beyond the last name that was told is asked for the next time.
    const there = new Set(told.map((one) => one.name));
    for (const name of sought) if (!there.has(name) && (after === null || name <= after)) this.#learn(name, null);
    for (const one of told) this.#learn(one.name, one);
    const known = new Set(sought), isHere = (name) => !known.has(name) && (isEnd || name <= last);
    this.#insert(told.map((one) => one.name).filter(isHere));
  }

  /** Take up names that others have made since they were listed. */
  #insert(made) {
    if (!made.length || this.#names.length + made.length > NAMES_MAX) return;
    const selected = this.#names[this.#selected];
    this.#names = [...this.#names, ...made].sort((a, b) => (a < b ? -1 : 1));
    this.#selected = Math.max(0, this.#names.indexOf(selected));
    this.#rows.clear();
    fill(this.space);
    fill(this.note);
    this.#count(this.#isLoading);
    this.#draw();
    if (this.view.hasAttribute("aria-activedescendant")) this.#point();
  }

  #learn(name, found) {
    const known = this.#known.get(name);
    if (found && known && Date.parse(found.at) < Date.parse(known.at)) return; // another server, which knows less
    this.#known.delete(name);
    this.#known.set(name, found);
    if (this.#known.size > KNOWN_MAX) this.#known.delete(this.#known.keys().next().value);
  }

  /** Do it a little later, unless the same is asked for again before that. */
  #soon(what, work, ms) {
    clearTimeout(this.#timers[what]);
    this.#timers[what] = setTimeout(work, ms);
  }

  #open(index) {
    location.hash = `#/shard/${encodeURIComponent(this.#names[index])}`;
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.view.clientHeight / ROW) - 1);
    const moves = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -this.#names.length,
      End: this.#names.length,
    };
    if (event.key === "Enter" && this.#names.length) return this.#open(this.#selected);
    if (!(event.key in moves) || !this.#names.length) return undefined;
    event.preventDefault();
    this.#rows.get(this.#selected)?.setAttribute("aria-selected", "false");
    this.#selected = Math.max(0, Math.min(this.#names.length - 1, this.#selected + moves[event.key]));
    const top = this.#selected * ROW, { scrollTop, clientHeight } = this.view;
    if (top < scrollTop) this.view.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.view.scrollTop = top + ROW - clientHeight;
    this.#draw();
    this.#rows.get(this.#selected)?.setAttribute("aria-selected", "true");
    return this.#point();
  }

  #point() {
    this.view.setAttribute("aria-activedescendant", `row-${this.#selected}`);
  }
}

/** Whether the server lets this token in at all; one for some names only may not list all. Raises Problem. */
export async function tryToken(signal) {
  try {
    await ask("v1/shards", { limit: 1 }, { signal });
  } catch (problem) {
    if (problem.status !== 403) throw problem;
  }
}
