// Elements made by hand. What stands in one is text or other elements, never markup: nothing that a model writes can become a script.

import {say} from "./words.js";

export const $ = id => document.getElementById(id);

// `attributes`: by name; `on…` is a listener, true an attribute without value, null and false none.
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

const SVG = "http://www.w3.org/2000/svg", MATHML = "http://www.w3.org/1998/Math/MathML";
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const mathml = (tag, attributes, ...children) => fill(document.createElementNS(MATHML, tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

export const button = (text, act, attributes) => el("button", {type: "button", onclick: act, ...attributes}, text);

// Says `text` to who listens to the page, without showing it.
export function announce(text) {
  const region = $("announcements");
  if (region) region.textContent = text;
}

// Puts `text` on the clipboard, and says so on `control` for a moment.
export async function copy(text, control) {
  const before = control.textContent;
  try {
    await navigator.clipboard.writeText(text);
    control.textContent = say("Copied");
  } catch {
    control.textContent = say("Not allowed here"); // browsers want https or localhost
  }
  control.addEventListener("blur", () => { control.textContent = before; }, {once: true});
  setTimeout(() => { control.textContent = before; }, 1500);
}

// A file of the browser's downloads.
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], {type}));
  el("a", {href: address, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// Follows the system unless somebody chose. Returns what a click on the button does.
export function theme(control) {
  const root = document.documentElement, names = ["auto", "light", "dark"];
  const show = chosen => {
    if (chosen === "auto") delete root.dataset.theme;
    else root.dataset.theme = chosen;
    const words = say({auto: "Colours: like the system", light: "Colours: light", dark: "Colours: dark"}[chosen]);
    control.setAttribute("aria-label", words);
    control.title = words;
    dispatchEvent(new Event("themechange"));
  };
  let chosen = localStorage.getItem("oneloop.theme") ?? "auto";
  show(names.includes(chosen) ? chosen : "auto");
  control.addEventListener("click", () => {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    localStorage.setItem("oneloop.theme", chosen);
    show(chosen);
  });
}
