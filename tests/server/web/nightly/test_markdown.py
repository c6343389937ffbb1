"""Markdown and formulas, as a browser has them: what models write, what they break off, and what nobody may smuggle in."""

from __future__ import annotations

import pytest

from tests.server.web.nightly.browser import Page, needs_chromium

pytestmark = needs_chromium

# `shown`: the elements, written shortly: tag(children), text as it is.
_OUTLINE = """
const inside = node => [...node.childNodes].map(outline).join("");
const outline = node => node.nodeType === 3 ? node.data : `${node.tagName.toLowerCase()}(${inside(node)})`;
return inside(m.markdown(args[0]));
"""
_GROWS = """
const whole = document.createElement("div"), piecewise = document.createElement("div"), growing = new m.Markdown(piecewise);
new m.Markdown(whole).update(args[0]);
for (let end = 0; end <= args[0].length; end++) growing.update(args[0].slice(0, end));
return whole.isEqualNode(piecewise);
"""


@pytest.fixture
async def page(serve, page_of) -> Page:
    page = page_of(await serve())
    await page.open()
    return page


EXAMPLES = {
    "Plain text": "p(Plain text)",
    "two\nlines": "p(two\nlines)",
    "hard  \nbreak": "p(hardbr()break)",
    "# One\ntext": "h3(One)p(text)",
    "a **b *c* d** e": "p(a strong(b em(c) d) e)",
    "***both***": "p(strong(em(both)))",
    "snake_case_name and 2 * 3 * 4": "p(snake_case_name and 2 * 3 * 4)",
    "_em_ ~~gone~~ `co**de`": "p(em(em) del(gone) code(co**de))",
    "**not closed": "p(**not closed)",
    r"\*plain\*": "p(*plain*)",
    "- a\n- b\n  - c\n\n1. x\n2. y": "ul(li(a)li(bul(li(c))))ol(li(x)li(y))",
    "1. a\n\n   more\n\n2. b": "ol(li(p(a)p(more))li(p(b)))",
    "It was in\n1986. A good year": "p(It was in\n1986. A good year)",
    "> quoted\n> **text**": "blockquote(p(quoted\nstrong(text)))",
    "---": "hr()",
    "| a | b |\n|---|--:|\n| `x|y` | 2 |": "div(table(thead(tr(th(a)th(b)))tbody(tr(td(code(x|y))td(2)))))",
    "[t](https://e.com/a_(b)) <https://e.com>": "p(a(t) a(https://e.com))",
    "see https://e.com/x_y, ok": "p(see a(https://e.com/x_y), ok)",
    "![alt](https://e.com/p.png)": "p(a(Picture: alt))",
    "[t](javascript:alert(1))": "p(t)",
    "[t](data:text/html,x)": "p(t)",
    "<script>alert(1)</script>": "p(<script>alert(1)</script>)",
    "<img src=x onerror=alert(1)> &lt;b&gt;": "p(<img src=x onerror=alert(1)> <b>)",
    "it costs $5 and $6": "p(it costs $5 and $6)",
}


async def test_what_models_write(page):
    shown = {text: await page.imported("markdown.js", _OUTLINE, text) for text in EXAMPLES}
    assert shown == EXAMPLES


async def test_code_keeps_every_character(page):
    code = "def f():\n    return '<b>' # ``\n\n\tx"
    for written in (f"```python\n{code}\n```", f"~~~~ python\n{code}\n~~~~", f"```python\n{code}"):
        body = (
            "const code = m.markdown(args[0]).querySelector('.code-block');"
            "return [code.querySelector('code').textContent, code.querySelector('span').textContent]"
        )
        assert await page.imported("markdown.js", body, written) == [code, "python"]


async def test_a_text_that_grows_ends_as_the_whole_one(page):
    whole = "\n\n".join(text for text in EXAMPLES) + "\n\n$$\\frac{1}{2}$$\n\n```js\nlet x;\n```\nend"
    assert await page.imported("markdown.js", _GROWS, whole) is True


