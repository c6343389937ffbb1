"""Loading in order: what holds the interpreter comes one after the other, and nothing is left behind where it fails."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from runtime.api import LoadProgress
from runtime.config import PlanError
from runtime.weights.rules import WeightsError
from server.config.server_config import ServerConfig
from server.models.chat_format import ChatFormat
from server.models.lifecycle import LoadError
from server.process import load as loading
from server.process import plan
from tests.fakes import FakeEngine, fake_model
from tests.server.tiny import EOS, VOCAB_SIZE, chatml

FILES = SimpleNamespace(
    eos_token_ids=frozenset({EOS}),
    generation_config={},
    config={},
    modules=None,
    gguf=None,
    tokenizer_path=Path("/nowhere"),
)


@pytest.fixture
def load(tokenizer, monkeypatch):
    """Loads with that in the place of `start_engine`; the phases that were reported, and the warm-up of the grammars among them."""
    phases: list[str] = []
    warmed = Event()

    def warm(grammars) -> None:
        phases.append("warm")
        warmed.set()

    async def with_engine(start):
        monkeypatch.setattr("runtime.weights.fetch.resolve", lambda *args, **options: FILES)
        monkeypatch.setattr("runtime.start.replicas.start_engine", start)
        monkeypatch.setattr(loading, "import_engine", lambda: None)
        monkeypatch.setattr(loading, "load_text", lambda *args: (tokenizer, chatml(tokenizer), ChatFormat()))
        monkeypatch.setattr("server.generate.structured.compiler.Grammars.warm", warm)
        return await loading.load(ServerConfig(), lambda progress: phases.append(progress.phase), Event())

    return with_engine, phases, warmed


async def test_grammars_are_warmed_while_weights_are_read_and_not_before(load):
    with_engine, phases, warmed = load
    engine = FakeEngine(lambda request: [EOS], model=fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS})))

    async def start(config, files, report, *others, **more):
        await asyncio.to_thread(report, LoadProgress("import"))
        await asyncio.sleep(0)
        await asyncio.to_thread(report, LoadProgress("weights"))
        await asyncio.to_thread(warmed.wait)
        report(LoadProgress("warm-up"))
        return engine

    loaded = await with_engine(start)
    assert loaded.engine is engine
    assert phases == ["files", "import", "import", "weights", "warm", "warm-up", "grammars"]


@pytest.mark.parametrize(("module", "num_warnings"), [(None, 1), (SimpleNamespace(), 0)])
async def test_a_start_without_the_compiled_text_module_logs_what_that_costs(
    load, monkeypatch, caplog, module, num_warnings
):
    with_engine, _, _ = load
    monkeypatch.setattr("server.text.native.module", module)

    async def start(*args, **options):
        raise PlanError("no engine is needed")

    with pytest.raises(LoadError):
        await with_engine(start)
    warnings = [record.message for record in caplog.records if record.name == "oneloop.text"]
    assert ["oneloop_text" in each and "2.2 times the CPU" in each for each in warnings] == [True] * num_warnings


@pytest.mark.parametrize("collects", [False, True])
async def test_what_is_imported_is_left_out_of_the_collections_of_a_start_that_makes_its_own(load, collects):
    with_engine, _, _ = load
    engine = FakeEngine(lambda request: [EOS], model=fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS})))
    num_frozen: list[int] = []

    async def start(*args, **options):
        num_frozen.append(gc.get_freeze_count())
        return engine

    was_enabled, before = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if collects else gc.disable)()
    try:
        await with_engine(start)
    finally:
        if not collects:
            gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()
    assert (num_frozen[0] > before) is not collects


async def test_grammars_are_warm_where_no_weights_were_read(load):
    with_engine, phases, _ = load

    async def start(config, files, report, *others, **more):
        return FakeEngine(lambda request: [EOS], model=fake_model(vocab_size=VOCAB_SIZE))

    await with_engine(start)
    assert phases[-1] == "warm"


async def test_an_engine_that_does_not_start_leaves_nobody_waiting(load):
    with_engine, phases, _ = load

    async def start(config, files, report, *others, **more):
        raise PlanError("no room")

    before = asyncio.all_tasks()
    with pytest.raises(LoadError, match="no room"):
        await with_engine(start)
    await asyncio.sleep(0)
    assert "warm" not in phases
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(("files", "chats"), [({}, False), ({"chat_template": "{{ messages }}"}, True)])
def test_the_outline_of_a_model_says_whether_its_files_have_a_chat_template(tmp_path, files, chats):
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(files))
    assert plan.outline(ServerConfig(models=(str(tmp_path),)), Event()) == (512, (), ("generate",), chats)


def test_a_dry_run_downloads_no_weights_of_a_draft_model(tmp_path, monkeypatch):
    asked = {}

    def resolve(model, revision, report, load_format):
        asked[model] = load_format
        if len(asked) == 2:
            raise WeightsError("both were resolved")

    monkeypatch.setattr("runtime.weights.fetch.resolve", resolve)
    config = ServerConfig(models=(str(tmp_path),), speculative_method="draft_model", speculative_model="owner/draft")
    with pytest.raises(LoadError, match="both were resolved"):
        plan.dry_run(config, lambda progress: None)
    assert asked == {str(tmp_path): "auto", "owner/draft": "dummy"}
