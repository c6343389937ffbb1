// LaTeX as models write it, to MathML: a subset that is whole where it is taken at all. `toMathml` throws for what it does not know, and
// its caller shows the source. Bounded: nesting has a limit, and every character is read once.

import {mathml as m} from "./dom.js";

const MAX_DEPTH = 40, MAX_LENGTH = 10000;

const GREEK = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", vartheta: "ϑ", iota: "ι", kappa: "κ",
  lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", omicron: "ο", pi: "π", varpi: "ϖ", rho: "ρ", varrho: "ϱ", sigma: "σ", varsigma: "ς", tau: "τ", upsilon: "υ",
  phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Upsilon: "Υ",
  Phi: "Φ", Psi: "Ψ", Omega: "Ω", infty: "∞", partial: "∂", nabla: "∇", hbar: "ℏ", ell: "ℓ", Re: "ℜ", Im: "ℑ", aleph: "ℵ", emptyset: "∅", varnothing: "∅",
  imath: "ı", jmath: "ȷ", angle: "∠", triangle: "△", top: "⊤", bot: "⊥", square: "□", blacksquare: "■", checkmark: "✓", degree: "°", dagger: "†", prime: "′",
};
const OPERATORS = {
  times: "×", div: "÷", cdot: "⋅", pm: "±", mp: "∓", ast: "∗", star: "⋆", circ: "∘", bullet: "∙", oplus: "⊕", ominus: "⊖", otimes: "⊗", odot: "⊙",
  wedge: "∧", land: "∧", vee: "∨", lor: "∨", cap: "∩", cup: "∪", setminus: "∖", neg: "¬", lnot: "¬", le: "≤", leq: "≤", leqslant: "⩽", ge: "≥", geq: "≥",
  geqslant: "⩾", ne: "≠", neq: "≠", equiv: "≡", approx: "≈", sim: "∼", simeq: "≃", cong: "≅", propto: "∝", ll: "≪", gg: "≫", prec: "≺", succ: "≻", in: "∈",
  notin: "∉", ni: "∋", subset: "⊂", subseteq: "⊆", supset: "⊃", supseteq: "⊇", subsetneq: "⊊", forall: "∀", exists: "∃", nexists: "∄", to: "→",
  rightarrow: "→", leftarrow: "←", gets: "←", leftrightarrow: "↔", Rightarrow: "⇒", Leftarrow: "⇐", Leftrightarrow: "⇔", implies: "⟹", impliedby: "⟸",
  iff: "⟺", mapsto: "↦", longrightarrow: "⟶", longleftarrow: "⟵", uparrow: "↑", downarrow: "↓", rightharpoonup: "⇀", hookrightarrow: "↪", perp: "⊥",
  parallel: "∥", mid: "∣", nmid: "∤", vdash: "⊢", models: "⊨", cdots: "⋯", ldots: "…", dots: "…", dotsc: "…", dotsb: "⋯", vdots: "⋮", ddots: "⋱",
  therefore: "∴", because: "∵", colon: ":", lt: "<", gt: ">", vert: "|", Vert: "‖", "|": "‖", "{": "{", "}": "}", lbrace: "{", rbrace: "}", langle: "⟨",
  rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", lvert: "|", rvert: "|", lVert: "‖", rVert: "‖", backslash: "\\", "%": "%", "#": "#",
  "&": "&", _: "_", $: "$", lbrack: "[", rbrack: "]", coloneqq: "≔", triangleq: "≜", bmod: "mod",
};
const LARGE = {sum: "∑", prod: "∏", coprod: "∐", bigcup: "⋃", bigcap: "⋂", bigoplus: "⨁", bigotimes: "⨂", bigvee: "⋁", bigwedge: "⋀"};
const INTEGRALS = {int: "∫", iint: "∬", iiint: "∭", oint: "∮"};
const FUNCTIONS = new Set("arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf limsup ln log max min Pr sec sin sinh sup tan tanh".split(" "));
const LIMITS = new Set("det gcd inf lim liminf limsup max min Pr sup".split(" ")); // what stands below and above them does so in a display
const SPACES = {",": ".167em", ":": ".222em", ">": ".222em", ";": ".278em", " ": ".25em", "!": "-.167em", quad: "1em", qquad: "2em", enspace: ".5em", "~": ".25em"};
const ACCENTS = {hat: "^", widehat: "^", bar: "¯", overline: "‾", tilde: "~", widetilde: "~", vec: "→", overrightarrow: "→", dot: "˙", ddot: "¨", check: "ˇ", breve: "˘", acute: "´", grave: "`", overbrace: "⏞"};
const BELOW = {underline: "_", underbrace: "⏟"};
const VARIANTS = {mathbb: [0x1d538, 0x1d552, 0x1d7d8], mathbf: [0x1d400, 0x1d41a, 0x1d7ce], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce], bm: [0x1d468, 0x1d482, 0x1d7ce], mathcal: [0x1d49c, 0x1d4b6], mathscr: [0x1d49c, 0x1d4b6], mathfrak: [0x1d504, 0x1d51e], mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2], mathtt: [0x1d670, 0x1d68a, 0x1d7f6]};
// Letters that Unicode had before the others of their alphabet.
const EXCEPTIONS = {mathbb: {C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ"}, mathcal: {B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ"}, mathfrak: {C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ"}};
EXCEPTIONS.mathscr = EXCEPTIONS.mathcal;
const FENCES = {matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], smallmatrix: ["", ""], cases: ["{", ""], array: ["", ""]};
const ALIGNED = new Set("aligned align align* split gather gather* gathered equation equation* alignat* eqnarray eqnarray*".split(" "));
const NEGATED = {"=": "≠", "∈": "∉", "<": "≮", ">": "≯", "≤": "≰", "≥": "≱", "⊂": "⊄", "⊆": "⊈", "≡": "≢", "∼": "≁", "≈": "≉", "∣": "∤", "∥": "∦"};

export class NotMath extends Error {}

// A <math> element. Throws NotMath.
export function toMathml(source, display) {
  if (source.length > MAX_LENGTH) throw new NotMath("it is too long");
  const reader = new Reader(tokens(source), display);
  const row = reader.row(() => reader.next === undefined);
  return m("math", {display: display ? "block" : "inline", "aria-label": source.trim()}, row);
}

function tokens(source) {
  const found = source.match(/\\[a-zA-Z]+\*?|\\[^]|%[^\n]*|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
  return found.filter(each => !each.startsWith("%"));
}

const operator = (text, attributes) => m("mo", attributes, text);
const rowOf = parts => parts.length === 1 ? parts[0] : m("mrow", null, ...parts);

class Reader {
  constructor(found, display) {
    this.tokens = found;
    this.at = 0;
    this.depth = 0;
    this.display = display;
  }
  get next() { return this.tokens[this.at]; }
  take() {
    if (this.at >= this.tokens.length) throw new NotMath("it ends too early");
    return this.tokens[this.at++];
  }
  expect(token) { if (this.take() !== token) throw new NotMath(`there is no ${token}`); }
  skipSpace() { while (this.next !== undefined && /^\s/.test(this.next)) this.at++; }

  row(ends) {
    if (++this.depth > MAX_DEPTH) throw new NotMath("it is too deep");
    const parts = [];
    for (this.skipSpace(); !ends(); this.skipSpace()) {
      if (this.next === undefined) throw new NotMath("it ends too early");
      parts.push(this.scripted());
    }
    this.depth--;
    return rowOf(parts);
  }

  // What follows _ or ^, or a command: a group, or one symbol.
  argument() {
    this.skipSpace();
    if (this.next !== "{") {
      if (/^\d{2,}/.test(this.next ?? "")) { // x^12 is x to the 1, then 2
        const [digit, ...rest] = this.next;
        this.tokens[this.at] = rest.join("");
        return m("mn", null, digit);
      }
      return this.atom();
    }
    this.take();
    const row = this.row(() => this.next === "}");
    this.expect("}");
    return row;
  }

  // The characters of a group, as they are.
  text() {
    this.skipSpace();
    this.expect("{");
    let found = "";
    for (let depth = 0; ;) {
      const token = this.take();
      if (token === "}" && depth-- === 0) return found;
      if (token === "{") depth++;
      found += /^\\[^a-zA-Z]$/.test(token) ? token.slice(1) : token;
    }
  }

  scripted() {
    const base = this.atom();
    let below = null, above = null;
    for (this.skipSpace(); ["_", "^", "'"].includes(this.next); this.skipSpace()) {
      const token = this.take();
      if (token === "_") { if (below) throw new NotMath("two subscripts"); below = this.argument(); }
      else if (token === "^") above = above ? m("mrow", null, above, this.argument()) : this.argument();
      else above = above ? m("mrow", null, above, operator("′")) : operator("′");
    }
    if (!below && !above) return base;
    const under = base.dataset?.limits !== undefined && this.display || base.dataset?.limits === "always";
    const [both, lower, upper] = under ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    return below && above ? m(both, null, base, below, above) : below ? m(lower, null, base, below) : m(upper, null, base, above);
  }

  atom() {
    this.skipSpace();
    const token = this.take();
    if (token === "{") {
      const row = this.row(() => this.next === "}");
      this.expect("}");
      return row;
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\d/.test(token)) return m("mn", null, token);
    if (/^\p{L}/u.test(token)) return m("mi", null, token);
    if ("_^}&".includes(token)) throw new NotMath(`${token} stands alone`);
    if (token === "'") return operator("′");
    if (token === "~") return m("mspace", {width: ".25em"});
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token, "()[]|/".includes(token) ? {stretchy: "false"} : null);
  }

  command(name) {
    if (Object.hasOwn(GREEK, name)) return m("mi", null, GREEK[name]);
    if (Object.hasOwn(OPERATORS, name)) return operator(OPERATORS[name], "{}|‖⟨⟩⌊⌋⌈⌉".includes(OPERATORS[name]) ? {stretchy: "false"} : null);
    if (Object.hasOwn(LARGE, name)) return operator(LARGE[name], {largeop: "true", "data-limits": "display"});
    if (Object.hasOwn(INTEGRALS, name)) return operator(INTEGRALS[name], {largeop: "true"});
    if (FUNCTIONS.has(name)) return m("mi", {mathvariant: "normal", "data-limits": LIMITS.has(name) ? "display" : null}, name.replace(/^lim(inf|sup)$/, "lim $1"));
    if (Object.hasOwn(SPACES, name)) return m("mspace", {width: SPACES[name]});
    if (Object.hasOwn(ACCENTS, name)) return m("mover", {accent: "true", "data-limits": name === "overbrace" ? "always" : null}, this.argument(), operator(ACCENTS[name], {stretchy: /^(over|wide)/.test(name) ? "true" : "false"}));
    if (Object.hasOwn(BELOW, name)) return m("munder", {accentunder: "true", "data-limits": name === "underbrace" ? "always" : null}, this.argument(), operator(BELOW[name], {stretchy: "true"}));
    if (Object.hasOwn(VARIANTS, name)) return m("mi", {mathvariant: "normal"}, inVariant(name, this.text()));
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac": return m("mfrac", null, this.argument(), this.argument());
      case "binom": case "dbinom": case "tbinom": return m("mrow", null, operator("("), m("mfrac", {linethickness: "0"}, this.argument(), this.argument()), operator(")"));
      case "sqrt": return this.root();
      case "text": case "textrm": case "textnormal": case "mbox": case "textbf": case "textit": case "texttt": return m("mtext", {class: name === "textbf" ? "bold" : null}, this.text());
      case "mathrm": case "operatorname": case "operatorname*": return m("mi", {mathvariant: "normal", "data-limits": name.endsWith("*") ? "display" : null}, this.text().replace(/\\[,;: ]/g, " "));
      case "mathit": return m("mi", null, this.text());
      case "left": return this.fenced();
      case "begin": return this.environment();
      case "not": return this.negated();
      case "pmod": return m("mrow", null, m("mspace", {width: "1em"}), operator("("), m("mi", {mathvariant: "normal"}, "mod"), m("mspace", {width: ".3em"}), this.argument(), operator(")"));
      case "boxed": return m("mrow", {class: "boxed"}, this.argument());
      case "overset": case "stackrel": { const above = this.argument(); return m("mover", null, this.argument(), above); }
      case "underset": { const below = this.argument(); return m("munder", null, this.argument(), below); }
      case "xrightarrow": return m("mover", null, operator("→", {stretchy: "true", minsize: "2em"}), this.argument());
      case "big": case "Big": case "bigg": case "Bigg": case "bigl": case "bigr": case "Bigl": case "Bigr": case "biggl": case "biggr": case "Biggl": case "Biggr": return this.atom();
      case "displaystyle": case "textstyle": case "limits": case "nolimits": case "nonumber": case "notag": return m("mrow");
    }
    throw new NotMath(`\\${name} is not known`);
  }

  root() {
    this.skipSpace();
    if (this.next !== "[") return m("msqrt", null, this.argument());
    this.take();
    const degree = this.row(() => this.next === "]");
    this.expect("]");
    return m("mroot", null, this.argument(), degree);
  }

  delimiter() {
    this.skipSpace();
    const token = this.take(), name = token.slice(1);
    if (token === ".") return "";
    if (!token.startsWith("\\")) return token;
    if (Object.hasOwn(OPERATORS, name)) return OPERATORS[name];
    throw new NotMath(`${token} is no bracket`);
  }

  fenced() {
    const open = this.delimiter(), parts = [operator(open, {fence: "true", stretchy: "true", form: "prefix"})];
    while (true) {
      parts.push(this.row(() => this.next === "\\right" || this.next === "\\middle"));
      const ends = this.take() === "\\right", text = this.delimiter();
      parts.push(operator(text, {fence: "true", stretchy: "true", form: ends ? "postfix" : "infix"}));
      if (ends) return m("mrow", null, ...parts);
    }
  }

  environment() {
    const name = this.text(), isAligned = ALIGNED.has(name);
    if (!isAligned && !Object.hasOwn(FENCES, name)) throw new NotMath(`${name} is not known`);
    if (name === "array") this.text(); // which columns are centred is left to the browser
    const rows = [[]], ends = () => ["&", "\\\\", "\\end"].includes(this.next);
    while (true) {
      rows.at(-1).push(m("mtd", null, this.row(ends)));
      const token = this.take();
      if (token === "\\\\") rows.push([]);
      if (token === "\\end") break;
    }
    if (this.text() !== name) throw new NotMath(`${name} does not end`);
    const kept = rows.filter(row => row.length > 1 || row[0].textContent !== "");
    const table = m("mtable", {class: isAligned ? "aligned" : name === "cases" ? "cases" : null, displaystyle: isAligned ? "true" : null}, ...kept.map(row => m("mtr", null, ...row)));
    const [open, close] = isAligned ? ["", ""] : FENCES[name];
    return m("mrow", null, open ? operator(open, {fence: "true", stretchy: "true"}) : null, table, close ? operator(close, {fence: "true", stretchy: "true"}) : null);
  }

  negated() {
    const negated = NEGATED[this.atom().textContent];
    if (negated === undefined) throw new NotMath("nobody knows its negation");
    return operator(negated);
  }
}

function inVariant(variant, text) {
  const [upper, lower, digits] = VARIANTS[variant], known = EXCEPTIONS[variant] ?? {};
  return [...text].map(letter => {
    if (Object.hasOwn(known, letter)) return known[letter];
    const code = letter.charCodeAt(0);
    if (letter >= "A" && letter <= "Z") return String.fromCodePoint(upper + code - 65);
    if (letter >= "a" && letter <= "z") return String.fromCodePoint(lower + code - 97);
    if (letter >= "0" && letter <= "9" && digits) return String.fromCodePoint(digits + code - 48);
    if (letter.startsWith("\\")) throw new NotMath("a command inside of a font"); // \mathbf{\alpha}
    return letter;
  }).join("");
}
