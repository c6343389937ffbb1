"""The pages' files: kept by browsers as long as they are the same, safe by their headers, open without a key."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

import server as package
from server.http import pages
from tests.benches.page_weight import names_of, weight

WEB = Path(package.__file__).parent / "web"
PAGES = {"/": "index.html", "/docs": "docs.html", "/dashboard": "dashboard.html"}


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_sent_once_and_asked_for_each_time(serve, path):
    server = await serve()
    first = await server.http.get(path)
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache"
    again = await server.http.get(path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    other = await server.http.get(path, headers={"if-none-match": '"other", W/"another"'})
    assert other.status_code == 200


@pytest.mark.parametrize("path", PAGES)
async def test_what_a_page_loads_is_there_and_may_be_kept_for_ever(serve, path):
    server = await serve()
    html = (await server.http.get(path)).text
    wanted = re.findall(r'(?:src|href)="(web/[^"]+)"', html)
    assert wanted
    for address in wanted:
        answer = await server.http.get(f"/{address}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.content == (WEB / address.rpartition("/")[2]).read_bytes()


async def test_another_version_and_other_names_are_not_there(serve):
    server = await serve()
    version = pages.site().version
    for path in (
        f"/web/{'0' * 16}/chat.js",
        f"/web/{version}/index.html",
        f"/web/{version}/nothing.js",
        "/web/chat.js",
    ):
        assert (await server.http.get(path)).status_code == 404
    assert (await server.http.get(f"/web/{version}/..%2f..%2fapp.py")).status_code == 404


async def test_who_takes_gzip_gets_it(serve):
    server = await serve()
    plain = await server.http.get("/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    raw = await server.raw()
    raw.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: br, gzip\r\n\r\n")
    status, headers, body = await raw.answer()
    assert (status, headers["content-encoding"], headers["vary"]) == (200, "gzip", "Accept-Encoding")
    assert gzip.decompress(body) == plain.content


async def test_pages_need_no_key_and_what_they_ask_for_does(serve):
    server = await serve(api_key=("sk-user",), admin_api_key="sk-admin")
    for path in (*PAGES, f"/web/{pages.site().version}/chat.js"):
        answer = await server.http.get(path)
        assert answer.status_code == 200
        assert "sk-" not in answer.text
    for path in ("/openapi.json", "/v1/models", "/metrics", "/web", "/docs/"):
        assert (await server.http.get(path)).status_code == 401


@pytest.mark.parametrize("path", PAGES)
async def test_nothing_in_a_page_comes_from_elsewhere_or_stands_inline(serve, path):
    server = await serve()
    answer = await server.http.get(path)
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", answer.text)
    assert not re.search(r'(?:src|href)="(?:https?:|/)', answer.text)  # relative, so that a prefix does not matter


def test_scripts_make_no_markup_and_know_no_other_site():
    for script in WEB.glob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            script
        )
        sites = set(re.findall(r"https?://[\w.]+", text))
        assert sites <= {"http://www.w3.org"}, script  # names of SVG and MathML


async def test_the_document_of_the_api_is_compressed_and_sent_once(serve):
    server = await serve()
    first = await server.http.get("/openapi.json")
    assert (first.headers["content-encoding"], first.headers["content-type"]) == ("gzip", "application/json")
    assert int(first.headers["content-length"]) < len(first.content) / 5
    again = await server.http.get("/openapi.json", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304


# The most that a page may weigh as it is sent, KiB: a phone on a bad line has it in a second.
@pytest.mark.parametrize(("page", "most"), [("index.html", 60), ("dashboard.html", 32), ("docs.html", 12)])
def test_a_page_is_light_and_names_all_that_its_scripts_load(page, most):
    assert weight(page).num_sent <= most * 1024
    named = names_of(page)
    for name in {each for each in named if each.endswith(".js")}:
        imported = set(re.findall(r'from "\./([\w.]+)"', (WEB / name).read_text()))
        assert imported <= named, f"{name} is read before the browser knows what it needs"


def test_all_files_together_stay_below_120_kb():
    site = pages.site()
    assert sum(len(each.compressed) for each in [*site.pages.values(), *site.assets.values()]) <= 120_000
