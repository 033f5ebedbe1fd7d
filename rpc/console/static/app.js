// Where the page is, the token, and light or dark.

import { Problem, token } from "./api.js";
import { fill, h } from "./dom.js";
import { showList, tryToken } from "./list.js";
import { failure } from "./panel.js";
import { showShard } from "./shard.js";

const THEME = "persist.theme";
const THEMES = ["auto", "light", "dark"];
const main = document.getElementById("main");
const where = document.getElementById("where");
const dialog = document.getElementById("ask");
const field = document.getElementById("ask-token");
let shown = new AbortController();

/** Show what the address asks for. */
async function route() {
  shown.abort();
  shown = new AbortController();
  const { signal } = shown;
  const [, name] = /^#\/shard\/(.+)$/.exec(location.hash) ?? [];
  const [, begins] = /^#\/begins\/(.+)$/.exec(location.hash) ?? [];
  try {
    fill(main, h("p", { class: "state", role: "status", textContent: "Loading…" }));
    await tryToken(signal);
    const shard = name === undefined ? null : decodeURIComponent(name);
    document.title = shard === null ? "persist" : `${shard} - persist`;
    fill(where, shard === null ? null : h("span", {}, h("a", { href: "#/", textContent: "Shards" }), " / ", shard));
    if (shard === null) showList(main, signal, decodeURIComponent(begins ?? ""));
    else showShard(main, shard, signal);
  } catch (problem) {
    if (problem.name === "AbortError") return;
    if (!(problem instanceof Problem) && !(problem instanceof URIError)) throw problem;
    fill(
      main,
      failure(problem),
      h("p", {}, h("button", { type: "button", textContent: "Try again", onclick: route })),
    );
    if (problem.status === 401) askToken(problem.message);
  }
}

function askToken(why) {
  document.getElementById("ask-why").textContent = why ??
    "The console sends it to this server alone, and forgets it with this tab.";
  field.value = "";
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("close", () => {
  if (dialog.returnValue === "use" && field.value.trim()) token.set(field.value.trim());
  else if (dialog.returnValue === "forget") token.set(null);
  else return;
  field.value = "";
  dialog.returnValue = "";
  route();
});

// Enter in the field uses the token: the first button of the form would forget it.
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  dialog.close("use");
});

document.getElementById("token").addEventListener("click", () => askToken(null));

const themed = document.getElementById("theme");

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  themed.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[name];
  themed.setAttribute("aria-label", `Colours: ${name}. Press for the next.`);
  localStorage.setItem(THEME, name);
}

themed.addEventListener("click", () => {
  const at = THEMES.indexOf(localStorage.getItem(THEME) ?? "auto");
  theme(THEMES[(at + 1) % THEMES.length]);
});

theme(THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto");
addEventListener("hashchange", () => {
  route();
  main.focus();
});
route();
