// Elements out of text. Nothing here, and nothing that uses it, ever parses text as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, attributes (`aria-…`, `data-…`, `role`) and children; null children are left out. */
export function h(tag, given = {}, ...children) {
  return filled(document.createElement(tag), given, children);
}

/** The same for SVG; all that is given are attributes. */
export function s(tag, given = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Put these children in the place of what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function filled(made, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name.includes("-") || name === "role" || name === "for" || name === "list") {
      made.setAttribute(name, value);
    } else made[name] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}
