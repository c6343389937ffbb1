"""Fetching pictures: only from hosts that were named, only public addresses, and the very ones that were checked."""

from __future__ import annotations

import asyncio
import ipaddress
import random

import httpx
import pytest

from server.http.errors import InvalidMedia
from server.media.fetch import MAX_REDIRECTS, AllowedHosts, Fetcher, is_public, resolve

PUBLIC = "93.184.215.14"
PNG = {"content-type": "image/png"}


class Network:
    """Names by the addresses that they stand for, in turn, and what is answered by URL; what was asked of it."""

    def __init__(self, names=None, answers=None):
        self.names = {"pictures.test": [PUBLIC], **(names or {})}
        self.answers = answers or {}
        self.asked: list[httpx.Request] = []
        self.looked_up: list[str] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        found = self.names.get(host, [host])
        if isinstance(found, OSError):
            raise found
        return found.pop(0) if isinstance(found[0], list) else found

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        found = self.answers.get(request.headers["host"] + request.url.path, picture())
        if isinstance(found, Exception):
            raise found
        return found

    def fetcher(self, *hosts: str, max_bytes: int = 1000, timeout_s: float = 3600.0) -> Fetcher:
        return Fetcher(
            AllowedHosts(hosts or ("pictures.test",)), max_bytes=max_bytes, timeout_s=timeout_s,
            transport=httpx.MockTransport(self.answer), resolver=self.resolve,
        )  # fmt: skip


def picture() -> httpx.Response:
    async def body():
        yield b"p"

    return httpx.Response(200, headers=PNG, content=body())


def moved(to: str) -> httpx.Response:
    return httpx.Response(302, headers={"location": to})


async def refused(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidMedia) as caught:
        await fetcher.fetch(url, "where")
    assert caught.value.param == "where"
    return caught.value.message


async def test_nothing_is_fetched_unless_hosts_are_named():
    network = Network()
    fetcher = Fetcher(AllowedHosts(()), max_bytes=10, timeout_s=1, resolver=network.resolve)
    assert "--allowed-media-domains" in await refused(fetcher, "https://pictures.test/a.png")
    assert not network.looked_up


async def test_it_connects_to_the_address_that_was_checked_by_the_name_that_was_asked():
    network = Network()
    assert await network.fetcher().fetch("https://pictures.test/a.png?size=1", "x") == b"p"
    [request] = network.asked
    assert str(request.url) == f"https://{PUBLIC}/a.png?size=1"
    assert request.headers["host"] == "pictures.test"
    assert request.extensions["sni_hostname"] == "pictures.test"
    assert request.headers["accept-encoding"] == "identity"
    assert not {"cookie", "authorization"} & set(request.headers)
    assert network.looked_up == ["pictures.test"]


async def test_a_name_that_stands_for_another_address_the_second_time_changes_nothing():
    network = Network({"pictures.test": [[PUBLIC], ["127.0.0.1"]]})
    assert await network.fetcher().fetch("http://pictures.test/", "x") == b"p"
    assert [request.url.host for request in network.asked] == [PUBLIC]


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "fec0::1",     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2002:0a00:0001::1",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe", "2001:db8::1", "fe80::1%eth0",
])  # fmt: skip
async def test_no_address_that_is_not_public(address):
    network = Network({"pictures.test": [address]})
    assert "no address that may be fetched from" in await refused(network.fetcher(), "http://pictures.test/")
    mixed = Network({"pictures.test": [PUBLIC, address]})
    message = await refused(mixed.fetcher(), "http://pictures.test/")
    assert address not in message
    assert not network.asked
    assert not mixed.asked


