"""Two engines on one device, as a server with --embedding-model has them: what each computes while both are under way, and memory
that is planned for both together."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import normalize

from runtime.api import FinishReason, PoolingParams, Request, SamplingParams
from runtime.config import EngineConfig, PlanError
from runtime.engine import Engine
from runtime.start import SharedDevice, start_engine
from runtime.weights.fetch import resolve
from tests.equality import test_decoders_that_embed as decoders
from tests.equality.test_encoders import ENCODERS, transformers_output
from tests.equality.test_encoders import written as written_encoder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_TOKENS = 24
SHARE = 0.25  # of the device's memory, for both
EMBEDDERS_CACHE, NOISE = 12 << 30, 4 << 30
# As in test_cuda_pooling: sums in another order, in float32.
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "dtype": "float32", "gpu_memory_utilization": SHARE}


async def engine_of(folder, device: str, place: SharedDevice, **options) -> Engine:
    files = resolve(str(folder), None, lambda progress: None)
    config = EngineConfig(device=device, **SMALL | options)
    return await start_engine(config, files, lambda progress: None, device=place)


async def generated(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    async with engine.submit(
        [Request(f"g{index}", list(each), params) for index, each in enumerate(prompts)]
    ) as stream:
        async for outputs in stream:
            for output in outputs:
                assert output.error is None
                ids[output.index] += output.token_ids
    return ids


async def embedded(engine: Engine, texts: Sequence[Sequence[int]], params: PoolingParams) -> list[torch.Tensor]:
    vectors: dict[int, torch.Tensor] = {}
    async with engine.submit([Request(f"e{index}", list(each), params) for index, each in enumerate(texts)]) as stream:
        async for outputs in stream:
            for output in outputs:
                assert output.finish is FinishReason.STOP, output.error
                vectors[output.index] = torch.tensor(output.pooled.tolist())
    return [vectors[index] for index in range(len(texts))]


@torch.inference_mode()
def greedy(theirs, ids: Sequence[int]) -> list[int]:
    found = theirs.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=NUM_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return found[0, len(ids) :].tolist()


@pytest.mark.parametrize("beside", ["encoder", "decoder"])
@pytest.mark.parametrize("device", DEVICES)
async def test_each_computes_what_it_does_alone_while_the_other_is_under_way(device, beside, tmp_path):
    chats = decoders.written("Qwen3ForCausalLM", tmp_path / "chats")
    prompts = [ids for ids, _ in decoders.texts()]
    if beside == "encoder":
        theirs, rows = written_encoder(ENCODERS["bert"], "Model", tmp_path / "embeds")
        texts = [ids for ids, kinds in rows if kinds is None]
        params = PoolingParams(pooling="mean", use_activation=True)
        wanted = [
            normalize(transformers_output(theirs, ids, None).last_hidden_state[0].mean(dim=0), dim=0) for ids in texts
        ]
    else:
        theirs = decoders.written("Qwen3ForCausalLM", tmp_path / "embeds", num_hidden_layers=3)
        texts, params = prompts, PoolingParams()
        wanted = [normalize(decoders.states_of(theirs.base_model, ids)[-1], dim=0) for ids in texts]
    place = SharedDevice()
    embedder = await engine_of(tmp_path / "embeds", device, place, beside=True, pools=True, num_kv_blocks=256)
    chat = await engine_of(tmp_path / "chats", device, place, num_kv_blocks=256)
    try:
        for _ in range(2):  # the second time with what the prefix caches have of the first
            tokens, vectors = await asyncio.gather(generated(chat, prompts), embedded(embedder, texts * 6, params))
            assert tokens == [greedy(chats, ids) for ids in prompts]
            for index, vector in enumerate(vectors):
                torch.testing.assert_close(vector, wanted[index % len(texts)], **CLOSE)
    finally:
        await chat.close()
        await embedder.close()


@pytest.mark.gpu
async def test_memory_of_both_is_what_one_may_take(tmp_path):
    """The second one's KV cache is as large as the first has left room for. Other tests may have memory of the same device: sizes
    differ by more than these take."""
    decoders.written("Qwen3ForCausalLM", tmp_path / "chats")
    decoders.written("Qwen3ForCausalLM", tmp_path / "embeds", num_hidden_layers=3)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free < SHARE * total:
        pytest.skip("other processes hold the device")
    before = torch.cuda.memory_allocated()
    place = SharedDevice()
    alone = await engine_of(tmp_path / "chats", "cuda", place)
    alone_bytes = alone.model.kv_cache_bytes
    await alone.close()
    del alone, place
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < NOISE

    place = SharedDevice()
    embedder = await engine_of(
        tmp_path / "embeds", "cuda", place, beside=True, pools=True, kv_cache_bytes=EMBEDDERS_CACHE
    )
    try:
        chat = await engine_of(tmp_path / "chats", "cuda", place)
    except PlanError:
        await embedder.close()
        if torch.cuda.mem_get_info()[0] < SHARE * total:
            pytest.skip("other processes took the device meanwhile")
        raise
    try:
        assert embedder.model.kv_cache_bytes <= EMBEDDERS_CACHE
        left = alone_bytes - chat.model.kv_cache_bytes
        assert EMBEDDERS_CACHE - NOISE < left < EMBEDDERS_CACHE + NOISE
    finally:
        await chat.close()
        await embedder.close()
