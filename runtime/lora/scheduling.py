"""Scheduling of adapters: a sequence starts only if its adapter is in a device slot or can get one."""

from __future__ import annotations

from dataclasses import replace

from runtime.api import Metric
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.feature import Claim, Feature, Scheduling
from runtime.lora.slots import AdapterSlots
from runtime.sequence import Sequence


class AdapterScheduling(Feature):
    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots

    def connect(self, scheduler: Scheduling) -> None:
        self.scheduler = scheduler

    def claim(self, sequence: Sequence) -> Claim | None:
        adapter = sequence.request.adapter
        return None if adapter is None else _Slot(self, sequence, adapter.key)

    def admits(self) -> None:
        self.slots.turn(self.scheduler.waiting, self.scheduler.policy.order)

    def complete(self, batch: ScheduledBatch) -> ScheduledBatch:
        loads = self.slots.take_loads()
        return replace(batch, adapter_loads=loads) if loads else batch

    def settled(self, batch: ScheduledBatch) -> None:
        self.slots.settled(batch.adapter_loads)

    def forget(self, batch: ScheduledBatch) -> None:
        self.slots.forget(batch.adapter_loads)

    def metrics(self) -> list[Metric]:
        return self.slots.metrics()


class _Slot(Claim):
    """Hooks for a sequence with an adapter. `_slot`: the adapter's device slot while the sequence has a row."""

    __slots__ = ("_feature", "_key", "_sequence", "_slot")

    def __init__(self, feature: AdapterScheduling, sequence: Sequence, key: int) -> None:
        self._feature = feature
        self._sequence = sequence
        self._key = key
        self._slot = -1
        feature.slots.waits(key)

    def may_start(self) -> bool:
        return self._feature.slots.may_start(self._sequence, self._feature.scheduler.policy.order)

    def started(self) -> None:
        self._slot = self._feature.slots.starts(self._key)

    def scheduled(self, row: ScheduledRow) -> ScheduledRow:
        if row.binding is None:
            return row
        return row._replace(binding=replace(row.binding, adapter_slot=self._slot))

    def suspended(self) -> None:
        self._feature.slots.stops(self._key)

    def finished(self) -> None:
        self._feature.slots.ends(self._key)
