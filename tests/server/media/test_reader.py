"""Reading the media of a request: off the event loop, within limits, once for the same picture."""

from __future__ import annotations

import asyncio
import threading

import httpx
import numpy as np
import pytest

from server.config.server_config import ServerConfig
from server.http.errors import InvalidMedia, InvalidRequest, TooManyRequests
from server.media import decode
from server.media import reader as reading
from server.media.fetch import AllowedHosts, Fetcher
from server.media.media_options import MediaOptions
from server.media.part import Base64, MediaPart, Url
from server.media.placeholders import Expansion, ReadMedia
from tests.server.media.pictures import data_url, drawn, png, stored
from tests.server.media.processors import written
from tests.server.media.reading import part, reader


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return written("llava", tmp_path_factory.mktemp("llava"))


def of_url(url: str) -> MediaPart:
    return MediaPart("image", Url(url), "where", "image_url")


async def test_the_same_picture_wherever_it_is_is_the_same_item(tiny, tmp_path):
    data = stored(drawn())
    (tmp_path / "a.png").write_bytes(data)

    async def public(host: str, port: int) -> list[str]:
        return ["93.184.215.14"]

    def sent(request: httpx.Request) -> httpx.Response:
        async def body():
            yield data

        return httpx.Response(200, headers={"content-type": "image/png"}, content=body())

    fetcher = Fetcher(
        AllowedHosts(["a.test"]), max_bytes=10_000, timeout_s=3600, transport=httpx.MockTransport(sent), resolver=public
    )
    media = reader(tiny, fetcher, allowed_local_media_path=str(tmp_path))
    url = data_url(data)
    read = await media.read([
        of_url(url), of_url("https://a.test/x.png"), of_url(f"file://{tmp_path}/a.png"), part(data),
        MediaPart("image", Base64(url.partition(",")[2]), "where", "image"),
    ])  # fmt: skip
    assert len({each.digest for each in read.read}) == 1
    assert len(read.read) == 5


async def test_everything_is_decoded_and_processed_in_the_pool(tiny, monkeypatch):
    media, seen = reader(tiny), []

    def noted(name, function):
        def noting(*arguments, **options):
            seen.append((name, threading.current_thread()))
            return function(*arguments, **options)

        return noting

    monkeypatch.setattr(decode.images, "read_image", noted("decode", decode.images.read_image))
    monkeypatch.setattr(reading, "fingerprint", noted("hash", reading.fingerprint))
    monkeypatch.setattr(media._sources, "read", noted("base64", media._sources.read))
    monkeypatch.setattr(media.processor, "process", noted("process", media.processor.process))
    await media.read([of_url(data_url(stored(drawn(8, 8))))])
    assert [name for name, _ in seen] == ["base64", "hash", "decode", "process"]
    assert all(thread.name.startswith("oneloop-media") for _, thread in seen)


class Begun:
    """Set on any thread, awaited on the loop."""

    def __init__(self) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self.wait = self._event.wait

    def set(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)


async def test_while_a_picture_is_decoded_the_loop_goes_on(tiny, monkeypatch):
    media, begun, go = reader(tiny), Begun(), threading.Event()
    read_image = decode.images.read_image

    def slow(*arguments, **options):
        begun.set()
        go.wait()
        return read_image(*arguments, **options)

    monkeypatch.setattr(decode.images, "read_image", slow)
    task = asyncio.create_task(media.read([part(stored(drawn()))]))
    await begun.wait()
    turns = [await asyncio.sleep(0, turn) for turn in range(100)]
    assert not task.done()
    go.set()
    assert len((await task).read) == 1
    assert len(turns) == 100


