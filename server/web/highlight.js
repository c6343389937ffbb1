// Colours for code: a tokenizer by one regular expression a language. It knows comments, strings, numbers, keywords and names, and no
// grammar, so half-written code has colours, too. A language is a line of LANGUAGES; each expression passes over the text once.

import {el} from "./dom.js";

const MAX_CHARS = 60_000; // longer code has no colours: each token is an element
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*`;
const CALL = String.raw`[A-Za-z_]\w*(?=\()`, END = "(?![^])";
const SLASHES = String.raw`\/\/.*|\/\*[^]*?(?:\*\/|${END})`, HASH = String.raw`(?<!\S)#.*`;
const DOUBLE = String.raw`"(?:\\[^]|[^"\\\n])*"?`, SINGLE = String.raw`'(?:\\[^]|[^'\\\n])*'?`, TEMPLATE = "`(?:\\\\[^]|[^`\\\\])*`?";
const CHARACTER = String.raw`'(?:\\[^\n][^'\n]{0,8}|[^'\\\n])'`;
const TRIPLE = String.raw`[bfruBFRU]{0,2}(?:"""[^]*?(?:"""|${END})|'''[^]*?(?:'''|${END})|${DOUBLE}|${SINGLE})`;
const C_LIKE = "break case continue default do else enum for goto if return sizeof static struct switch typedef union void while const int char float double long short unsigned signed bool true false";
const CLASSES = "abstract catch class extends final finally implements import instanceof interface new null package private protected public super this throw throws try";

const LANGUAGES = {
  python: ["#.*", TRIPLE, `${CALL}|@[\\w.]+`, "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match None nonlocal not or pass raise return self True False try while with yield"],
  javascript: [SLASHES, `${DOUBLE}|${SINGLE}|${TEMPLATE}`, CALL, "async await break case catch class const continue debugger default delete do else enum export extends false finally for from function if implements import in instanceof interface let new null of private protected public readonly return static super switch this throw true try type typeof undefined var void while yield"],
  c: [SLASHES, `${DOUBLE}|${CHARACTER}`, `${CALL}|^[ \\t]*#[ \\t]*\\w+`, `${C_LIKE} auto class constexpr delete explicit friend inline namespace new noexcept nullptr operator override private protected public template this throw try catch typename using virtual`],
  java: [SLASHES, `${DOUBLE}|${CHARACTER}`, `${CALL}|@\\w+`, `${C_LIKE} ${CLASSES} boolean byte var record val fun when object string using namespace async await override out ref readonly`],
  go: [SLASHES, `${DOUBLE}|${CHARACTER}|\`[^\`]*\`?`, CALL, "any bool break byte case chan const continue default defer else error fallthrough false float32 float64 for func go goto if import int int64 interface iota make map new nil package range return rune select string struct switch true type uint8 var"],
  rust: [SLASHES, `${DOUBLE}|${CHARACTER}`, `${CALL}|\\w+!|#!?\\[[^\\]\\n]{0,200}\\]|'[a-z_]\\w*(?!')`, "as async await bool box break const continue crate dyn else enum extern f32 f64 false fn for i32 i64 if impl in let loop match mod move mut pub ref return self Self static str struct super trait true type u8 u32 u64 unsafe use usize where while"],
  shell: [HASH, `${DOUBLE}|'[^']*'?`, String.raw`\$\{?[\w@#?*!-]+\}?|(?<=^|[|;&] ?)(?:sudo|cd|echo|export|source|git|pip|python3?|docker|npm|curl|apt|apt-get)\b`, "case do done elif else esac fi for function if in local return select set then time until while"],
  sql: [String.raw`--.*|\/\*[^]*?(?:\*\/|${END})`, "'(?:''|[^'])*'?", CALL, "add all alter and as asc begin between by case commit constraint create cross default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer partition primary references replace returning right rollback select set table then union unique update using values view when where with"],
  json: [SLASHES, DOUBLE, String.raw`"(?:\\[^]|[^"\\\n])*"(?=\s*:)`, "true false null"],
  yaml: [HASH, `${DOUBLE}|(?<!\\w)${SINGLE}`, String.raw`(?<![\w./-])[\w./-]{1,80}(?=[ \t]{0,9}[:=](?:\s|${END}))|^\[+[\w. "-]+\]+`, "true false null yes no on off"],
  html: [`<!--[^]*?(?:-->|${END})`, `(?<==)(?:${DOUBLE}|${SINGLE})`, String.raw`(?<=\s)[\w:@.-]+(?==["'])`, "", String.raw`<\/?[A-Za-z][\w:-]*|<!\w+|(?<=[\w"'\s/])\/?>`],
  css: [String.raw`\/\*[^]*?(?:\*\/|${END})`, `${DOUBLE}|${SINGLE}`, String.raw`(?<=[{;\s])[\w-]{1,80}(?=:\s)|(?<![\w-])[\w-]{1,80}(?=\()`, "", String.raw`@[\w-]+|!important|#[\da-fA-F]{3,8}\b`],
  diff: [String.raw`^(?:@@|diff |index |\+\+\+|---).*`, String.raw`^\+.*`, "", "", "^-.*"],
};
const ALIASES = {py: "python", python3: "python", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", "c++": "c", cpp: "c", cc: "c", h: "c", hpp: "c", cuda: "c", csharp: "java", "c#": "java", cs: "java", kotlin: "java", kt: "java", swift: "java", scala: "java", php: "java", dart: "java", golang: "go", rs: "rust", bash: "shell", sh: "shell", zsh: "shell", console: "shell", dockerfile: "shell", postgresql: "sql", mysql: "sql", sqlite: "sql", jsonc: "json", json5: "json", yml: "yaml", toml: "yaml", ini: "yaml", xml: "html", svg: "html", vue: "html", scss: "css", less: "css", patch: "diff"};

const readers = new Map(); // by language, made when code of it is first seen

function reader(name) {
  if (!readers.has(name)) {
    const [comment, string, names, words, keyword] = LANGUAGES[name];
    const parts = [["comment", comment], ["name", names], ["string", string], ["keyword", keyword], ["number", name === "diff" ? "" : NUMBER], ["word", String.raw`[A-Za-z_$][\w$]*`]];
    const pattern = parts.filter(([, each]) => each).map(([kind, each]) => `(?<${kind}>${each})`).join("|");
    readers.set(name, {pattern: new RegExp(pattern, "gm"), words: new Set(words.split(" ")), ignoresCase: name === "sql"});
  }
  return readers.get(name);
}

// [[kind, text]] whose texts together are `code`; kind: "comment", "string", "number", "keyword", "name", or "" for the rest.
export function tokens(code, language) {
  const lower = language.toLowerCase(), name = ALIASES[lower] ?? lower;
  if (!Object.hasOwn(LANGUAGES, name) || code.length > MAX_CHARS) return [["", code]];
  const {pattern, words, ignoresCase} = reader(name), found = [];
  const add = (kind, text) => { if (kind === "" && found.at(-1)?.[0] === "") found.at(-1)[1] += text; else if (text) found.push([kind, text]); };
  let at = 0;
  for (const match of code.matchAll(pattern)) {
    const [text] = match, [group] = Object.entries(match.groups).find(([, each]) => each !== undefined);
    const isKeyword = words.has(ignoresCase ? text.toLowerCase() : text);
    add("", code.slice(at, match.index));
    add(isKeyword ? "keyword" : group === "word" ? "" : group, text);
    at = match.index + text.length;
  }
  add("", code.slice(at));
  return found;
}

// What stands in a code element: text, and elements with a class for what has a colour.
export const highlighted = (code, language) => tokens(code, language).map(([kind, text]) => kind ? el("span", {class: `code-${kind}`}, text) : text);
