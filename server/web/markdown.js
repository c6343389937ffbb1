// Markdown, as models write it, to elements. Text stays text: there is no HTML in it, links go to http, https and mailto, pictures of other
// sites become links. `Markdown` keeps the elements of blocks that did not change, so an answer that grows is not drawn anew.

import {button, copy, el} from "./dom.js";
import {highlighted} from "./highlight.js";
import {NotMath, toMathml} from "./math.js";
import {say} from "./words.js";

const MAX_DEPTH = 12; // of quotes, lists and emphasis in each other
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/, HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/, RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|)$/, QUOTE = /^ {0,3}>\s?(.*)$/, SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MATH_OPEN = /^\s*(\$\$|\\\[)/, LANGUAGE_SAFE = /^[\w+#.-]{1,30}$/;

export class Markdown {
  constructor(root) {
    this.root = root;
    this.sources = [];
  }
  // `text` is the whole of it, each time.
  update(text) {
    const found = blocks(text.replace(/\r\n?/g, "\n").split("\n")), {root, sources} = this;
    let same = 0;
    while (same < found.length && found[same].source === sources[same]) same++;
    while (root.childNodes.length > same) root.lastChild.remove();
    for (const block of found.slice(same)) root.append(draw(block, 0));
    this.sources = found.map(block => block.source);
  }
}

// Elements of a text that is complete.
export function markdown(text) {
  const root = el("div", {class: "markdown"});
  new Markdown(root).update(text);
  return root;
}

// --- blocks --------------------------------------------------------------------------------------------------------

// Lines to blocks: {kind, source, …}. `source` says whether one is the same as before.
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const [block, end] = read(lines, at);
    block.source = `${block.kind}\n${lines.slice(at, end).join("\n")}`;
    found.push(block);
    at = end;
  }
  return found;
}

function read(lines, at) {
  const line = lines[at];
  let match;
  if (match = FENCE.exec(line)) return fence(lines, at, match);
  if (MATH_OPEN.test(line)) { const found = displayMath(lines, at); if (found) return found; }
  if (match = HEADING.exec(line)) return [{kind: "heading", level: match[1].length, text: match[2] ?? ""}, at + 1];
  if (RULE.test(line)) return [{kind: "rule"}, at + 1];
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (line.includes("|") && SEPARATOR.test(lines[at + 1] ?? "") && (lines[at + 1].includes("|") || lines[at + 1].includes("-"))) { const found = table(lines, at); if (found) return found; }
  return paragraph(lines, at);
}

function fence(lines, at, [, mark, language]) {
  const indent = /^ */.exec(lines[at])[0].length, body = [];
  const closes = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  for (; end < lines.length && !closes.test(lines[end]); end++) body.push(lines[end].replace(new RegExp(`^ {0,${indent}}`), ""));
  return [{kind: "code", language, text: body.join("\n"), whole: end < lines.length}, Math.min(end + 1, lines.length)];
}

function displayMath(lines, at) {
  const open = MATH_OPEN.exec(lines[at])[1], close = open === "$$" ? "$$" : "\\]";
  const first = lines[at].trimStart().slice(2);
  const body = [];
  for (let end = at, rest = first; end < lines.length; rest = lines[++end]) {
    const stop = rest.indexOf(close);
    if (stop >= 0) {
      if (rest.slice(stop + 2).trim().replace(/^[.,;]$/, "")) return null; // text goes on behind it: a paragraph's matter
      body.push(rest.slice(0, stop));
      return [{kind: "math", text: body.join("\n")}, end + 1];
    }
    if (!rest.trim() && end > at) return null; // a blank line is no part of a formula
    body.push(rest);
  }
  return null;
}

function quote(lines, at) {
  const body = [];
  let end = at, match;
  for (; end < lines.length && (match = QUOTE.exec(lines[end])); end++) body.push(match[1]);
  return [{kind: "quote", lines: body}, end];
}

const indentOf = line => /^ */.exec(line.replace(/\t/g, "    "))[0].length;