async def test_blocks_that_stay_keep_their_elements(page):
    body = """
    const root = document.createElement("div"), growing = new m.Markdown(root);
    growing.update("first\\n\\nsec");
    const first = root.firstChild;
    growing.update("first\\n\\nsecond");
    return [root.firstChild === first, root.textContent];
    """
    assert await page.imported("markdown.js", body) == [True, "firstsecond"]


async def test_what_is_made_to_be_slow_or_deep_is_neither(page):
    hostile = [
        ">" * 5000 + " x",
        "- " * 3000 + "x",
        "*a " * 20000,
        "[" * 20000,
        "`" * 20001 + "a",
        "$" * 20001,
        "(" * 9999,
        "\\(" * 9999,
        "_" * 20001 + "a",
    ]
    body = "return args[0].every(text => m.markdown(text).textContent.length > 0)"
    assert await page.imported("markdown.js", body, hostile) is True


# --- formulas -----------------------------------------------------------------------------------------------------

_FORMULA = """
const inside = node => [...node.childNodes].map(outline).join("");
const outline = node => node.nodeType === 3 ? node.data : `${node.tagName}(${inside(node)})`;
try { return inside(m.toMathml(args[0], true)); }
catch (error) { if (error instanceof m.NotMath) return null; throw error; }
"""
FORMULAS = {
    "x^2": "msup(mi(x)mn(2))",
    "x_i^{n+1}": "msubsup(mi(x)mi(i)mrow(mi(n)mo(+)mn(1)))",
    "x^12": "mrow(msup(mi(x)mn(1))mn(2))",
    r"\frac{a}{b}": "mfrac(mi(a)mi(b))",
    r"\sqrt[3]{x}": "mroot(mi(x)mn(3))",
    r"\sum_{i=1}^n i": "mrow(munderover(mo(∑)mrow(mi(i)mo(=)mn(1))mi(n))mi(i))",
    r"\int_0^1": "msubsup(mo(∫)mn(0)mn(1))",
    r"\lim_{x\to 0}": "munder(mi(lim)mrow(mi(x)mo(→)mn(0)))",
    r"\left( \frac12 \right]": "mrow(mo(()mfrac(mn(1)mn(2))mo(]))",
    r"f'(x)": "mrow(msup(mi(f)mo(′))mo(()mi(x)mo()))",
    r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}": "mrow(mo(()mtable(mtr(mtd(mi(a))mtd(mi(b)))mtr(mtd(mi(c))mtd(mi(d))))mo()))",
    r"\text{if } x \in \mathbb{R}": "mrow(mtext(if )mi(x)mo(∈)mi(ℝ))",
    r"\mathcal{L} \not= \hat{y}": "mrow(mi(ℒ)mo(≠)mover(mi(y)mo(^)))",
    "a < b & c": None,
    r"\unknowncommand{x}": None,
    r"\frac{a}": None,
    "{": None,
    "}": None,
    "x^": None,
    r"\begin{pmatrix} a": None,
    "{" * 100 + "x" + "}" * 100: None,
}


async def test_formulas_become_mathml_or_stay_as_they_are(page):
    shown = {source: await page.imported("math.js", _FORMULA, source) for source in FORMULAS}
    # A number of two digits as a whole argument is taken digit by digit, as LaTeX does.
    assert shown == FORMULAS


async def test_what_is_no_formula_is_shown_as_its_source(page):
    assert await page.imported("markdown.js", _OUTLINE, r"a $\nope{x}$ b") == r"p(a code($\nope{x}$) b)"
    assert await page.imported("markdown.js", _OUTLINE, r"\(x\) and \[y\]") == "p(math(mi(x)) and math(mi(y)))"
    assert await page.imported("markdown.js", _OUTLINE, "$$\nx\n$$") == "div(math(mi(x)))"
