"""Slots: assigns adapters to host memory and device slots, and orders the adapters that wait for a slot.

Plain data: no torch, no files, no clock. An adapter here is a version that never changes. Loading another version under the same
name creates a new adapter with its own prefix-cache blocks; both may run at the same time.

A sequence starts only if its adapter is in a slot or can get an unused slot. If all slots are in use, the adapter that has had its
slot longest is drained. Sequences that arrived after the first one waiting for a slot may not start with this adapter. Its slot is
free when its running sequences have ended, so the wait for a slot is bounded. Only one adapter is drained at a time.

The step in which an adapter's first sequence starts writes its slot, after all steps that read the previous adapter. Until that
step has completed, the adapter stays in host memory, even if its sequences have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import Enum

from runtime.api import Metric
from runtime.batch import AdapterLoad
from runtime.config import LoraLimits
from runtime.sequence import Sequence

_MAX_LABELS = 128  # adapters with their own metric label; others share one
_OTHERS = "others"

Order = Callable[[Sequence], tuple[int, int]]  # sort key; the smallest is served first


class Where(Enum):
    STORED = "stored"  # on disk only
    LOADING = "loading"
    READY = "ready"  # in host memory


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """State of an adapter version. `num_users`: sequences that wait or run. `num_running`: sequences that have a row."""

    key: int
    name: str
    where: Where = Where.STORED
    slot: int | None = None
    since: int = 0  # logical time when it got its slot
    used: int = 0  # logical time when one of its sequences last started
    num_users: int = 0
    num_running: int = 0
    num_placing: int = 0  # steps in flight that write it to a slot
    makes_room_for: tuple[int, int] | None = None  # sequences after this one in order may not start
    is_retired: bool = False  # it has no name any more, and is removed after its last user
    when_unused: list[Callable[[], None]] = field(default_factory=list)


class AdapterSlots:
    """Assignment of adapters to device slots and host memory. `load(key)` starts loading an adapter; call `loaded` or `failed`
    when it has ended. `drop(key)` removes an adapter from memory."""

    def __init__(self, limits: LoraLimits, load: Callable[[int], None], drop: Callable[[int], None]) -> None:
        self.limits = limits
        self._load, self._drop = load, drop
        self._versions: dict[int, AdapterVersion] = {}
        self._in_slot: list[AdapterVersion | None] = [None] * limits.max_loras
        self._loads: list[AdapterLoad] = []  # of the step being scheduled
        self._clock = 0
        self.num_loads = self.num_slot_loads = self.num_evictions = self.num_slot_evictions = 0
        self._num_requests: dict[str, int] = {}

    # --- load and unload ------------------------------------------------------------------------------------------

    def add(self, key: int, name: str, *, in_memory: bool = True) -> None:
        """Add an adapter whose files have been checked. `in_memory`: it has been loaded, and is kept if host memory allows."""
        self._versions[key] = version = AdapterVersion(key, name)
        if not in_memory:
            return
        if self._make_memory():
            self._ready(version)
        else:
            self._drop(key)

    def retire(self, key: int, when_unused: Callable[[], None] = lambda: None) -> None:
        """Reject new requests for adapter `key`. When its last user has ended, remove it and call `when_unused`."""
        version = self._versions[key]
        version.is_retired = True
        version.when_unused.append(when_unused)
        self._go_if_unused(version)

    def loaded(self, key: int) -> None:
        """Record that adapter `key` was loaded into memory."""
        version = self._versions.get(key)
        if version is None:
            self._drop(key)  # it was retired, and has no users
        else:
            self._ready(version)

    def failed(self, key: int) -> None:
        """Record that adapter `key` could not be read. The next request that needs it loads it again."""
        if (version := self._versions.get(key)) is not None:
            version.where = Where.STORED

    def leave(self) -> None:
        """Mark memory and slots as empty, because the model was released. Adapters stay registered. No sequence may be running."""
        assert not any(version.num_running for version in self._versions.values()), "nobody runs"
        for version in self._versions.values():
            self._leave_slot(version)
            if version.where is Where.READY:
                version.where = Where.STORED

    def knows(self, key: int) -> bool:
        return (version := self._versions.get(key)) is not None and not version.is_retired

    def _ready(self, version: AdapterVersion) -> None:
        version.where = Where.READY
        version.used = self._tick()
        self.num_loads += 1

    def _go_if_unused(self, version: AdapterVersion) -> None:
        if not version.is_retired or version.num_users or version.num_placing:
            return
        self._leave_slot(version)
        if version.where is Where.READY:
            self._drop(version.key)
        del self._versions[version.key]
        for call in version.when_unused:
            call()

    # --- called by the scheduler ----------------------------------------------------------------------------------

    def waits(self, key: int) -> None:
        """Record that a sequence with adapter `key` has arrived."""
        version = self._versions[key]
        version.num_users += 1
        label = version.name if version.name in self._num_requests or len(self._num_requests) < _MAX_LABELS else _OTHERS
        self._num_requests[label] = self._num_requests.get(label, 0) + 1

    def ends(self, key: int) -> None:
        """Record that a sequence with adapter `key` has ended. If it was running, call `stops` first."""
        version = self._versions[key]
        version.num_users -= 1
        self._go_if_unused(version)

    def starts(self, key: int) -> int:
        """Record that a sequence gets a row. Return its adapter's slot, which is valid from the step being scheduled."""
        version = self._versions[key]
        if version.slot is None:
            slot = self._free_slot()
            assert slot is not None, "it may start"
            if (before := self._in_slot[slot]) is not None:
                self._leave_slot(before)
                self.num_slot_evictions += 1
            self._in_slot[slot], version.slot, version.since = version, slot, self._tick()
            self._loads.append(AdapterLoad(slot, key))
            self.num_slot_loads += 1
        version.used = self._tick()
        version.num_running += 1
        assert version.slot is not None
        return version.slot

    def stops(self, key: int) -> None:
        """Record that a sequence with adapter `key` has lost its row."""
        self._versions[key].num_running -= 1

    def may_start(self, sequence: Sequence, order: Order) -> bool:
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        version = self._versions[adapter.key]
        if version.slot is not None:
            return version.makes_room_for is None or order(sequence) < version.makes_room_for
        return version.where is Where.READY and self._free_slot() is not None

    def turn(self, waiting: Several[Sequence], order: Order) -> None:
        """Prepare a step: start to load the adapters of `waiting` sequences, in order. Select the adapter to drain for the
        first sequence that waits for a slot."""
        blocked: Sequence | None = None
        asked: set[int] = set()
        for sequence in waiting:
            adapter = sequence.request.adapter
            if adapter is None or adapter.key in asked:
                continue
            asked.add(adapter.key)
            version = self._versions[adapter.key]
            if version.where is Where.STORED and self._make_memory():
                version.where = Where.LOADING
                self._load(version.key)
            if blocked is None and version.slot is None and version.where is not Where.LOADING:
                blocked = sequence
        holders = [holder for holder in self._in_slot if holder is not None]
        for holder in holders:
            holder.makes_room_for = None
        if blocked is not None and holders and self._lacks_room(blocked):
            min(holders, key=lambda holder: holder.since).makes_room_for = order(blocked)

    def _lacks_room(self, sequence: Sequence) -> bool:
        """Return True if the sequence must wait for a device slot, or for host memory to load its adapter."""
        assert sequence.request.adapter is not None
        return self._free_slot() is None or self._versions[sequence.request.adapter.key].where is Where.STORED

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the adapters to write to slots before the step that has just been scheduled."""
        if not self._loads:
            return ()
        loads, self._loads = tuple(self._loads), []
        for load in loads:
            self._versions[load.key].num_placing += 1
        return loads

    def settled(self, loads: Iterable[AdapterLoad]) -> None:
        """Record that `loads` have been written to their slots, because their step has completed."""
        for load in loads:
            version = self._versions[load.key]
            version.num_placing -= 1
            self._go_if_unused(version)

    def forget(self, loads: Iterable[AdapterLoad]) -> None:
        """Mark the slots of `loads` as empty, because their step did not run. No running sequence may use them."""
        for load in loads:
            holder = self._in_slot[load.slot]
            if holder is not None and holder.key == load.key:
                self._leave_slot(holder)
        self.settled(loads)

    # --- slots and memory -----------------------------------------------------------------------------------------

    def _free_slot(self) -> int | None:
        """Return a slot without running sequences, or None. Empty slots come first, then slots of adapters that have no users
        or are drained, then the least recently used."""
        best: tuple[bool, int] | None = None
        found = None
        for slot, holder in enumerate(self._in_slot):
            if holder is None:
                return slot
            if not holder.num_running:
                rank = (holder.num_users > 0 and holder.makes_room_for is None, holder.used)
                if best is None or rank < best:
                    best, found = rank, slot
        return found

    def _make_memory(self) -> bool:
        """Make room in host memory for one adapter, by evicting an unused one if necessary. Return False if there is no room."""
        held = [version for version in self._versions.values() if version.where is not Where.STORED]
        if len(held) < self.limits.max_cpu_loras:
            return True
        idle = [
            version
            for version in held
            if version.where is Where.READY
            and not (version.num_running or version.num_placing)
            and (not version.num_users or version.makes_room_for is not None)
        ]
        if not idle:
            return False
        victim = min(idle, key=lambda version: (version.slot is not None, version.used))
        self.num_slot_evictions += victim.slot is not None
        self._leave_slot(victim)
        victim.where = Where.STORED
        self._drop(victim.key)
        self.num_evictions += 1
        return True

    def _leave_slot(self, version: AdapterVersion) -> None:
        if version.slot is not None:
            self._in_slot[version.slot] = None
            self._loads = [load for load in self._loads if load.key != version.key]
            version.slot, version.makes_room_for = None, None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # --- metrics --------------------------------------------------------------------------------------------------

    def metrics(self) -> list[Metric]:
        in_memory = sum(version.where is Where.READY for version in self._versions.values())
        in_slots = sum(holder is not None for holder in self._in_slot)
        waiting = sum(version.num_users - version.num_running for version in self._versions.values())
        places = (("place", "memory"),), (("place", "slot"),)
        return [
            Metric("lora_adapters", "LoRA adapters that can be asked for.", "gauge", {(): len(self._versions)}),
            Metric(
                "lora_resident", "LoRA adapters in memory, and in slots of the device.", "gauge",
                dict(zip(places, (in_memory, in_slots), strict=True)),
            ),
            Metric("lora_requests_waiting", "Sequences with a LoRA adapter that wait.", "gauge", {(): waiting}),
            Metric(
                "lora_loads", "LoRA adapters brought into memory, and into slots of the device.", "counter",
                dict(zip(places, (self.num_loads, self.num_slot_loads), strict=True)),
            ),
            Metric(
                "lora_evictions", "LoRA adapters that made room for others.", "counter",
                dict(zip(places, (self.num_evictions, self.num_slot_evictions), strict=True)),
            ),
            Metric(
                "lora_requests", f"Sequences by LoRA adapter, of the first {_MAX_LABELS} asked for.", "counter",
                {(("adapter", name),): number for name, number in self._num_requests.items()},
            ),
        ]  # fmt: skip
