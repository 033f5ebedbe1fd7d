// A panel of a page: its frame, and its states while it loads, has nothing, or has failed.

import { fill, h } from "./dom.js";

let numbers = 0;

/** A panel with a title, buttons beside it, and a body. `show` fills that, the others say why it has nothing. */
export function panel(title, { wide = false, tools = [] } = {}) {
  const id = `panel-${(numbers += 1)}`;
  const body = h("div");
  const element = h(
    "section",
    { class: wide ? "panel wide" : "panel", "aria-labelledby": id },
    h("header", {}, h("h2", { id, textContent: title }), tools),
    body,
  );
  return {
    element,
    body,
    show: (...children) => fill(body, ...children),
    loading: () => fill(body, h("p", { class: "state", role: "status", textContent: "Loading…" })),
    empty: (words) => fill(body, h("p", { class: "state", textContent: words })),
    failed: (problem) => fill(body, failure(problem)),
  };
}

/** What went wrong, in the server's words, and what it means here. */
export function failure(problem) {
  return h("div", { class: "state bad", role: "alert" }, h("p", { textContent: problem.message }));
}

/** Do `work` once the element is in sight, and tell `seen` of each change of that, until the signal. */
export function whenSeen(element, signal, seen) {
  const observer = new IntersectionObserver((entries) => seen(entries[entries.length - 1].isIntersecting));
  observer.observe(element);
  signal.addEventListener("abort", () => observer.disconnect());
}

/** Call `draw(width)` when the element's width changes, until the signal. */
export function whenSized(element, signal, draw) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (element.clientWidth && element.clientWidth !== width) draw(width = element.clientWidth);
  });
  observer.observe(element);
  signal.addEventListener("abort", () => observer.disconnect());
}

/** Buttons of which one is pressed. `choices`: [value, words] each; `chosen` is told of each choice. */
export function choice(label, choices, value, chosen) {
  const buttons = choices.map(([one, words]) =>
    h("button", {
      type: "button",
      textContent: words,
      "aria-pressed": String(one === value),
      onclick: () => {
        for (const button of buttons) {
          button.setAttribute(
            "aria-pressed",
            String(button === buttons[choices.findIndex(([it]) => it === one)]),
          );
        }
        chosen(one);
      },
    })
  );
  return h("div", { class: "group", role: "group", "aria-label": label }, buttons);
}

/** A table. `columns`: [title, is a number] each; `rows` are lists of cells: texts or elements. */
export function table(label, columns, rows, classes = () => "") {
  const body = rows.map((row, index) =>
    h(
      "tr",
      { class: classes(index) },
      row.map((cell, column) =>
        cell instanceof Element ? cell : h("td", { class: columns[column][1] ? "n" : "", textContent: cell })
      ),
    )
  );
  return h(
    "div",
    { class: "scroll", tabIndex: 0, role: "region", "aria-label": label },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(([title, isNumber]) =>
            h("th", { scope: "col", class: isNumber ? "n" : "", textContent: title })
          ),
        ),
      ),
      h("tbody", {}, body),
    ),
  );
}

/** Put `fresh` in the place of what is alike: what somebody has scrolled to, or has the focus in, stays as it is. */
export function renew(place, ...fresh) {
  const known = [...place.children];
  if (known.length !== fresh.length || known.some((one, index) => one.className !== fresh[index].className)) {
    fill(place, ...fresh);
    return;
  }
  known.forEach((one, index) => {
    const { scrollTop, scrollLeft } = one;
    one.replaceChildren(...fresh[index].childNodes);
    Object.assign(one, { scrollTop, scrollLeft });
  });
}

/** Wait so many milliseconds; at once when the signal comes. */
export function pause(ms, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    }, { once: true });
  });
}

/** Wait until somebody sees the page, or has stopped looking; at once when the signal comes. */
export function seen(signal) {
  return new Promise((done) => {
    const end = () => {
      document.removeEventListener("visibilitychange", end);
      signal.removeEventListener("abort", end);
      done();
    };
    document.addEventListener("visibilitychange", end);
    signal.addEventListener("abort", end);
  });
}
