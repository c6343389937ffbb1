// The pages' language. English stands in scripts and HTML, and is the key of each other language's table (words.de.json, words.zh.json).

const LANGUAGES = {en: "English", de: "Deutsch", zh: "中文"}, KEPT = "oneloop.language";
const ATTRIBUTES = ["aria-label", "title", "placeholder", "alt"];

const chosen = localStorage.getItem(KEPT) ?? "auto";
const system = navigator.language.slice(0, 2).toLowerCase();
export const language = Object.hasOwn(LANGUAGES, chosen) ? chosen : Object.hasOwn(LANGUAGES, system) ? system : "en";
const table = language === "en" ? {} : await read();

async function read() {
  try { return await (await fetch(new URL(`words.${language}.json`, import.meta.url))).json(); } catch { return {}; } // English, where there is no server
}

// `english` in the page's language; `{name}` in it becomes the value of that name.
export function say(english, values = {}) {
  return (table[english] ?? english).replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
}

// A whole number, with the language's separators.
export const whole = value => Math.round(value).toLocaleString(language);

// Translates what the HTML itself has written below `root`.
export function translate(root) {
  document.documentElement.lang = language;
  if (language === "en") return;
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim();
    if (text) texts.currentNode.data = texts.currentNode.data.replace(text, () => say(text));
  }
  for (const name of ATTRIBUTES) for (const each of root.querySelectorAll(`[${name}]`)) each.setAttribute(name, say(each.getAttribute(name)));
}

// [value, name] of each choice, what is chosen, and a function that chooses: the page loads again in that language.
export const languages = {
  all: [["auto", say("Like the browser")], ...Object.entries(LANGUAGES)],
  chosen: Object.hasOwn(LANGUAGES, chosen) ? chosen : "auto",
  choose(value) { localStorage.setItem(KEPT, value); location.reload(); },
};