async def test_who_leaves_takes_what_is_not_begun_along(tiny, monkeypatch):
    media, begun, go = reader(tiny, limit_mm_per_prompt='{"image": 100}'), Begun(), threading.Event()
    decoded: list[int] = []
    read_image = decode.images.read_image

    def slow(*arguments, **options):
        decoded.append(1)
        begun.set()
        go.wait()
        return read_image(*arguments, **options)

    monkeypatch.setattr(decode.images, "read_image", slow)
    task = asyncio.create_task(media.read([part(stored(drawn(seed=seed))) for seed in range(50)]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await media._workers.run_pieces(1 << 20, iter_nothing())
    assert len(decoded) < 10


def iter_nothing():
    yield
    return None


async def test_the_same_picture_is_processed_once_while_there_is_room(tiny, monkeypatch):
    media, processed = reader(tiny, mm_processor_cache_gb=20_000 / 1024**3), []
    process = media.processor.process
    monkeypatch.setattr(media.processor, "process", lambda *args: processed.append(args[1].size) or process(*args))
    one, two = part(stored(drawn(20, 10))), part(stored(drawn(10, 30)))
    first = (await media.read([one])).read[0]
    assert (await media.read([one])).read[0] is first
    assert first.num_bytes == 3 * 16 * 16 * 4
    for seed in range(7):  # six have room
        await media.read([part(stored(drawn(seed=seed)))])
    await media.read([one])
    assert processed.count((20, 10)) == 2
    await media.read([two, two])
    assert (10, 30) in processed


async def test_nothing_is_kept_where_nothing_may_be(tiny, monkeypatch):
    media, processed = reader(tiny, mm_processor_cache_gb=0.0), []
    process = media.processor.process
    monkeypatch.setattr(media.processor, "process", lambda *args: processed.append(1) or process(*args))
    for _ in range(2):
        await media.read([part(stored(drawn()))])
    assert len(processed) == 2


async def test_whether_a_picture_was_seen_before_no_key_learns_of_another(tiny, monkeypatch):
    for options, expected in (({}, ["a", "b", None]), ({"shared_prefix_cache": True}, ["a"])):
        media, processed = reader(tiny, **options), []
        process = media.processor.process
        monkeypatch.setattr(
            media.processor, "process", lambda *args, p=process, to=processed: to.append(None) or p(*args)
        )
        digests = set()
        for tenant in ("a", "a", "b", "a", None, "b"):
            before = len(processed)
            digests.add((await media.read([part(stored(drawn()))], tenant=tenant)).read[0].digest)
            processed[before:] = [tenant] * (len(processed) - before)
        assert processed == expected
        assert len(digests) == 1  # the engine's caches are divided by the request's salt


async def test_beyond_what_requests_may_hold_together_more_is_refused(tiny):
    size = 3 * 16 * 16 * 4
    media = reader(tiny, mm_processor_cache_gb=0.0, max_media_memory_gb=2.5 * size / 1024**3)
    held = [await media.read([part(stored(drawn(seed=seed)))]) for seed in range(3)]
    with pytest.raises(TooManyRequests, match="the memory for images") as caught:
        await media.read([part(stored(drawn(seed=3)))])
    assert caught.value.retry_after_s == 1
    assert len(held) == 3


def test_what_nobody_holds_any_more_counts_no_more():
    held = reading._Held(100)
    items = [
        ReadMedia("image", b"", Expansion("x", (1,)), {"a": np.zeros(10), "b": np.zeros(5, np.int8)}) for _ in range(2)
    ]
    for item in items:
        held.note(item)
    with pytest.raises(TooManyRequests):
        held.check()
    del item
    array = items.pop().inputs["a"]  # as a request has it that is under way
    with pytest.raises(TooManyRequests):
        held.check()
    del array
    held.check()


async def test_as_many_as_a_prompt_may_have(tiny):
    media = reader(tiny, limit_mm_per_prompt='{"image": 2}')
    await media.read([part(drawn())] * 2)
    with pytest.raises(InvalidRequest, match="at most 2") as caught:
        await media.read([part(drawn())] * 3)
    assert caught.value.param == "where"
    with pytest.raises(InvalidRequest, match="at most 0"):
        await reader(tiny, limit_mm_per_prompt='{"image": 0}').read([part(drawn())])


async def test_a_bomb_among_pictures_ends_its_request_alone(tiny):
    media = reader(tiny)
    bomb = media.read([part(stored(drawn(seed=1))), part(png(30_000, 30_000)), part(stored(drawn(seed=2)))])
    found, error = await asyncio.gather(media.read([part(stored(drawn()))]), bomb, return_exceptions=True)
    assert len(found.read) == 1
    assert isinstance(error, InvalidMedia)


@pytest.mark.parametrize(("options", "complaint"), [
    ({"limit_mm_per_prompt": "3"}, "--limit-mm-per-prompt: '3' is not a JSON object"),
    ({"limit_mm_per_prompt": "image"}, "--limit-mm-per-prompt: 'image' is not JSON"),
    ({"limit_mm_per_prompt": '{"smell": 1}'}, "'smell' is not one of image, audio, video"),
    ({"limit_mm_per_prompt": '{"image": -1}'}, "image: -1 is not a count"),
    ({"limit_mm_per_prompt": '{"image": true}'}, "image: True is not a count"),
    ({"media_io_kwargs": '{"image": {"colour": 1}}'}, "image.colour is not one of rgba_background_color"),
    ({"media_io_kwargs": '{"image": {"rgba_background_color": [1, 2]}}'}, "three numbers"),
    ({"media_io_kwargs": '{"video": {"num_frames": 0}}'}, "a count of at least 1"),
    ({"media_io_kwargs": '{"video": {"fps": "fast"}}'}, "frames a second"),
    ({"mm_processor_kwargs": "[]"}, "--mm-processor-kwargs: '[]' is not a JSON object"),
    ({"allowed_media_domains": ("http://a.test",)}, "--allowed-media-domains: 'http://a.test'"),
])  # fmt: skip
def test_options_that_say_nothing(options, complaint):
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")):
        MediaOptions(ServerConfig(**options))