function list(lines, at) {
  const [, , firstMark] = ITEM.exec(lines[at]), ordered = /\d/.test(firstMark), base = indentOf(lines[at]);
  const items = [];
  let end = at, loose = false;
  while (end < lines.length) {
    const line = lines[end], match = ITEM.exec(line);
    if (match && indentOf(line) <= base + 1 && !RULE.test(line)) {
      if (indentOf(line) < base || /\d/.test(match[2]) !== ordered) break;
      items.push({lines: [match[3] ?? ""], inner: indentOf(line) + match[2].length + 1});
      end++;
    } else if (!line.trim()) {
      let after = end;
      while (after < lines.length && !lines[after].trim()) after++;
      const next = lines[after], again = next !== undefined && ITEM.exec(next);
      const goesOn = next !== undefined && (indentOf(next) > base + 1 || again && indentOf(next) >= base && /\d/.test(again[2]) === ordered && !RULE.test(next));
      if (!goesOn) break;
      loose ||= true;
      items.at(-1).lines.push(...lines.slice(end, after));
      end = after;
    } else if (indentOf(line) > base || !starts(line)) {
      items.at(-1).lines.push(unindented(line, items.at(-1).inner));
      end++;
    } else break;
  }
  return [{kind: "list", ordered, start: ordered ? parseInt(firstMark, 10) : 1, items: items.map(item => item.lines), loose}, end];
}

const unindented = (line, most) => { const text = line.replace(/\t/g, "    "); return text.slice(Math.min(indentOf(text), most)); };

// Whether a line begins a block by itself, and so is no more of the paragraph above.
const starts = line => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || MATH_OPEN.test(line);

function cells(line) {
  const found = [""];
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  for (let at = 0, inCode = false; at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") { found[found.length - 1] += "|"; at++; }
    else if (text[at] === "|" && !inCode) found.push("");
    else { if (text[at] === "`") inCode = !inCode; found[found.length - 1] += text[at]; }
  }
  return found.map(cell => cell.trim());
}

function table(lines, at) {
  const head = cells(lines[at]), sides = cells(lines[at + 1]);
  if (head.length !== sides.length) return null;
  const align = sides.map(side => side.startsWith(":") && side.endsWith(":") ? "center" : side.endsWith(":") ? "right" : null);
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end++) rows.push(cells(lines[end]));
  return [{kind: "table", head, align, rows}, end];
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim()) {
    const match = ITEM.exec(lines[end]);
    if (match ? !/^\d/.test(match[2]) || /^1[.)]$/.test(match[2]) : starts(lines[end])) break; // "in\n1986. It…" is no list
    end++;
  }
  return [{kind: "paragraph", text: lines.slice(at, end).map(line => line.trimStart()).join("\n")}, end];
}

// --- elements ------------------------------------------------------------------------------------------------------

const within = (lines, depth) => depth >= MAX_DEPTH ? [lines.join("\n")] : blocks(lines).map(block => draw(block, depth + 1));

function draw(block, depth) {
  switch (block.kind) {
    case "code": return codeBlock(block.text, block.language);
    case "math": return el("div", {class: "display-math", tabindex: "0", role: "group", "aria-label": say("Formula")}, formula(block.text, true, `$$${block.text}$$`));
    case "heading": return el(`h${Math.min(6, block.level + 2)}`, null, inline(block.text, depth)); // h1 and h2 are the page's
    case "rule": return el("hr");
    case "quote": return el("blockquote", null, within(block.lines, depth));
    case "list": return el(block.ordered ? "ol" : "ul", {start: block.ordered && block.start !== 1 ? block.start : null}, block.items.map(lines => item(lines, depth, block.loose)));
    case "table": return drawTable(block, depth);
    default: return el("p", null, inline(block.text, depth));
  }
}

export function codeBlock(text, language) {
  const name = LANGUAGE_SAFE.test(language ?? "") ? language : "";
  const control = button(say("Copy"), () => copy(text, control), {class: "small plain", "aria-label": `${say("Copy code")}${name ? `, ${name}` : ""}`});
  return el("div", {class: "code-block"}, el("div", {class: "code-head"}, el("span", null, name), control), el("pre", {tabindex: "0", "aria-label": `${say("Code")}${name ? `, ${name}` : ""}`}, el("code", null, highlighted(text, name))));
}

