// The server's API: requests with the token, problems as errors, streams of events, and rows as CSV, cell by cell.

import { heard } from "./clock.js";

const TOKEN = "persist.token";
const EVENT_CHARS_MAX = 32 * 1024 * 1024;
const ROWS_CHARS_MAX = 4 * 1024 * 1024;
const SILENCE_MS = 45_000; // of a stream: the server says something every 15 s, so this one is gone
const BASE = new URL("./", document.baseURI);

/** What went wrong, in the server's words. `kind` never changes; "network": nobody has answered. */
export class Problem extends Error {
  constructor(status, kind, detail) {
    super(detail);
    this.status = status;
    this.kind = kind;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

/** The path of a shard, whose slash belongs to its name. */
export function shardPath(name, verb = "") {
  return `v1/shards/${encodeURIComponent(name)}${verb ? `/${verb}` : ""}`;
}

/** An answer that is good. Raises Problem. */
export async function ask(path, query = {}, { signal, headers = {} } = {}) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  const held = token.get();
  if (held && !/^[\x21-\x7e]+$/.test(held)) { // which no header can hold
    throw new Problem(401, "unauthorized", "The token has characters that no token has. Copy it again.");
  }
  let answer;
  try {
    answer = await fetch(url, {
      signal,
      cache: "no-store",
      credentials: "same-origin",
      headers: { ...headers, ...(held ? { Authorization: `Bearer ${held}` } : {}) },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "network", "The server does not answer.");
  }
  heard(answer.headers.get("date"));
  if (answer.ok) return answer;
  const text = await answer.text();
  let told = {};
  try {
    told = JSON.parse(text);
  } catch { /* a proxy has answered */ }
  throw new Problem(answer.status, told.kind ?? "unknown", told.detail ?? `The server answered ${answer.status}.`);
}

export async function json(path, query, options) {
  return parse(await (await ask(path, query, options)).text());
}

/** JSON in which a whole number that JavaScript would round is a BigInt. */
export function parse(text) {
  return JSON.parse(
    text,
    (_, value, context) =>
      typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value) &&
        /^-?\d+$/.test(context?.source ?? "")
        ? BigInt(context.source)
        : value,
  );
}

/** The server-sent events of a path: `{event, id, data}`, until the stream ends. `end`: nothing will ever come. */
export async function* events(path, query, { signal, headers = {}, silenceMs = SILENCE_MS } = {}) {
  const answer = await ask(path, query, { signal, headers: { ...headers, Accept: "text/event-stream" } });
  if (answer.status === 204) return yield { event: "end", id: null, data: "" };
  let held = "";
  for await (const piece of texts(answer, silenceMs)) {
    held += piece;
    if (held.length > EVENT_CHARS_MAX) throw new Problem(413, "too_large", "An event is too large to be shown here.");
    for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
      const event = eventOf(held.slice(0, end));
      held = held.slice(end + 2);
      if (event.event === "error") {
        const told = parse(event.data);
        throw new Problem(told.status, told.kind, told.detail);
      }
      yield event;
    }
  }
}

function eventOf(text) {
  const found = { event: "", id: null, data: "" };
  for (const line of text.split("\n")) { // and nowhere else: what others wrote may hold any other line's end
    const colon = line.indexOf(":"), field = line.slice(0, Math.max(0, colon));
    const value = line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (field === "data") found.data += value;
    else if (field === "event" || field === "id") found[field] = value;
  }
  return found;
}

async function* texts(answer, silenceMs = null) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await (silenceMs === null ? reader.read() : within(reader.read(), silenceMs));
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
    throw new Problem(0, "network", "The answer broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What is promised, if it comes within so many milliseconds. Raises Problem. */
async function within(promise, ms) {
  let timer;
  const late = new Promise((_, raise) => {
    timer = setTimeout(() => raise(new Problem(0, "silent", "The server has fallen silent.")), ms);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** The first rows of a path that gives CSV: `{columns, rows, more, headers}`. A cell is a text, or null. */
export async function rows(path, query, most, options) {
  const answer = await ask(path, { ...query, format: "csv" }, options);
  const csv = new Csv();
  let chars = 0, cut = false;
  for await (const piece of texts(answer)) {
    csv.take(piece);
    chars += piece.length;
    if (csv.records.length > most + 1 || chars > ROWS_CHARS_MAX) {
      cut = true;
      break;
    }
  }
  if (!cut) csv.end();
  const [columns = [], ...found] = csv.records;
  return {
    columns: columns.map(String),
    rows: found.slice(0, most),
    more: cut || found.length > most,
    headers: answer.headers,
  };
}

/** Reads CSV piece by piece. An empty cell without quotes is null, one with quotes is an empty text. */
export class Csv {
  records = [];
  #cells = [];
  #cell = "";
  #quoted = false;
  #inside = false;
  #maybeEnd = false;

  take(text) {
    for (const char of text) this.#char(char);
  }

  end() {
    if (this.#cell || this.#quoted || this.#cells.length) this.#record();
  }

  #char(char) {
    if (this.#inside) {
      if (this.#maybeEnd) {
        this.#maybeEnd = false;
        if (char === '"') {
          this.#cell += char;
          return;
        }
        this.#inside = false;
      } else if (char === '"') {
        this.#maybeEnd = true;
        return;
      } else {
        this.#cell += char;
        return;
      }
    }
    if (char === '"') [this.#inside, this.#quoted] = [true, true];
    else if (char === ",") this.#next();
    else if (char === "\n") this.#record();
    else if (char !== "\r") this.#cell += char;
  }

  #next() {
    this.#cells.push(this.#cell || this.#quoted ? this.#cell : null);
    [this.#cell, this.#quoted] = ["", false];
  }

  #record() {
    this.#next();
    this.records.push(this.#cells);
    this.#cells = [];
  }
}