@pytest.mark.parametrize("url", [
    "http://127.0.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://169.254.169.254/latest/meta-data/",
    "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://127.1/", "http://localhost/", "http://0/",
])  # fmt: skip
async def test_addresses_in_any_spelling_where_every_host_is_allowed(url):
    # What inet_aton makes of the odd spellings is what this machine's resolver does.
    odd = {name: ["127.0.0.1"] for name in ("2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "0")}
    network = Network(odd)
    await refused(network.fetcher("*"), url)
    assert not network.asked


@pytest.mark.parametrize("url", [
    "http://other.test/a.png", "http://pictures.test.evil.test/", "http://evilpictures.test/", "http://test/", f"http://{PUBLIC}/",
    "http://user@pictures.test/", "http://user:secret@pictures.test/", "http://pictures.test@evil.test/",
    "http://pictures.test\\@evil.test/", "http://pictures.test:99999/",
    "ftp://pictures.test/", "gopher://pictures.test/", "http:///a.png", "http://pictures.test/\r\nX: y", "http://pictüres.test/",
    "http://pictures.test/" + "a" * 9000, "http://[::1",
])  # fmt: skip
async def test_urls_that_are_not_fetched(url):
    network = Network()
    message = await refused(network.fetcher(), url)
    assert "secret" not in message
    assert not network.asked


async def test_a_user_of_an_address_is_not_its_host():
    network = Network()
    await network.fetcher().fetch("http://pictures.test#@evil.test/", "x")
    assert [request.headers["host"] for request in network.asked] == ["pictures.test"]


@pytest.mark.parametrize(("hosts", "host", "taken"), [
    (("a.test",), "a.test", True), (("a.test",), "A.TEST.", True), (("a.test",), "b.a.test", False),
    (("*.a.test",), "b.a.test", True),
    (("*.a.test",), "c.b.a.test", True), (("*.a.test",), "a.test", False), (("*.a.test",), "xa.test", False),
    (("*",), "any.test", True),
    (("10.0.0.0/8",), "10.1.2.3", True), (("10.0.0.0/8",), "11.0.0.1", False), (("10.0.0.5",), "10.0.0.5", True),
    (("fd00::/8",), "fd00::1", True), (("*",), "10.0.0.1", True),
])  # fmt: skip
def test_hosts_by_name(hosts, host, taken):
    assert AllowedHosts(hosts).takes_host(host) is taken


@pytest.mark.parametrize("name", ["http://a.test", "a.test/path", "a.test:80", "a*.test", "*.*"])
def test_names_that_are_none(name):
    with pytest.raises(ValueError, match="host name"):
        AllowedHosts([name])


async def test_an_address_of_ones_own_is_fetched_from_where_it_was_named():
    network = Network({"store.internal": ["10.0.0.5"]})
    await refused(network.fetcher("store.internal"), "http://store.internal:9000/a")
    assert await network.fetcher("store.internal", "10.0.0.0/24").fetch("http://store.internal:9000/a", "x") == b"p"
    assert str(network.asked[0].url) == "http://10.0.0.5:9000/a"
    assert network.asked[0].headers["host"] == "store.internal:9000"


async def test_redirects_are_checked_like_the_first_url():
    answers = {
        "pictures.test/ok": moved("/there"),
        "pictures.test/away": moved("https://other.test/"),
        "pictures.test/inside": moved("http://inner.pictures.test/"),
        "pictures.test/file": moved("file:///etc/passwd"),
        "pictures.test/again": moved("/again"),
    }
    network = Network({"inner.pictures.test": ["192.168.0.1"]}, answers)
    fetcher = network.fetcher("pictures.test", "*.pictures.test")
    assert await fetcher.fetch("http://pictures.test/ok", "x") == b"p"
    assert [request.url.path for request in network.asked] == ["/ok", "/there"]
    network.asked.clear()
    assert "other.test is not one of the hosts" in await refused(fetcher, "http://pictures.test/away")
    assert "no address" in await refused(fetcher, "http://pictures.test/inside")
    assert "must begin with" in await refused(fetcher, "http://pictures.test/file")
    assert len(network.asked) == 3
    assert "redirected more than" in await refused(fetcher, "http://pictures.test/again")
    assert len(network.asked) == 3 + MAX_REDIRECTS + 1


async def test_a_cookie_is_not_sent_on_after_a_redirect():
    set_cookie = httpx.Response(302, headers={"location": "http://other.test/", "set-cookie": "id=secret"})
    network = Network({"other.test": [PUBLIC]}, {"pictures.test/": set_cookie})
    await network.fetcher("*").fetch("http://pictures.test/", "x")
    assert ["cookie" in request.headers for request in network.asked] == [False, False]


@pytest.mark.parametrize("location", [
    "http://[", "//[", "mailto:x", "http://xn--a/", "http://pictures.test:99999/", "\0", "http://é/", "x" * 70_000,
])  # fmt: skip
async def test_a_redirect_to_a_malformed_url_is_refused(location):
    answer = httpx.Response(302, headers=[(b"location", location.encode())])
    await refused(Network(answers={"pictures.test/": answer}).fetcher(), "http://pictures.test/")


@pytest.mark.parametrize("host", [f"{'a' * 64}.test", "a..test", ".a.test"])
async def test_a_host_with_a_label_that_dns_does_not_allow_is_not_found(host):
    network = Network()
    network.resolve = resolve  # encodes a name before it looks it up: nothing reaches the network
    assert f"there is no host {host}" in await refused(network.fetcher("*"), f"http://{host}/")


URL_PIECES = (
    ("http:", "https:", "HTTP:", "", "ftp:", "mailto:", "data:", "file:", ":"),
    ("//", "//", "//", "", "/", "///", "\\\\"),
    ("", "", "", "a@", "a:b@", "@"),
    (
        "pictures.test", "pictures.test", "a..b", ".", "a" * 64, "xn--a", "xn--", "[", "]", "[::1", "[::1]", "[v1.a]",
        "[::1%25a]", "é.test", "℀", "%", "%zz", "1.2.3.4", "0x7f", "1" * 99, "*", "", "\ud800", "ß", "\u3002",
    ),
    ("", "", "", ":", ":0", ":80", ":99999", ":b", ":-1", ":" + "1" * 5000, ":²"),
    ("", "/", "/a", "//", "?", "#", "/%", "/\0", "/\x7f", "/ a", "/é", "/\ud800", "/;a", "/a:b", "/" + "a" * 9000),
)  # fmt: skip


async def test_every_url_and_redirect_is_fetched_or_refused():
    rng = random.Random(0)

    def url() -> str:
        return "".join(map(rng.choice, URL_PIECES))

    def answer(request: httpx.Request) -> httpx.Response:
        if rng.random() < 0.3:
            return picture()
        location = url().encode(errors=rng.choice(("replace", "surrogatepass")))
        return httpx.Response(rng.randrange(300, 310), headers=[(b"location", location)] if rng.random() < 0.9 else PNG)

    async def resolver(host: str, port: int) -> list[str]:
        host.encode("idna")  # as `socket.getaddrinfo` does first
        return [PUBLIC]

    fetcher = Fetcher(
        AllowedHosts(["*"]), max_bytes=10, timeout_s=3600, transport=httpx.MockTransport(answer), resolver=resolver
    )
    urls = [*(url() for _ in range(500)), *["http://pictures.test/"] * 500]
    found = await asyncio.gather(*(fetcher.fetch(each, "where") for each in urls), return_exceptions=True)
    for each, got in zip(urls, found, strict=True):
        assert isinstance(got, bytes | InvalidMedia), (each, got)
    assert {type(got) for got in found} == {bytes, InvalidMedia}


@pytest.mark.parametrize(("answer", "reason"), [
    (httpx.Response(404, headers=PNG), "status 404"),
    (httpx.Response(302, headers=PNG), "status 302"),
    (httpx.Response(304, headers={"location": "/a"}), "status 304"),
    (httpx.Response(200, headers=PNG | {"content-length": "1" * 5000}), "could not be fetched"),
    (httpx.Response(200, headers={"content-type": "text/html"}), "not an image, audio or video"),
    (httpx.Response(200, headers={"content-type": "application/json"}), "not an image, audio or video"),
    (httpx.Response(200, headers=PNG | {"content-length": "1001"}), "more than 1000 bytes"),
    (httpx.ConnectError("refused at 10.0.0.1"), "could not be fetched"),
    (httpx.ReadError("broke"), "could not be fetched"),
])  # fmt: skip
async def test_answers_that_are_no_picture(answer, reason):
    network = Network(answers={"pictures.test/": answer})
    message = await refused(network.fetcher(), "http://pictures.test/")
    assert reason in message
    assert "10.0.0.1" not in message


async def test_packed_answers_are_not_unpacked():
    async def packed():
        yield b"\x1f\x8b"

    answer = httpx.Response(200, headers=PNG | {"content-encoding": "gzip"}, content=packed())
    assert "compressed" in await refused(Network(answers={"pictures.test/": answer}).fetcher(), "http://pictures.test/")


async def test_an_endless_answer_ends_at_the_limit():
    sent = []

    async def endless():
        while True:
            sent.append(100)
            yield bytes(100)

    network = Network(answers={"pictures.test/": httpx.Response(200, headers=PNG, content=endless())})
    assert "more than 1000 bytes" in await refused(network.fetcher(), "http://pictures.test/")
    assert sum(sent) == 1100


async def test_a_host_that_never_answers_is_left():
    async def never(host: str, port: int) -> list[str]:
        return await asyncio.Event().wait()

    fetcher = Fetcher(AllowedHosts(["*"]), max_bytes=10, timeout_s=1e-3, resolver=never)
    assert "took more than" in await refused(fetcher, "http://slow.test/")


async def test_a_host_that_is_not_there():
    network = Network({"gone.test": OSError("nodename nor servname")})
    assert "there is no host gone.test" in await refused(network.fetcher("*"), "http://gone.test/")


def test_addresses_of_the_internet_are_public():
    for address in (PUBLIC, "8.8.8.8", "2606:2800:21f:cb07::1", "64:ff9b::808:808", "::ffff:8.8.8.8"):
        assert is_public(ipaddress.ip_address(address)), address
