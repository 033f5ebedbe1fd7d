// Latency, requests and what they cost, from what the server counts itself. Read every few seconds while in sight.

import { ask, json } from "./api.js";
import { h } from "./dom.js";
import { bytes, count, money, seconds } from "./format.js";
import { panel, renew, table, whenSeen } from "./panel.js";

const EVERY_MS = 10_000;
const LEAST_S = 5; // between two looks, however often a panel comes into sight
const BILLED = { put: "put", get: "get", get_range: "get", stat: "get", list: "list", delete: "delete" };
const STREAMS = new Set(["listen", "trace"]); // they last as long as somebody follows
const DAY_S = 86_400;
const GB = 2 ** 30;

/** Samples of Prometheus' text: name, labels, value. Only those whose name begins with one of `names`. */
export function samples(text, names) {
  const found = [];
  for (const line of text.split("\n")) {
    if (!names.some((name) => line.startsWith(name))) continue;
    const [, name, labels, value] = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    if (name) {
      found.push({
        name,
        value: Number(value),
        labels: Object.fromEntries(
          [...(labels ?? "").matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)].map(([, label, text]) => [label, text]),
        ),
      });
    }
  }
  return found;
}

/** The value below which a part of the observations lie, by cumulative buckets `[bound, count]`; null: none. */
export function quantile(buckets, part) {
  const ordered = [...buckets].sort(([a], [b]) => a - b);
  const all = ordered.length ? ordered[ordered.length - 1][1] : 0;
  if (!all) return null;
  const [bound] = ordered.find(([, held]) => held >= all * part);
  return bound;
}

function metered(shard, title, names, show) {
  let isSeen = false, last = null, running = false;
  const made = panel(title);
  made.loading();

  async function look() {
    if (!isSeen || document.hidden || running || (last && performance.now() / 1000 - last.at < LEAST_S)) return;
    running = true;
    try {
      const text = await (await ask("metrics", {}, { signal: shard.signal })).text();
      const now = { at: performance.now() / 1000, found: samples(text, names) };
      renew(made.body, ...(await show(now, last)));
      last = now;
    } catch (problem) {
      if (problem.name !== "AbortError") made.failed(problem);
    } finally {
      running = false;
    }
  }

  const timer = setInterval(look, EVERY_MS);
  shard.signal.addEventListener("abort", () => clearInterval(timer));
  whenSeen(made.element, shard.signal, (value) => {
    isSeen = value;
    look();
  });
  return made.element;
}

function sum(found, name, wanted = {}) {
  return found.filter((one) =>
    one.name === name && Object.entries(wanted).every(([label, value]) => one.labels[label] === value)
  ).reduce((total, one) => total + one.value, 0);
}

export function latencyPanel(shard) {
  const names = ["persist_requests_total", "persist_request_seconds_bucket", "persist_shard_"];
  return metered(shard, "Latency", names, (now, last) => {
    const { found } = now, of = { shard: shard.name };
    const commits = sum(found, "persist_shard_commits_total", of);
    const commitS = commits ? sum(found, "persist_shard_commit_seconds_total", of) / commits : null;
    const facts = [["commits of this shard here", count(commits)], ["a commit takes", seconds(commitS)], [
      "races lost",
      count(sum(found, "persist_shard_races_lost_total", of)),
    ], ["commands that wait", count(sum(found, "persist_shard_commands_queued", of))]];
    const verbs = [
      ...new Set(found.filter((one) => one.name === "persist_requests_total").map((one) => one.labels.verb)),
    ].sort();
    const rows = verbs.map((verb) => {
      const total = sum(found, "persist_requests_total", { verb });
      const rate = last ? rateOf(total, sum(last.found, "persist_requests_total", { verb }), now.at - last.at) : null;
      const buckets = found.filter((one) =>
        one.name === "persist_request_seconds_bucket" && one.labels.verb === verb
      ).map((one) => [one.labels.le === "+Inf" ? Infinity : Number(one.labels.le), one.value]);
      return [
        verb,
        count(total),
        rate === null ? "…" : rate.toFixed(1),
        ...[0.5, 0.99].map((part) => (STREAMS.has(verb) ? "a stream" : atMost(quantile(buckets, part)))),
      ];
    });
    return [
      factsOf(facts),
      table("Requests to this server", [["request", false], ["all", true], ["a second", true], [
        "half within",
        true,
      ], ["99 % within", true]], rows),
    ];
  });
}

/** A second; null where the server has begun to count anew since then. */
export function rateOf(all, before, passedS) {
  return all < before ? null : (all - before) / passedS;
}

function atMost(bound) {
  return bound === null ? "–" : bound === Infinity ? "longer" : seconds(bound);
}

export function costPanel(shard) {
  let prices = null;
  return metered(shard, "Requests and cost", ["persist_store_calls_total"], async (now, last) => {
    prices ??= await json("v1/prices", {}, { signal: shard.signal });
    const kinds = Object.fromEntries(
      ["put", "list", "get", "delete"].map((
        kind,
      ) => {
        const all = billed(now.found, kind);
        return [kind, [all, last ? rateOf(all, billed(last.found, kind), now.at - last.at) : null]];
      }),
    );
    const rows = Object.entries(kinds).map((
      [kind, [all, rate]],
    ) => [
      kind.toUpperCase(),
      count(all),
      rate === null ? "…" : rate.toFixed(2),
      money((all * prices[kind]) / 1000, prices.currency),
    ]);
    const log = now.found.filter((one) => one.labels.store === "consensus").reduce(
      (total, one) => total + one.value,
      0,
    );
    const all = Object.entries(kinds).reduce((total, [kind, [n]]) => total + (n * prices[kind]) / 1000, 0);
    const isKnown = Object.values(kinds).every(([, rate]) => rate !== null);
    const day = isKnown
      ? Object.entries(kinds).reduce((total, [kind, [, rate]]) => total + (rate * DAY_S * prices[kind]) / 1000, 0)
      : null;
    const kept = shard.trace ? shard.trace.bytes : 0;
    return [
      table("Requests to the blob store", [["blob store", false], ["all", true], ["a second", true], [
        "cost",
        true,
      ]], rows),
      factsOf([
        ["since this server started", money(all, prices.currency)],
        ["a day at this rate", day === null ? "…" : money(day, prices.currency)],
        [`this shard's batches, ${bytes(kept)}, a month`, money((kept / GB) * prices.gb_month, prices.currency)],
        ["calls to the log store", count(log)],
      ]),
      h("p", {
        class: "soft",
        textContent: `Requests are this server's, of all shards. Prices: ${prices.name}. ` +
          "“persist cost” tells all, with history and garbage.",
      }),
    ];
  });
}

function billed(found, kind) {
  return found.filter((one) => one.labels.store === "blob" && BILLED[one.labels.verb] === kind).reduce(
    (total, one) => total + one.value,
    0,
  );
}

function factsOf(facts) {
  return h(
    "dl",
    { class: "facts" },
    facts.flatMap(([name, value]) => [h("dt", { textContent: name }), h("dd", { textContent: value })]),
  );
}
