// Every update as it comes. It runs only when somebody has started it, as it costs the server a listener.

import { events, parse, Problem, shardPath } from "./api.js";
import { fill, h } from "./dom.js";
import { count, exact, frontier, many, seconds } from "./format.js";
import { failure, panel, pause, seen } from "./panel.js";
import { cell } from "./rows.js";

const LINES_MAX = 200;
const CLOSED = "The shard is closed to writes: no more will come. ";
const TRIES_MAX = 8;
const SILENCE_MS = 180_000; // a large step may wait for its turn until others, who take nothing, are cut off
const AGAIN = new Set([0, 408, 429, 503, 504]);

export function tailPanel(shard) {
  let running = null, updates = 0, steps = 0, began = 0, shown = "";
  const button = h("button", {
    type: "button",
    textContent: "Follow",
    "aria-pressed": "false",
    disabled: true, // until it is known from where on
    onclick: () => (running ? stop() : start()),
  });
  const told = h("p", { class: "notice", role: "status" }), trouble = h("div");
  const head = h("thead"), body = h("tbody");
  const out = h(
    "div",
    { class: "scroll", tabIndex: 0, role: "log", "aria-label": "Updates" },
    h("table", {}, head, body),
  );
  const made = panel("Live tail", { tools: [button] });
  made.show(
    h("p", {
      class: "soft",
      textContent: "Follow shows each update as it is committed. It costs the server what a listener costs: " +
        "a lease on since, renewed while you follow, and each update read once.",
    }),
    trouble,
    told,
    out,
  );
  out.hidden = true;

  function stop(why = "Stopped. ") {
    running?.abort();
    running = null;
    button.textContent = "Follow";
    button.setAttribute("aria-pressed", "false");
    tell(why);
  }

  function tell(words) {
    const taken = (Date.now() - began) / 1000;
    told.textContent = `${words}${many(updates, "update")} in ${many(steps, "step")}, ${
      seconds(taken)
    }: one listener.`;
  }

  async function start() {
    running = new AbortController();
    const { signal } = running;
    [updates, steps, began, shown] = [0, 0, Date.now(), ""];
    button.textContent = "Stop";
    button.setAttribute("aria-pressed", "true");
    fill(trouble);
    fill(head);
    fill(body);
    out.hidden = false;
    const [upper] = shard.trace.upper;
    if (upper === undefined) return stop(CLOSED);
    tell("Waiting. ");
    let id = null;
    for (let tries = 0; !signal.aborted;) {
      const stream = new AbortController();
      const leave = () => (document.hidden || signal.aborted) && stream.abort();
      document.addEventListener("visibilitychange", leave);
      signal.addEventListener("abort", leave);
      try {
        if (document.hidden) {
          await seen(signal);
          continue;
        }
        // Whoever only looks lets no history go, whatever the token may do.
        const query = { after: BigInt(upper) - 1n, moves_since: false };
        for await (
          const event of events(shardPath(shard.name, "listen"), query, {
            signal: stream.signal,
            silenceMs: SILENCE_MS,
            headers: id ? { "Last-Event-ID": id } : {},
          })
        ) {
          if (event.event === "end") return stop(CLOSED);
          id = event.id ?? id;
          tries = 0;
          if (event.event === "updates") take(parse(event.data));
        }
        throw new Problem(0, "ended", "The server has ended the stream.");
      } catch (problem) {
        if (problem.name === "AbortError") continue;
        if (!(problem instanceof Problem)) {
          stop();
          fill(trouble, failure(new Problem(0, "broken", "The page has failed to show an update. Load it again.")));
          throw problem;
        }
        tries += 1;
        if (!AGAIN.has(problem.status) || tries > TRIES_MAX) {
          stop();
          fill(trouble, failure(problem));
          return;
        }
        tell("Connecting again. ");
        await pause(500 * 2 ** tries, signal);
      } finally {
        stream.abort();
        document.removeEventListener("visibilitychange", leave);
        signal.removeEventListener("abort", leave);
      }
    }
  }

  function take(step) {
    [updates, steps] = [updates + step.rows.length, steps + 1];
    tell(`Up to ${frontier(step.upper)}. `);
    if (!step.rows.length) return;
    const columns = Object.keys(step.rows[0]).filter((name) => name !== "__time" && name !== "__diff");
    if (shown !== JSON.stringify(columns)) fill(body); // the schema has changed: older lines stand below other names
    shown = JSON.stringify(columns);
    fill(
      head,
      h(
        "tr",
        {},
        h("th", { scope: "col", class: "sign n", textContent: "time" }),
        h("th", { scope: "col", class: "sign n", textContent: "±" }),
        columns.map((name) => h("th", { scope: "col", textContent: name })),
      ),
    );
    const lines = step.rows.slice(-LINES_MAX).reverse().map((row) =>
      h(
        "tr",
        { class: row.__diff < 0 ? "left" : "came" },
        h("td", { class: "n", textContent: String(row.__time) }),
        h("td", {
          class: "n sign",
          textContent: row.__diff < 0 ? `−${count(-row.__diff)}` : `+${count(row.__diff)}`,
        }),
        columns.map((name) => cell(written(row[name]))),
      )
    );
    body.prepend(...lines);
    while (body.children.length > LINES_MAX) body.lastChild.remove();
  }

  shard.onTrace(() => (button.disabled = false));
  shard.signal.addEventListener("abort", () => running?.abort());
  return made.element;
}

function written(value) {
  if (value === null || value === undefined) return null;
  if (Object.is(value, -0)) return "-0";
  return typeof value === "object" ? exact(value) : String(value);
}
