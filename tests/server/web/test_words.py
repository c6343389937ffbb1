"""The pages' languages: each text has a translation, and each translation is of a text that is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import server as package

WEB = Path(package.__file__).parent / "web"
PAGES = ("index.html", "dashboard.html")
TRANSLATED = {"aria-label", "title", "placeholder", "alt"}
LANGUAGES = ("de", "zh")
SAID = re.compile(r'\bsay\(\s*("(?:[^"\\]|\\.)*")')
CHOSEN = re.compile(
    r"\bsay\((?:\{([^}]*)\}\[|[^\"(]*\?)([^)]*)"
)  # say({a: "one", b: "other"}[a]), say(a ? "one" : "other")


class Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_body = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_body |= tag == "body"
        self.found += [value for name, value in attrs if self._in_body and name in TRANSLATED and value]

    def handle_data(self, data: str) -> None:
        if self._in_body and data.strip():
            self.found.append(data.strip())


def in_pages() -> Iterator[str]:
    for page in PAGES:
        parser = Texts()
        parser.feed((WEB / page).read_text())
        yield from (text for text in parser.found if re.search("[a-z]{2}", text) and text != "oneloop")


def in_scripts() -> Iterator[str]:
    for script in WEB.glob("*.js"):
        text = script.read_text()
        yield from map(json.loads, SAID.findall(text))
        for match in CHOSEN.finditer(text):
            yield from map(json.loads, re.findall(r'"(?:[^"\\]|\\.)*"', match[0]))


def texts() -> set[str]:
    return {*in_pages(), *in_scripts()}


def table(language: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((WEB / f"words.{language}.json").read_text())
    return found


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_text_is_translated_and_nothing_else_is(language):
    translated = table(language)
    assert sorted(texts() - translated.keys()) == []
    assert sorted(translated.keys() - texts()) == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_has_the_places_of_its_text(language):
    for english, text in table(language).items():
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", text)), english
        assert text.strip()
