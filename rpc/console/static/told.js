// What was done to a shard, and what is wrong with it: both read once somebody looks.

import { json, shardPath } from "./api.js";
import { h } from "./dom.js";
import { bytes, count, exact, frontier, instant, many } from "./format.js";
import { choice, failure, panel, table, whenSeen } from "./panel.js";

const PAGE = 50;
const COLUMNS = [
  ["version", true],
  ["when", false],
  ["what", false],
  ["times", false],
  ["updates", true],
  ["bytes", true],
  ["by", false],
  ["said", false],
];

export function historyPanel(shard) {
  let entries = [], following = null, maintenance = false, asked = false, round = 0;
  const more = h("button", { type: "button", textContent: "Earlier", onclick: () => read(following) });
  const again = h("button", {
    type: "button",
    class: "quiet",
    textContent: "Read again",
    onclick: () => read(null),
  });
  const kinds = choice("Which entries", [[false, "Changes"], [true, "All"]], false, (value) => {
    maintenance = value;
    read(null);
  });
  const made = panel("History", { wide: true, tools: [again, kinds] });
  made.loading();

  async function read(before) {
    const mine = (round += 1); // of two that are under way, the later one is what was asked for
    try {
      const page = await json(shardPath(shard.name, "history"), { limit: PAGE, before, maintenance }, {
        signal: shard.signal,
      });
      if (mine !== round) return undefined;
      entries = before === null ? page.entries : [...entries, ...page.entries];
      following = page.following;
      if (!entries.length) return made.empty("The history tells of nothing yet.");
      more.hidden = following === null;
      return made.show(table("History", COLUMNS, entries.map(line)), h("div", { class: "bar" }, more));
    } catch (problem) {
      return problem.name === "AbortError" ? undefined : made.failed(problem);
    }
  }

  whenSeen(made.element, shard.signal, (isSeen) => {
    if (isSeen && !asked) {
      asked = true;
      read(null);
    }
  });
  return made.element;
}

function line(entry) {
  const said = entry.info === null ? "" : exact(entry.info);
  return [
    `v${entry.seqno}`,
    instant(Date.parse(entry.timestamp)),
    entry.operation,
    `[${frontier(entry.lower)}, ${frontier(entry.upper)})`,
    count(entry.rows),
    bytes(entry.bytes),
    entry.who ?? entry.purpose ?? "",
    h("td", { class: "cell", textContent: said, title: said }),
  ];
}

export function checkPanel(shard) {
  let asked = false;
  const button = h("button", { type: "button", textContent: "Examine", onclick: () => examine() });
  const made = panel("Health", { tools: [button] });
  made.empty("A check reads both stores, so it runs when you ask for it.");

  async function examine() {
    if (asked) return;
    asked = button.disabled = true;
    made.loading();
    try {
      const report = await json("v1/check", { pattern: shard.name }, { signal: shard.signal });
      const found = report.findings.map(finding);
      made.show(
        found.length
          ? found
          : h("p", { class: "good", textContent: "Nothing is wrong with this shard and its location." }),
        h("p", {
          class: "soft",
          textContent: `${many(report.findings.length, "finding")}, ${instant(Date.parse(report.at))}.${
            report.left_out ? ` ${report.left_out} more are left out.` : ""
          }`,
        }),
      );
    } catch (problem) {
      if (problem.name !== "AbortError") made.show(failure(problem));
    }
    asked = button.disabled = false;
    button.textContent = "Examine again";
  }

  return made.element;
}

function finding(one) {
  return h(
    "div",
    { class: `finding ${one.severity}` },
    h("b", { textContent: `${one.severity}: ${one.what}` }),
    h("p", { textContent: one.cause }),
    h("p", { textContent: one.remedy }),
    one.command ? h("code", { class: "mono", textContent: one.command }) : null,
  );
}
