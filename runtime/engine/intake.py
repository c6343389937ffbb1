"""Intake: checks requests and converts each to a sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence as Several
from dataclasses import replace

from runtime.api import AdapterGone, ContextTooLong, ModelInfo, PoolingParams, Request, SamplingParams
from runtime.engine.prompt import check_ids
from runtime.lora.adapters import Adapters
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence


class Intake:
    """Checks requests and converts each to a sequence. `seed`: makes sampling repeatable for requests without a seed."""

    def __init__(self, scheduler: Scheduler, model: ModelInfo, adapters: Adapters | None, seed: int | None) -> None:
        self._scheduler = scheduler
        self._model = model
        self._adapters = adapters
        self._random = random.Random(seed)
        self._num_requests = 0
        self._last_resolved = PoolingParams(), PoolingParams()  # the last params, and their resolved form

    def check(self, requests: Several[Request]) -> None:
        """Raise the errors of `EngineClient.submit` for requests that this engine can never serve."""
        known_ids: Several[int] | None = None
        for request in requests:
            self._check(request, knows_ids=request.prompt_ids is known_ids)
            known_ids = request.prompt_ids

    def sequences(self, requests: Several[Request]) -> list[Sequence]:
        """Return one sequence for each of `requests`, all from the same `submit` call."""
        group = self._num_requests + 1
        return [self._sequence(request, group) for request in requests]

    def _check(self, request: Request, *, knows_ids: bool) -> None:
        """Check a request. `knows_ids`: the token ids of its prompt have already been checked."""
        self._model.check(request)
        self._scheduler.check(request)
        prepared = request.prepared
        if prepared is None:
            if not knows_ids:
                check_ids(request.prompt_ids, self._model.vocab_size)
        elif (
            prepared.token_ids is not request.prompt_ids
            or prepared.cache_root != request.cache_root
            or prepared.media != request.media
        ):
            raise ValueError(
                f"request {request.id} has a prepared prompt of other tokens, another cache_salt, adapter or media"
            )
        adapter = request.adapter
        if adapter is not None and (self._adapters is None or not self._adapters.slots.knows(adapter.key)):
            raise AdapterGone(f"the adapter {adapter.name} has been unloaded")
        params = request.params
        min_output = min(params.max_tokens, 1) if isinstance(params, SamplingParams) else 0
        if len(request.prompt_ids) + min_output > self._model.max_model_len:
            raise ContextTooLong(len(request.prompt_ids), self._model.max_model_len)

    def _sequence(self, request: Request, group: int) -> Sequence:
        self._num_requests += 1
        params, seed = request.params, 0
        if isinstance(params, PoolingParams):
            resolved = self._resolved(params, len(request.prompt_ids))
            request = request if resolved is params else replace(request, params=resolved)
        else:
            seed = self._random.getrandbits(63) if params.seed is None else params.seed
        return Sequence(
            request, number=self._num_requests, max_model_len=self._model.max_model_len, seed=seed, group=group
        )

    def _resolved(self, params: PoolingParams, num_tokens: int) -> PoolingParams:
        """Return `ModelInfo.resolve(params, num_tokens)`. If `params` is the same object as in the last call, the result is the
        same object too, so later comparisons are fast."""
        if params.token_type_ids is not None:  # specific to one prompt
            return self._model.resolve(params, num_tokens)
        if params is not self._last_resolved[0]:
            self._last_resolved = params, self._model.resolve(params, num_tokens)
        return self._last_resolved[1]
