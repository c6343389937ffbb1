"""Colours of code in a browser: what each language's tokens are, and how long the worst text takes."""

from __future__ import annotations

import pytest

from tests.server.web.nightly.browser import Page, needs_chromium

pytestmark = needs_chromium

COLOURED = {
    "python": (
        '@dec\ndef f(x=0x1f):\n    """doc\n    """\n    return "a" # c',
        'name:@dec keyword:def name:f number:0x1f string:"""doc\n    """ keyword:return string:"a" comment:# c',
    ),
    "ts": (
        "const a = `x ${1}`; // c\nif (a) f(1.5e3, 'q\\'') /* open",
        "keyword:const string:`x ${1}` comment:// c keyword:if name:f number:1.5e3 string:'q\\'' comment:/* open",
    ),
    "c++": (
        "#include <x>\nint main() { char c = '\\n'; return 0; }",
        "name:#include keyword:int name:main keyword:char string:'\\n' keyword:return number:0",
    ),
    "rust": (
        "fn f<'a>(x: &'a str) { println!(\"{}\", 'c') }",
        "keyword:fn name:'a name:'a keyword:str name:println! string:\"{}\" string:'c'",
    ),
    "go": ("func f() { x := `raw` }", "keyword:func name:f string:`raw`"),
    "java": ("public final int x = 1;", "keyword:public keyword:final keyword:int number:1"),
    "bash": (
        "for i in \"$X\"; do echo 'x'; done # c",
        "keyword:for keyword:in string:\"$X\" keyword:do string:'x' keyword:done comment:# c",
    ),
    "SQL": (
        "select count(*) FROM t WHERE a = 'it''s' -- c",
        "keyword:select name:count keyword:FROM keyword:WHERE string:'it''s' comment:-- c",
    ),
    "json": ('{"a": "b", "c": [1, true]}', 'name:"a" string:"b" name:"c" number:1 keyword:true'),
    "yaml": ("a:\n  key: don't # c", "name:a name:key comment:# c"),
    "html": (
        '<!-- c --><a href="x">don\'t</a>',
        'comment:<!-- c --> keyword:<a name:href string:"x" keyword:> keyword:</a keyword:>',
    ),
    "css": (".a { color: #fff }", "name:color keyword:#fff"),
    "diff": ("@@ -1 +1 @@\n-a\n+b\n c", "comment:@@ -1 +1 @@ keyword:-a string:+b"),
    "brainfuck": ("+[->+<]", ""),
}


@pytest.fixture
async def page(serve, page_of) -> Page:
    page = page_of(await serve())
    await page.open()
    return page


async def test_tokens_have_their_kinds_and_no_text_is_lost(page):
    for language, (code, expected) in COLOURED.items():
        found = await page.imported("highlight.js", "return m.tokens(...args)", code, language)
        assert "".join(text for _, text in found) == code
        assert " ".join(f"{kind}:{text}" for kind, text in found if kind) == expected, language


async def test_a_code_block_of_an_answer_has_colours(serve, page_of):
    server = await serve("```python\nreturn 1\n```")
    page = page_of(server)
    await page.open()
    await page.say("Hi")
    await page.until("document.querySelector('.stats')")
    assert await page.texts(".code-keyword") == ["return"]
    assert await page.texts(".code-number") == ["1"]
    assert await page.run("return document.querySelector('pre code').textContent.trim()") == "return 1"


# Repeats that make a careless expression try each place again; the number of steps would grow with the square of the length.
WORST = ['"', "'", "`", "/*", "<a ", "#", "--", "$", '"""', "a(", "\\", "0", " ", "\n", "#[", "[", '\\"', "a-", "@"]
_WORST = """
const languages = ["python", "js", "c", "java", "go", "rust", "bash", "sql", "json", "yaml", "html", "css", "diff"];
const timed = (text, language) => { const began = performance.now(); m.tokens(text, language); return performance.now() - began; };
const plain = timed("some words (1) ".repeat(3900), "c");
let slowest = ["", 0];
for (const language of languages) for (const part of args[0]) {
  const spent = timed(part.repeat(Math.floor(59000 / part.length)), language);
  if (spent / plain > slowest[1]) slowest = [`${language}: ${part}`, spent / plain];
}
return slowest;
"""


async def test_the_worst_text_takes_few_times_as_long_as_plain_words(page):
    name, ratio = await page.imported("highlight.js", _WORST, WORST)
    assert ratio < 60, name  # to plain words of that length: below 6; it was 300 when one was quadratic
