"""What else a step may be asked for: block copies before its first write, pooled rows; and encoder work, which is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import ops
from ops.attention import triton_packed
from runtime.api import MediaItem, PoolingParams, SamplingParams
from runtime.batch import SAMPLE, BlockCopy, EncoderWork, Pool, RowBinding, ScheduledBatch, ScheduledRow
from runtime.kv.block_table import NewBlocks
from runtime.kv.kv_cache import KVCache
from runtime.kv.layout import KVLayout
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from tests.kinds import FLOAT32
from tests.pooling import LAST, OF_ALL
from tests.runtime.runner.runners import CPU, LANES, NoCache, Successor, make_runner

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
MODEL = transformers.LlamaConfig(
    vocab_size=97, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.25, head_dim=10,
)  # fmt: skip


def row_of(row: int, ids: tuple[int, ...], work, *, blocks=(), start=0) -> ScheduledRow:
    new = (NewBlocks(0, 0, tuple(blocks)),) if blocks else ()
    binding = RowBinding(PARAMS, 0, ids, (), num_computed=start)
    return ScheduledRow(row, row, start, len(ids), ids, new_blocks=new, work=work, binding=binding)


def batch_of(*rows: ScheduledRow, **more) -> ScheduledBatch:
    return ScheduledBatch(rows, sum(row.num_tokens for row in rows), 0, **more)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(11)
    theirs = transformers.AutoModelForCausalLM.from_config(MODEL, dtype=torch.float32).eval()
    theirs.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    ours = load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)
    return theirs, ours


@pytest.fixture
def references():
    """A device's attention finds its block tables by row; of the kernels for a CPU only the reference does."""
    ops.force("reference")
    yield
    ops.force(None)


def real_runner(lane: str, model, monkeypatch, *, pools=False):
    layout = KVLayout.of(tuple(kind.with_dtype(FLOAT32) for kind in model.spec.memory_kinds()))
    cache = KVCache(layout, 16, CPU)
    return make_runner(lane, model, monkeypatch, cache=cache, layout=layout, vocab_size=MODEL.vocab_size, pools=pools)


@torch.inference_mode()
def last_hidden(theirs, ids: tuple[int, ...]) -> torch.Tensor:
    return theirs.model(torch.tensor([ids])).last_hidden_state[0, -1]


@pytest.mark.parametrize("lane", LANES)
async def test_pooled_rows_give_the_final_norms_output_at_their_last_token(lane, pair, references, monkeypatch):
    theirs, ours = pair
    runner = real_runner(lane, ours, monkeypatch)
    long, short, sampled = tuple(range(3, 40)), (7,), (11, 12, 13)
    first = batch_of(row_of(0, long[:20], None, blocks=(4, 1, 9)), row_of(2, short, LAST, blocks=(2,)))
    second = batch_of(
        row_of(1, sampled, SAMPLE, blocks=(5,)),
        ScheduledRow(0, 0, 20, len(long) - 20, long[20:], work=LAST),
    )
    results = [await runner.launch(batch).result() for batch in (first, second)]
    assert [len(result.tokens) for result in results] == [0, 1]
    for result, ids in zip(results, (short, long), strict=True):
        (vector,) = result.pooled
        torch.testing.assert_close(torch.tensor(vector), last_hidden(theirs, ids), atol=1e-4, rtol=1e-4)
    await runner.close()


@pytest.mark.parametrize("lane", LANES)
async def test_of_a_row_that_is_pooled_at_once_the_sampler_learns_nothing(lane, pair, references, monkeypatch):
    """It would take an upload for each, before the step."""
    _, ours = pair
    runner = real_runner(lane, ours, monkeypatch)
    sampler, bound = runner._sampler, []
    monkeypatch.setattr(sampler, "bind", lambda row, binding: bound.append(row))
    await runner.launch(batch_of(row_of(0, (3, 4), LAST, blocks=(1,)), row_of(1, (5,), SAMPLE, blocks=(2,)))).result()
    assert bound == [1]
    await runner.close()


