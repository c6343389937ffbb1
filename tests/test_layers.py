"""The direction of imports, read from the source with `ast`: lazy and typing-only imports count like any other."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("server", "runtime", "ops", "oneloop_native", "tests", "loadtests")
# Rooms from high to low: a folder, or a file of the root. What stands in one line may not know each other.
SERVER_ROOMS = (
    ("__main__", "server"),
    ("cli", "ray"),
    ("llm",),
    ("process",),
    ("api",),
    ("generate", "batches"),
    ("models",),
    ("media",),
    ("http",),
    ("config",),
    ("text",),
)
# The folders of server/api and the files beside them, likewise.
API_ROOMS = (
    ("operations",),
    ("responses", "anthropic", "ollama", "llamacpp"),
    ("pooling",),
    ("openai",),
    ("openapi",),
    ("routes",),
    ("route",),
    ("service",),
    ("response_store",),
)
# The files of runtime's root, which are the spine, and no more than twelve.
SPINE = (
    "__init__", "batch", "config", "engine_options", "fault", "feature", "features", "preload", "scheduler", "sequence", "step",
    "torch_import",
)  # fmt: skip
# What describes and decides a step is one room: a sequence has blocks, and blocks are of sequences.
STEP_ROOM = ("batch", "feature", "kv", "policy", "scheduler", "scheduling", "sequence", "step")
RUNTIME_ROOMS = (
    ("doctor", "quantize"),
    ("start",),
    ("features", "engine", "platform"),
    ("runner", "lora"),
    ("sample", "pool"),
    ("models",),
    ("parallel",),
    ("config",),
    ("engine_options",),
    ("speculate", "encode", "constrain", "snapshots", "tiers"),
    ("metrics",),
    ("scheduler", "weights", "profiling"),
    ("api", "fault", "torch_import", "preload"),
)
BENCH = {("server.__main__", "loadtests.__main__"), ("server.__main__", "loadtests.__main__.main")}
NO_TORCH_IN_RUNTIME = (
    "runtime.api", "runtime.engine_options", "runtime.config", "runtime.policy.fairness", "runtime.batch", "runtime.sequence",
    "runtime.scheduler",
    "runtime.engine", "runtime.fault", "runtime.step", "runtime.metrics.stats", "runtime.metrics.loop_lag",
    "runtime.engine.token_stream", "runtime.speculate.methods", "runtime.kv.block_copies", "runtime.metrics.engine_meter",
    "runtime.speculate.speculation",
    "runtime.profiling.session", "runtime.profiling.trace", "runtime.engine.sleeping",
    "runtime.api.media", "runtime.encode.cache", "runtime.encode.scheduling", "runtime.tiers.scheduling",
    "runtime.lora.adapters", "runtime.lora.slots",
    "runtime.constrain.masked_sampling", "runtime.metrics.step_health",
    "runtime.kv.block_pool", "runtime.kv.block_table", "runtime.kv.prefix_cache", "runtime.kv.layout",
    "runtime.runner.worker", "runtime.platform.host", "runtime.models.registry",
    "runtime.weights.gguf", "runtime.weights.fetch", "runtime.weights.names",
)  # fmt: skip
# Imported inside a function that runs while weights are loaded, which no header needs.
WHILE_LOADING = {("runtime.weights.dequantize", name) for name in ("ops.blocks", "ops.blocks.decode")}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Dotted names a file imports; for `from a import b` both a and a.b, since b may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def files() -> dict[str, set[str]]:
    """What each module imports. Read by the first test that asks, not by every process that only collects tests."""
    return {module_name(path): imports_of(path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def offences(where, forbidden) -> list[str]:
    return [f"{m} imports {n}" for m, names in files().items() if where(m) for n in sorted(names) if forbidden(m, n)]


def test_the_rooms_are_where_the_test_looks():
    assert {"server.process.app", "runtime.engine", "runtime.scheduler", "ops"} <= set(files())


@pytest.mark.parametrize(
    ("room", "above"),
    [
        ("ops", ("runtime", "server", "loadtests", "tests")),
        ("runtime", ("server", "loadtests", "tests")),
        ("server", ("loadtests", "tests", "ops", "oneloop_native")),
    ],
)
def test_nothing_imports_upward(room, above):
    # One door: `oneloop bench` is loadtests' own command line, which the composition root hands the words behind it.
    assert not offences(lambda m: within(m, room), lambda m, n: within(n, *above) and (m, n) not in BENCH)


def test_load_tests_know_nothing_of_the_product():
    """But the room that measures the engine in its own process."""
    product = ("server", "runtime", "ops", "oneloop_native", "torch")
    assert not offences(
        lambda m: within(m, "loadtests") and not within(m, "loadtests.engine"), lambda m, n: within(n, *product)
    )
    assert not offences(lambda m: within(m, "loadtests.engine"), lambda m, n: within(n, "server", "oneloop_native"))


def test_server_sees_only_the_border_of_runtime():
    assert not offences(
        lambda m: (
            within(m, "server") and m not in ("server.__main__", "server.process.load", "server.process.plan")
        ),  # the composition root
        lambda m, n: within(n, "runtime") and n != "runtime" and not within(n, "runtime.api", "runtime.engine_options"),
    )


def test_server_knows_no_torch():
    assert not offences(lambda m: within(m, "server"), lambda m, n: within(n, "torch", "triton"))
    # Vectors become text here: the engine gives arrays, and has brought numpy along by then.
    assert not offences(
        lambda m: within(m, "server") and not within(m, "server.api.pooling.vectors", "server.media"),
        lambda m, n: within(n, "numpy"),
    )


def room_of(module: str, wing: str) -> str:
    """Return the folder or root file that a module of `wing` lives in; the wing's own name for its __init__."""
    room = module.removeprefix(wing).strip(".").partition(".")[0] or wing
    return "scheduler" if wing == "runtime" and room in STEP_ROOM else room