function item(lines, depth, loose) {
  const task = /^\[([ xX])\]\s+(.*)$/.exec(lines[0]);
  const drawn = within(task ? [task[2], ...lines.slice(1)] : lines, depth);
  const children = loose ? drawn : drawn.flatMap(child => child.tagName === "P" ? [...child.childNodes] : [child]);
  return task ? el("li", {class: "task"}, el("input", {type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? say("open") : say("done")}), " ", children) : el("li", null, children);
}

function drawTable({head, align, rows}, depth) {
  const cell = (tag, text, index, more) => el(tag, {class: align[index], ...more}, inline(text ?? "", depth));
  const top = el("tr", null, head.map((text, index) => cell("th", text, index, {scope: "col"})));
  const body = rows.map(row => el("tr", null, head.map((_, index) => cell("td", row[index], index))));
  return el("div", {class: "table", tabindex: "0", role: "region", "aria-label": say("Table")}, el("table", null, el("thead", null, top), el("tbody", null, body)));
}

function formula(source, display, written) {
  try {
    return toMathml(source, display);
  } catch (error) {
    if (!(error instanceof NotMath)) throw error;
    return el("code", {class: "formula", title: say("Shown as it was written: {reason}", {reason: error.message})}, written);
  }
}

// --- inline --------------------------------------------------------------------------------------------------------

const ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0"};
const ADDRESS = /^(https?:\/\/|mailto:)[^\s<>]+$/i;
const PIECES = /\\[!-/:-@[-`{-~]|`+|!?\[|\*+|_+|~~|\$\$?|<[^\s<>]{3,2000}>|https?:\/\/[^\s<>"']+|&(?:amp|lt|gt|quot|nbsp|#39);|<br\s*\/?>| {2,}\n|\n/g;

// Text to nodes. One pass; what has no partner is text.
function inline(text, depth) {
  const nodes = [];
  let at = 0;
  const add = part => { if (typeof part === "string" && typeof nodes.at(-1) === "string") nodes[nodes.length - 1] += part; else if (part !== "") nodes.push(part); };
  PIECES.lastIndex = 0;
  const misses = new Set(); // marks that have no partner in the rest: not looked for again
  for (let match; match = PIECES.exec(text);) {
    add(text.slice(at, match.index));
    const [node, end] = depth < MAX_DEPTH ? piece(text, match[0], match.index, depth, misses) : [match[0], match.index + match[0].length];
    add(node);
    at = PIECES.lastIndex = end;
  }
  add(text.slice(at));
  return nodes;
}

function piece(text, mark, start, depth, misses) {
  const end = start + mark.length, plain = [mark, end];
  if (mark[0] === "\\") return mark[1] === "(" || mark[1] === "[" ? bracketMath(text, mark, end, misses) : [mark[1], end];
  if (mark[0] === "`") return codeSpan(text, mark, end, misses);
  if (mark === "\n") return ["\n", end];
  if (mark.endsWith("\n") || /^<br/i.test(mark)) return [el("br"), end];
  if (mark[0] === "&") return [ENTITIES[mark], end];
  if (mark[0] === "<") return ADDRESS.test(mark.slice(1, -1)) ? [link(mark.slice(1, -1), [mark.slice(1, -1)]), end] : ["<", start + 1];
  if (mark.startsWith("http")) return bareLink(mark, start);
  if (mark.endsWith("[")) return linkAt(text, mark, end, depth, misses);
  if (mark[0] === "$") return dollarMath(text, mark, end, misses);
  return emphasis(text, mark, start, depth, misses) ?? plain;
}

// Where `mark` stands next, from `from` on; -1 is remembered.
function find(text, mark, from, misses) {
  if (misses.has(mark)) return -1;
  const found = text.indexOf(mark, from);
  if (found < 0) misses.add(mark);
  return found;
}

function codeSpan(text, mark, end, misses) {
  for (let close = find(text, mark, end, misses); close >= 0;) {
    const run = /^`+/.exec(text.slice(close, close + 100))[0].length;
    if (run === mark.length) {
      const body = text.slice(end, close).replace(/\n/g, " ");
      return [el("code", null, /^ .*[^ ].* $/.test(body) ? body.slice(1, -1) : body), close + run];
    }
    close = text.indexOf(mark, close + run);
  }
  return [mark, end];
}

function bracketMath(text, mark, end, misses) {
  const close = find(text, mark === "\\(" ? "\\)" : "\\]", end, misses);
  if (close < 0) return [mark, end];
  return [formula(text.slice(end, close), mark === "\\[", text.slice(end - 2, close + 2)), close + 2];
}

// A price is no formula: no space behind the opening dollar nor before the closing one, and no digit behind that.
function dollarMath(text, mark, end, misses) {
  const close = find(text, mark, end, misses), body = text.slice(end, close);
  if (close < 0 || !body.trim() || body.includes("\n\n")) return [mark, end];
  if (mark === "$" && (/^\s|\s$/.test(body) || /\d/.test(text[close + 1] ?? "") || text[close - 1] === "\\")) return [mark, end];
  return [formula(body, mark === "$$", `${mark}${body}${mark}`), close + mark.length];
}

function linkAt(text, mark, end, depth, misses) {
  if (misses.has("](")) return [mark, end];
  const middle = find(text, "](", end, misses);
  if (middle < 0 || middle - end > 1000) return [mark, end];
  const label = text.slice(end, middle);
  if (label.includes("[") && !/^!?\[.*$/.test(label)) return [mark, end];
  let close = middle + 2;
  for (let open = 1; close < text.length && close - middle < 2100; close++) {
    if (text[close] === "(") open++;
    else if (text[close] === ")" && --open === 0) break;
    else if (text[close] === "\n") return [mark, end];
  }
  if (text[close] !== ")") return [mark, end];
  const address = /^\s*<?([^\s<>]*)>?(?:\s+["'(].*)?\s*$/.exec(text.slice(middle + 2, close))?.[1];
  if (!address || !ADDRESS.test(address)) return [label || mark, close + 1];
  return [link(address, mark[0] === "!" ? [say("Picture: {name}", {name: label || address})] : inline(label, depth + 1)), close + 1];
}

function bareLink(mark, start) {
  let address = mark.replace(/[.,;:!?*_~`'"]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
  return ADDRESS.test(address) ? [link(address, [address]), start + address.length] : [mark, start + mark.length];
}

const link = (address, children) => el("a", {href: address, target: "_blank", rel: "noopener noreferrer nofollow"}, ...children);

const EMPHASES = {"*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del"};

function emphasis(text, mark, start, depth, misses) {
  const use = mark.length > 2 && mark[0] !== "~" ? (mark.length === 3 ? mark : null) : mark;
  if (use === null) return null;
  const end = start + use.length, isWord = character => /[\p{L}\p{N}]/u.test(character ?? "");
  if (!text[end] || /\s/.test(text[end]) || mark[0] === "_" && isWord(text[start - 1])) return null;
  for (let close = find(text, use, end + 1, misses), tries = 0; close >= 0 && tries < 100; close = text.indexOf(use, close + 1), tries++) {
    let behind = close + use.length;
    if (text[behind] === use[0] && text[close - 1] !== use[0]) { // a longer run: its end is ours where ours is the outer one
      while (text[behind] === use[0]) behind++;
      if (use.length === 1 && (behind - close) % 2 === 0) { close = behind - 1; continue; }
      close = behind - use.length;
    }
    if (/\s/.test(text[close - 1]) || text[close - 1] === "\\" || use[0] === "_" && isWord(text[close + use.length])) continue;
    const children = inline(text.slice(end, close), depth + 1);
    const made = use.length === 3 ? el("strong", null, el("em", null, children)) : el(EMPHASES[use], null, children);
    return [made, close + use.length];
  }
  return null;
}