async def test_where_prompts_are_pooled_alone_captured_steps_end_at_hidden_states(pair, references, monkeypatch):
    """And a row that samples all the same gets its token, from a step that was not captured."""
    theirs, ours = pair
    runner = real_runner("replayed", ours, monkeypatch, pools=True)
    compute, logits = ours.compute_logits, []
    monkeypatch.setattr(ours, "compute_logits", lambda *given: logits.append(given) or compute(*given))
    ids, other = tuple(range(3, 30)), (7, 9)
    steps = []
    for batch in (batch_of(row_of(0, ids, LAST, blocks=(4, 1))), batch_of(row_of(1, other, LAST, blocks=(2,)))):
        step = runner.launch(batch)
        steps.append(step)
        (vector,) = (await step.result()).pooled
        wanted = last_hidden(theirs, batch.rows[0].token_ids)
        torch.testing.assert_close(torch.tensor(vector), wanted, atol=1e-4, rtol=1e-4)
    assert all(step.was_captured() for step in steps)
    assert not logits
    sampled = runner.launch(batch_of(row_of(2, other, SAMPLE, blocks=(5,))))
    ((token,),) = (await sampled.result()).tokens
    assert len(logits) == 1
    assert 0 <= token < MODEL.vocab_size
    assert not sampled.was_captured()
    await runner.close()


@pytest.mark.parametrize("lane", LANES)
async def test_blocks_are_copied_before_the_steps_first_write(lane, pair, references, monkeypatch):
    """A sequence goes on in a copy of another one's half-filled block; both go on as if they were alone."""
    theirs, ours = pair
    runner = real_runner(lane, ours, monkeypatch)
    shared, one, other = (5, 6, 7, 8, 9), (20, 21), (30, 31, 32)
    await runner.launch(batch_of(row_of(0, shared, None, blocks=(3,)))).result()
    forked = row_of(1, other, LAST, blocks=(8,), start=len(shared))
    going_on = ScheduledRow(0, 0, len(shared), len(one), one, work=LAST)
    step = runner.launch(batch_of(going_on, forked, copies=(BlockCopy(3, 8),)))
    for vector, ids in zip((await step.result()).pooled, (shared + one, shared + other), strict=True):
        torch.testing.assert_close(torch.tensor(vector), last_hidden(theirs, ids), atol=1e-4, rtol=1e-4)
    await runner.close()


@pytest.mark.parametrize("lane", LANES)
async def test_a_step_may_be_of_copies_alone(lane, pair, references, monkeypatch):
    theirs, ours = pair
    runner = real_runner(lane, ours, monkeypatch)
    shared, other = (5, 6, 7, 8, 9), (30, 31, 32)
    await runner.launch(batch_of(row_of(0, shared, None, blocks=(3,)))).result()
    nothing = await runner.launch(batch_of(copies=(BlockCopy(3, 8),))).result()
    assert (nothing.tokens, list(nothing.logprobs), list(nothing.pooled)) == ([], [], [])
    (vector,) = (await runner.launch(batch_of(row_of(1, other, LAST, blocks=(8,), start=5))).result()).pooled
    torch.testing.assert_close(torch.tensor(vector), last_hidden(theirs, shared + other), atol=1e-4, rtol=1e-4)
    await runner.close()


PICTURE = MediaItem("image", b"picture", np.arange(2, dtype=np.int32), {})


@pytest.mark.parametrize("lane", LANES)
async def test_encoder_work_is_refused_by_its_sequences(lane, monkeypatch):
    cache = NoCache()
    runner = make_runner(lane, Successor(), monkeypatch, cache=cache)
    batch = batch_of(
        row_of(0, (1, 2), SAMPLE), encoder_work=(EncoderWork(17, b"picture", PICTURE),), copies=(BlockCopy(1, 2),)
    )
    with pytest.raises(ValueError, match=r"encoder work for sequences \[17\]"):
        runner.launch(batch)
    assert not cache.copies
    await runner.close()


def pooled_row(row: int, start: int, ids: tuple[int, ...], params: PoolingParams, *, is_last=True, blocks=()):
    work = Pool(params, is_last)
    if start == 0:
        return row_of(row, ids, work, blocks=blocks)
    return ScheduledRow(row, row, start, len(ids), ids, work=work)