def arrows(wing: str) -> dict[tuple[str, str], list[str]]:
    """Who knows whom, between different rooms of `wing`, and the imports that say so."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, names in files().items():
        if not within(module, wing):
            continue
        for name in names:
            while name not in files() and "." in name:
                name = name.rpartition(".")[0]
            pair = room_of(module, wing), room_of(name, wing)
            if within(name, wing) and pair[0] != pair[1]:
                found.setdefault(pair, []).append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize(
    ("wing", "rooms"), [("server", SERVER_ROOMS), ("server.api", API_ROOMS), ("runtime", RUNTIME_ROOMS)]
)
def test_rooms_know_only_those_below_them(wing, rooms):
    floor = {room: number for number, line in enumerate(rooms) for room in line}
    known = {pair: said for pair, said in arrows(wing).items() if set(pair) <= set(floor)}
    assert known, "the rooms are not where the test looks"
    assert not [said for (above, below), said in known.items() if floor[above] >= floor[below]]


def test_the_scheduler_knows_no_feature():
    """Nor does what it is made of: features reach it through `runtime.features` alone."""
    spine = (
        "batch", "feature", "kv", "policy", "scheduler", "scheduling", "sequence", "step_budget", "step_cost", "step_policy",
        "decode_turns",
    )  # fmt: skip
    features = ("constrain", "encode", "features", "lora", "parallel", "pool", "sample", "speculate")
    assert not offences(
        lambda m: within(m, *(f"runtime.{name}" for name in spine)),
        lambda m, n: within(n, *(f"runtime.{name}" for name in features)),
    )


@pytest.mark.parametrize(("wing", "rooms"), [("server", SERVER_ROOMS), ("runtime", RUNTIME_ROOMS)])
def test_every_room_has_its_floor(wing, rooms):
    listed = [room for line in rooms for room in line]
    assert sorted(listed) == sorted({room_of(module, wing) for module in files() if within(module, wing)} - {"runtime"})


def test_the_root_of_runtime_holds_the_spine_only():
    assert len(SPINE) <= 12
    assert {path.stem for path in (ROOT / "runtime").glob("*.py")} == {*SPINE}


def test_the_server_stays_a_house_of_few_floors_and_arrows():
    assert len(SERVER_ROOMS) <= 11
    assert len(arrows("server")) <= 60  # an API of its own is a room, and some ten arrows


def test_text_codecs_know_neither_http_nor_engine():
    assert not offences(
        lambda m: within(m, "server.text"),
        lambda m, n: (
            within(n, "runtime", "starlette") or (within(n, "server") and not within(n, "server", "server.text"))
        ),
    )


def test_bookkeeping_and_planning_need_no_torch():
    assert set(NO_TORCH_IN_RUNTIME) <= set(files())
    families = [name for name in files() if within(name, "runtime.models.families")]  # found by the registry itself
    assert len(families) > 1
    reached: dict[str, str] = {}

    def reach(module: str, origin: str) -> None:
        for name in files().get(module, ()):
            if (module, name) in WHILE_LOADING:
                continue
            assert not within(name, "torch", "ops", "triton"), f"{origin} reaches {name} through {module}"
            if name in files() and name not in reached:
                reached[name] = origin
                reach(name, origin)

    for module in (*NO_TORCH_IN_RUNTIME, *families):
        reach(module, module)


def test_only_kernels_know_the_compiled_module():
    assert not offences(lambda m: not within(m, "ops", "tests"), lambda m, n: within(n, "oneloop_native"))


def test_only_text_knows_what_is_compiled_for_it():
    assert not offences(lambda m: not within(m, "server.text.native", "tests"), lambda m, n: within(n, "oneloop_text"))


def test_only_the_room_for_it_knows_transformers():
    """Its door, models.implementation, opens when a model needs it. A program may ask for a tokenizer of theirs, what a model
    is to see goes through their processor of it, and speech is measured beside theirs."""
    room = "runtime.models.through_transformers"
    others = ("server.llm.tokenizer", "server.media.processor", "loadtests.engine.speech")
    assert not offences(lambda m: not within(m, "tests", room, *others), lambda m, n: within(n, "transformers"))
    assert not offences(
        lambda m: not within(m, "tests", room, "runtime.models.implementation"), lambda m, n: within(n, room)
    )


@pytest.mark.parametrize("package", ["models", "sample", "weights"])
def test_siblings_in_runtime_do_not_know_each_other(package):
    """models -> weights.rules, weights.formats and weights.sentence_transformers is the one exception: a family is its spec and its
    rules, a config says how its weights are quantised, and files beside it what is made of its output."""
    siblings = [f"runtime.{other}" for other in ("models", "sample", "weights", "runner") if other != package]
    read_as_data = ("rules", "formats", "sentence_transformers")
    allowed = tuple(f"runtime.weights.{name}" for name in read_as_data) if package == "models" else ()
    assert not offences(
        lambda m: within(m, f"runtime.{package}"),
        lambda m, n: within(n, *siblings) and not within(n, *allowed) and not (allowed and n == "runtime.weights"),
    )
