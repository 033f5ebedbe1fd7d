// The batches of a shard, drawn; what is being merged, and what was.

import { fill, h } from "./dom.js";
import { batchInWords, isEvenInTime, traceDrawing } from "./draw.js";
import { ago, bytes, count, frontier, many } from "./format.js";
import { choice, panel, renew, table, whenSized } from "./panel.js";

const TABLE_MAX = 200;
const UPKEEP_MAX = 5;
const TICK_MS = 5_000; // how long ago something was is told anew
const UPKEEP = new Set(["merge", "bundle", "collect", "age"]);

export function tracePanel(shard) {
  let width = 0, selected = -1, mode = null, trace = null, due = false;
  const place = h("div", {
    tabIndex: 0,
    role: "group",
    "aria-label": "Batches. Left and right arrows go from one to the next.",
    onkeydown: key,
    onclick: click,
  });
  const notice = h("p", { class: "notice", "aria-live": "polite" });
  const rows = h("div"), newest = h("summary"), done = h("ul", { class: "soft" });
  const upkeep = h("details", { hidden: true }, newest, done);
  const made = panel("Trace", {
    wide: true,
    tools: [choice("Width of a batch", [["time", "By time"], ["each", "Alike"]], null, (value) => {
      mode = value;
      draw();
    })],
  });
  const buttons = [...made.element.querySelectorAll(".group button")];
  const more = h(
    "details",
    { ontoggle: () => list() },
    h("summary", { textContent: "The batches as a table" }),
    rows,
  );
  made.loading();

  function draw() {
    due = false;
    if (!trace || !width) return;
    const byTime = mode === null ? isEvenInTime(trace.batches, width) : mode === "time";
    buttons[0].setAttribute("aria-pressed", String(byTime));
    buttons[1].setAttribute("aria-pressed", String(!byTime));
    selected = Math.min(selected, trace.batches.length - 1);
    fill(place, traceDrawing(trace, width, { byTime, selected }));
    const hint = trace.batch_count
      ? `${many(trace.batch_count, "batch", "batches")} of ${
        many(trace.batches.reduce((sum, one) => sum + one.runs, 0), "run")
      }. Choose one to see what it is.`
      : "";
    notice.textContent = selected < 0 ? hint : batchInWords(trace.batches[selected]);
  }

  function soon() {
    if (!due) requestAnimationFrame(draw);
    due = true;
  }

  function key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !trace?.batches.length) return;
    event.preventDefault();
    selected = Math.max(
      0,
      Math.min(trace.batches.length - 1, (selected < 0 ? trace.batches.length : selected) + step),
    );
    draw();
  }

  function click(event) {
    const slot = event.target.closest("[data-index]");
    if (!slot) return;
    selected = Number(slot.dataset.index);
    draw();
  }

  function list() {
    if (!more.open || !trace) return;
    const latest = trace.batches.slice(-TABLE_MAX).reverse();
    renew(
      rows,
      table(
        "Batches",
        [
          ["lower", true],
          ["upper", true],
          ["updates", true],
          ["bytes", true],
          ["runs", true],
          ["parts", true],
          ["level", true],
          ["inline", true],
          ["", false],
        ],
        latest.map((
          one,
        ) => [
          frontier(one.lower),
          frontier(one.upper),
          count(one.rows),
          bytes(one.bytes),
          count(one.runs),
          count(one.parts),
          String(one.level),
          bytes(one.inline_bytes),
          one.merging ? "being merged" : "",
        ]),
      ),
    );
  }

  function kept() {
    const latest = trace.recent.filter((one) => UPKEEP.has(one.operation)).slice(0, UPKEEP_MAX);
    upkeep.hidden = !latest.length;
    if (!latest.length) return;
    newest.textContent = `Upkeep: ${latest[0].operation} ${ago(latest[0].at_ms)}`;
    const words = latest.map((one) =>
      `${one.operation} [${frontier(one.lower)}, ${frontier(one.upper)}) at v${one.seqno}, ${ago(one.at_ms)}`
    );
    fill(done, words.map((textContent) => h("li", { textContent })));
  }

  /** Where the batch that was chosen is now: merged, it is the one that covers what it began with. */
  function follow(found) {
    if (selected < 0) return;
    const [lower] = trace.batches[selected].lower;
    selected = found.batches.findLastIndex((one) => one.lower[0] <= lower);
  }

  const timer = setInterval(() => document.hidden || !trace || kept(), TICK_MS);
  shard.signal.addEventListener("abort", () => clearInterval(timer));
  shard.onTrace((found) => {
    if (!trace) {
      made.show(
        place,
        h(
          "div",
          { class: "legend" },
          legend("k-blob", "in the blob store, fuller on higher levels"),
          legend("k-inline", "inline, in the State"),
          legend("k-merge", "being merged"),
          legend("k-since", "since"),
          legend("k-upper", "upper"),
        ),
        notice,
        upkeep,
        more,
      );
      whenSized(place, shard.signal, (value) => {
        width = value;
        draw();
      });
    }
    if (trace) follow(found);
    trace = found;
    soon();
    list();
    kept();
  });
  return made.element;
}

function legend(kind, words) {
  return h("span", {}, h("i", { class: kind, "aria-hidden": "true" }), words);
}