@pytest.mark.parametrize("lane", LANES)
async def test_prompts_are_pooled_each_as_it_asks_whole_or_in_pieces(lane, pair, references, monkeypatch):
    theirs, ours = pair
    runner = real_runner(lane, ours, monkeypatch)
    ids = tuple(range(3, 27))
    with torch.inference_mode():
        states = theirs.model(torch.tensor([ids])).last_hidden_state[0]
        logits = theirs(torch.tensor([ids])).logits[0, -1]
    unit = torch.nn.functional.normalize
    expected = {
        PoolingParams(pooling="mean", use_activation=False): states.mean(dim=0),
        PoolingParams(pooling="cls", use_activation=False, dimensions=7): states[0, :7],
        PoolingParams("token_embed", "last", True): unit(states, dim=1),
        PoolingParams("classify", "last", True, label_token_ids=(9, 4, 50)): logits[[9, 4, 50]].softmax(dim=0),
        PoolingParams("classify", "last", True, label_token_ids=(9,)): logits[[9]].sigmoid(),
        PoolingParams(pooling="last", use_activation=True, dimensions=8): unit(states[-1, :8], dim=0),
        PoolingParams(pooling="mean", use_activation=True): unit(states.mean(dim=0), dim=0),
    }
    for cuts in ((24,), (16, 17, 24), (9, 24)):
        asked = list(expected)
        for several in (asked[:3], asked[3:]):
            for start, stop in zip((0, *cuts), cuts, strict=False):
                rows = [
                    pooled_row(row, start, ids[start:stop], params, is_last=stop == 24, blocks=(2 * row, 2 * row + 1))
                    for row, params in enumerate(several)
                ]
                pooled = (await runner.launch(batch_of(*rows)).result()).pooled
                assert len(pooled) == (len(several) if stop == 24 else 0)
            for params, view in zip(several, pooled, strict=True):
                assert view.format == "f"
                torch.testing.assert_close(torch.tensor(view.tolist()), expected[params], atol=1e-4, rtol=1e-4)
    await runner.close()


async def test_a_row_forgets_what_its_last_tenant_left_unfinished(pair, references, monkeypatch):
    theirs, ours = pair
    runner = real_runner("worker", ours, monkeypatch)
    ids = (7, 8, 9)
    for is_last in (False, True):
        result = await runner.launch(batch_of(pooled_row(0, 0, ids, OF_ALL, is_last=is_last, blocks=(1,)))).result()
    with torch.inference_mode():
        expected = theirs.model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
    torch.testing.assert_close(torch.tensor(result.pooled[0].tolist()), expected, atol=1e-4, rtol=1e-4)
    await runner.close()


ENCODER = transformers.BertConfig(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, initializer_range=0.25,
)  # fmt: skip


@pytest.mark.parametrize("lane", LANES)
async def test_an_encoder_pools_texts_side_by_side_on_every_lane(lane, tmp_path, monkeypatch):
    """On a device's, by its kernel and with what the device knows of a step, padded as captured ones are or not."""
    torch.manual_seed(12)
    theirs = transformers.BertModel(ENCODER, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path)
    files = resolve(str(tmp_path), None, lambda progress: None)
    ours = load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)
    if lane != "worker":
        monkeypatch.setattr(ops, "attend_packed", triton_packed.attend_packed)
    runner = real_runner(lane, ours, monkeypatch)
    mean, first = (Pool(PoolingParams(pooling=pooling, use_activation=False)) for pooling in ("mean", "cls"))
    texts = [(tuple(range(3, 40)), mean), ((7,), mean), (tuple(range(50, 60)), first)]
    for several in (texts, texts[:1], texts[1:2], texts[2:]):
        batch = batch_of(*(row_of(row, ids, work) for row, (ids, work) in enumerate(several)))
        result = await runner.launch(batch).result()
        for (ids, work), vector in zip(several, result.pooled, strict=True):
            with torch.inference_mode():
                states = theirs(torch.tensor([ids])).last_hidden_state[0]
            wanted = states.mean(dim=0) if work is mean else states[0]
            torch.testing.assert_close(torch.tensor(vector), wanted, atol=1e-4, rtol=1e-4)
    await runner.close()
