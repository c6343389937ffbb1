"""Replicas: combines several engines of one model, each on its own devices, in one `EngineClient` (data parallel).

All engines share one event loop, so their loads are exact when a request arrives. A request goes to the replica with the
longest cached prefix of its prompt. If the load of that replica exceeds the smallest load by more than `SPARE_LOAD`, it goes to
the least loaded replica. (Routers of several processes choose between two random replicas: their loads are stale.) Requests
that are submitted together and share a prefix go to the same replica. Independent of tensors and schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from runtime.api import (
    Activity,
    Adapter,
    AdapterClient,
    AdapterRefused,
    EngineClient,
    EngineHealth,
    Finished,
    HistogramData,
    MediaItem,
    Metric,
    ModelInfo,
    Output,
    PreparedPrompt,
    ProfileError,
    Request,
    SleepLevel,
    TokenStream,
)

# Share of a replica's rows. Sharing steps with this many more requests costs less than recomputing the prompt.
SPARE_LOAD = 0.25
CLOSE_LIMIT_S = 5.0


class KeyedAdapters(AdapterClient, Protocol):
    async def load(self, name: str, path: str, *, key: int | None = None) -> Adapter:
        """Load an adapter, see `AdapterClient.load`. `key`: key of the version, if another engine has already assigned one."""
        ...


class EngineReplica(EngineClient, Protocol):
    """Engine interface with the values that routing requires."""

    @property
    def adapters(self) -> KeyedAdapters | None: ...

    @property
    def load(self) -> float:
        """Load: sequences as a fraction of the rows, plus fraction of KV blocks in use; 2 is added while it sleeps."""
        ...

    def num_cached(self, prompt: PreparedPrompt) -> int:
        """Return how many leading blocks of `prompt` are in the prefix cache. Another replica may have prepared the prompt."""
        ...


class Replicas:
    """Several engines of one model as one client. `replicas`: two or more, with equal block hashes and limits."""

    def __init__(self, replicas: Sequence[EngineReplica]) -> None:
        self.replicas = tuple(replicas)
        self._turn = 0  # next replica among those with equal loads
        self._profiled: EngineReplica | None = None
        of_each = [each.adapters for each in replicas]
        known = [each for each in of_each if each is not None]
        self.adapters = ReplicaAdapters(known) if len(known) == len(of_each) else None
        self.model = _together([each.model for each in replicas])

    # --- requests -------------------------------------------------------------------------------------------------

    def prepare(
        self, prompt_ids: Sequence[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        return self.replicas[0].prepare(prompt_ids, cache_salt, adapter, media)

    def submit(self, requests: Sequence[Request], *, continues: bool = False) -> TokenStream:
        requests = self._prepared(requests)
        parts: dict[int, list[int]] = {}  # indices of requests, by replica
        place_of: dict[int, int] = {}  # replica of each prompt that has one
        taken = [0] * len(self.replicas)
        for index, request in enumerate(requests):
            prompt = id(request.prompt_ids)
            if prompt not in place_of:
                place_of[prompt] = self._choose(request, taken)
            taken[place_of[prompt]] += 1
            parts.setdefault(place_of[prompt], []).append(index)
        if len(parts) == 1:
            (place,) = parts
            return self.replicas[place].submit(requests, continues=continues)
        return self._submit_parts(requests, parts, continues=continues)

    def _submit_parts(
        self, requests: Sequence[Request], parts: Mapping[int, list[int]], *, continues: bool
    ) -> TokenStream:
        """Submit `requests` to the replicas. `parts`: indices of requests by replica. If one rejects them, stop all and raise."""
        streams: list[tuple[TokenStream, list[int]]] = []
        for place, indices in parts.items():
            try:
                stream = self.replicas[place].submit([requests[index] for index in indices], continues=continues)
            except BaseException:
                for taken, those in streams:
                    for number in range(len(those)):
                        taken.stop(number)
                raise
            streams.append((stream, indices))
        return JoinedStream(streams)

    def _prepared(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return `requests` with the block hashes of their prompts, which show which replica has cached them."""
        if not self.model.prefix_caching or all(each.prepared is not None for each in requests):
            return requests
        found: dict[int, PreparedPrompt] = {}
        prepared = []
        for request in requests:
            if request.prepared is None:
                self.model.check(request)
                prompt = found.get(id(request.prompt_ids))
                if prompt is None or (prompt.cache_root, prompt.media) != (request.cache_root, request.media):
                    prompt = self.prepare(request.prompt_ids, request.cache_salt, request.adapter, request.media)
                    found[id(request.prompt_ids)] = prompt
                request = replace(request, prepared=prompt)
            prepared.append(request)
        return prepared

    def _choose(self, request: Request, taken: Sequence[int]) -> int:
        """Return the index of the replica for a request. `taken`: number of requests of this call assigned to each replica."""
        num, rows = len(self.replicas), max(1, self.model.max_num_seqs // len(self.replicas))
        loads = [each.load + new / rows for each, new in zip(self.replicas, taken, strict=True)]
        least = min(range(num), key=lambda place: (loads[place], (place - self._turn) % num))
        chosen = least
        if request.prepared is not None and request.prepared.block_hashes:
            cached = [each.num_cached(request.prepared) for each in self.replicas]
            home = max(range(num), key=lambda place: (cached[place], -loads[place]))
            if cached[home] > cached[least] and loads[home] <= loads[least] + SPARE_LOAD:
                chosen = home
        self._turn = (chosen + 1) % num
        return chosen

    def check_room(self, caller: bytes | None) -> None:
        min(self.replicas, key=lambda each: each.load).check_room(caller)

    def abort(self, ids: Collection[str] | None = None) -> int:
        return sum(each.abort(ids) for each in self.replicas)

    def reset_prefix_cache(self) -> None:
        for each in self.replicas:
            each.reset_prefix_cache()

    # --- state ----------------------------------------------------------------------------------------------------

    def health(self) -> EngineHealth:
        return EngineHealth.of_all([each.health() for each in self.replicas])

    def metrics(self) -> list[Metric]:
        """Return the metrics of all engines. The label `engine` contains the engine's number."""
        merged: dict[str, Metric] = {}
        for number, each in enumerate(self.replicas):
            for metric in each.metrics():
                samples: dict[tuple[tuple[str, str], ...], float | HistogramData] = {
                    (*labels, ("engine", str(number))): value for labels, value in metric.samples.items()
                }
                if (before := merged.get(metric.name)) is not None:
                    samples = {**before.samples, **samples}
                merged[metric.name] = replace(metric, samples=samples)
        return [*merged.values()]

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        """Return the first engine's activity. Call `activity` of each of `replicas` for all, since each counts its own steps."""
        return self.replicas[0].activity(after_step=after_step, after_request=after_request, num_cells=num_cells)

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        for each in self.replicas:
            each.when_finished(call)

    async def probe(self) -> None:
        await asyncio.gather(*(each.probe() for each in self.replicas))

    async def death(self) -> str:
        """Wait until one engine has failed permanently. Return its reason. A process that lost a device must be restarted."""
        deaths = [asyncio.ensure_future(each.death()) for each in self.replicas]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            number, first = next((number, each) for number, each in enumerate(deaths) if each in done)
            return f"replica {number}: {first.result()}"
        finally:
            for each in deaths:
                each.cancel()

    # --- all replicas ---------------------------------------------------------------------------------------------

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        await asyncio.gather(*(each.sleep(level) for each in self.replicas))

    async def wake_up(self) -> None:
        await asyncio.gather(*(each.wake_up() for each in self.replicas))

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        """Profile the steps of the engine with the highest load. The trace also contains the other engines' work."""
        if self._profiled is not None:
            await self._profiled.start_profile(path, delay_steps=delay_steps, num_steps=num_steps)
            return
        busiest = max(self.replicas, key=lambda each: each.load)
        await busiest.start_profile(path, delay_steps=delay_steps, num_steps=num_steps)
        self._profiled = busiest

    async def stop_profile(self) -> Path:
        if self._profiled is None:
            raise ProfileError("no profile is being recorded")
        profiled, self._profiled = self._profiled, None
        return await profiled.stop_profile()

    async def drain(self, timeout_s: float) -> int:
        return sum(await asyncio.gather(*(each.drain(timeout_s) for each in self.replicas)))

    async def close(self, limit_s: float = CLOSE_LIMIT_S) -> bool:
        return all(await asyncio.gather(*(each.close(limit_s) for each in self.replicas)))


def _together(models: Sequence[ModelInfo]) -> ModelInfo:
    return replace(
        models[0],
        weights_bytes=sum(each.weights_bytes for each in models),
        num_kv_blocks=sum(each.num_kv_blocks for each in models),
        kv_cache_bytes=sum(each.kv_cache_bytes for each in models),
        max_concurrency=sum(each.max_concurrency for each in models),
        max_num_seqs=sum(each.max_num_seqs for each in models),
    )


class ReplicaAdapters:
    """Implementation of AdapterClient that loads each adapter on all replicas, with the same key."""

    def __init__(self, of_each: Sequence[KeyedAdapters]) -> None:
        self._first, *self._others = of_each
        self._changing = asyncio.Lock()

    def all(self) -> Sequence[Adapter]:
        return self._first.all()

    def find(self, name: str) -> Adapter | None:
        return self._first.find(name)

    async def load(self, name: str, path: str) -> Adapter:
        """Load an adapter on the first replica, then on the others. If one rejects it, remove the name from all replicas."""
        async with self._changing:
            adapter = await self._first.load(name, path)
            try:
                for each in self._others:
                    await each.load(name, path, key=adapter.key)
            except AdapterRefused:
                await self._unload(name)
                raise
            return adapter

    async def unload(self, name: str) -> bool:
        async with self._changing:
            return await self._unload(name)

    async def _unload(self, name: str) -> bool:
        return any(await asyncio.gather(*(each.unload(name) for each in (self._first, *self._others))))


class JoinedStream(TokenStream):
    """Stream that combines the streams of several replicas. `parts`: (stream, indices of its requests in the `submit` call)."""

    def __init__(self, parts: Sequence[tuple[TokenStream, Sequence[int]]]) -> None:
        self._parts = parts
        self._part_of = {index: (stream, number) for stream, those in parts for number, index in enumerate(those)}
        self._ended: set[int] = set()  # parts without further outputs
        self._stopped: set[int] = set()
        self._reads: dict[asyncio.Future[Sequence[Output]], int] = {}  # pending reads, with the index of their part
        self._left = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for stream, _ in self._parts:
            await self._left.enter_async_context(stream)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for read in self._reads:
            read.cancel()
        await self._left.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Output]:
        outputs: list[Output] = []
        while not outputs:
            for part in {*range(len(self._parts))} - self._ended - {*self._reads.values()}:
                self._reads[asyncio.ensure_future(_next(self._parts[part][0]))] = part
            if not self._reads:
                raise StopAsyncIteration
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                part = self._reads.pop(read)
                if not (found := read.result()):
                    self._ended.add(part)
                for output in found:
                    output.index = self._parts[part][1][output.index]
                    if output.index not in self._stopped:
                        outputs.append(output)
        return outputs

    def stop(self, index: int) -> None:
        self._stopped.add(index)  # its output may have been read already
        stream, number = self._part_of[index]
        stream.stop(number)


async def _next(stream: TokenStream) -> Sequence[Output]:
    """Return the next Outputs, or () if the stream has ended. (A task cannot end with StopAsyncIteration.)"""
    async for outputs in stream:
        return outputs
    return ()
