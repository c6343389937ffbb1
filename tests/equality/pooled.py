"""Pooling on token ids by a whole engine, and by transformers one text at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.api import FinishReason, PoolingParams, Request
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.engine.admission import AdmissionLimits
from runtime.models.model import Model
from tests.equality.greedy import engine_parts

Text = tuple[Sequence[int], Sequence[int] | None]  # ids, and kinds of tokens


async def pooled(
    model: Model, texts: Sequence[Text], asked: Sequence[PoolingParams], config: EngineConfig | None = None,
    *, together: bool = True,
) -> list[list[torch.Tensor]]:  # fmt: skip
    """For each of `asked` what each text gets."""
    parts = await engine_parts(model, config or EngineConfig())
    engine = Engine(parts.scheduler, parts.runner, parts.model, admission=AdmissionLimits(100_000))
    found = []
    try:
        for params in asked:
            requests = [
                Request(str(index), list(ids), _with_kinds(params, kinds)) for index, (ids, kinds) in enumerate(texts)
            ]
            vectors: dict[int, torch.Tensor] = {}
            for group in [requests] if together else [[request] for request in requests]:
                async with engine.submit(group) as stream:
                    async for outputs in stream:
                        for output in outputs:
                            assert output.finish is FinishReason.STOP, output.error
                            vectors[int(group[output.index].id)] = torch.tensor(output.pooled.tolist())
            found.append([vectors[index] for index in range(len(texts))])
    finally:
        await engine.close()
    return found


def _with_kinds(params: PoolingParams, kinds: Sequence[int] | None) -> PoolingParams:
    return PoolingParams(
        params.task, params.pooling, params.use_activation, params.dimensions, params.label_token_ids, kinds
    )
