// Requests and their latency, from the counts of the server itself. Read every few seconds while in sight.

import { ask } from "./api.js";
import { h } from "./dom.js";
import { count, seconds } from "./format.js";
import { panel, renew, table, whenSeen } from "./panel.js";

const EVERY_MS = 10_000;
const LEAST_S = 5; // between two looks, however often a panel comes into sight
const NAMES = ["persist_requests_total", "persist_request_seconds_bucket", "persist_shard_"];
const STREAMS = new Set(["listen", "trace"]); // they last as long as somebody follows

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

export function latencyPanel(shard) {
  let isSeen = false, last = null, running = false;
  const made = panel("Latency");
  made.element.classList.add("broad");
  made.loading();

  async function look() {
    if (!isSeen || document.hidden || running || (last && performance.now() / 1000 - last.at < LEAST_S)) return;
    running = true;
    try {
      const text = await (await ask("metrics", {}, { signal: shard.signal })).text();
      const now = { at: performance.now() / 1000, found: samples(text, NAMES) };
      renew(made.body, ...latency(shard.name, now, last));
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

function latency(name, now, last) {
  const { found } = now, of = { shard: name };
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
}

/** A second; null where the server has begun to count anew since then. */
export function rateOf(all, before, passedS) {
  return all < before ? null : (all - before) / passedS;
}

function atMost(bound) {
  return bound === null ? "–" : bound === Infinity ? "longer" : seconds(bound);
}

function factsOf(facts) {
  return h(
    "dl",
    { class: "facts" },
    facts.flatMap(([name, value]) => [h("dt", { textContent: name }), h("dd", { textContent: value })]),
  );
}
