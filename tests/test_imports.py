"""What is not imported until something needs it: so a start pays for nothing that this model or this machine does not use."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import preload
from runtime.preload import preload_device, preload_torch

ROOT = Path(__file__).parent.parent
# safetensors.torch is for tests and for transformers, sse_starlette for who asks for stored events or the dashboard.
HEAVY = ("transformers", "accelerate", "safetensors", "triton", "sse_starlette")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
START = """
import asyncio, sys
import server.process.app, server.process.load
from runtime.config import EngineConfig
from runtime.start import start_engine
from runtime.weights.fetch import resolve

async def start(folder):
    config = EngineConfig(device="cpu", load_format="dummy", num_kv_blocks=8, max_model_len=64)
    engine = await start_engine(config, resolve(folder, None, print), lambda progress: None)
    await engine.close()

asyncio.run(start(sys.argv[1]))
"""


def loaded_by(code: str, *arguments: str) -> set[str]:
    """The modules that a Python of its own has loaded at the end."""
    code += "\nimport sys; print('LOADED', *(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("LOADED ")[2].split())


HELP = """
import contextlib, sys
from server.__main__ import main
sys.argv[1:] = ["--help"]
with contextlib.suppress(SystemExit):
    main()
"""


@pytest.mark.parametrize("code", ["import server", HELP], ids=["import", "help"])
def test_the_door_and_its_help_load_nothing_heavy(code):
    assert not loaded_by(code) & {"torch", "numpy", "tokenizers", *HEAVY}


def test_a_native_start_on_a_cpu_loads_no_other_backend(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    loaded = loaded_by(START, str(tmp_path))
    assert {"torch", "runtime", "server"} <= loaded
    assert not loaded & set(HEAVY)


PRELOAD = """
import sys
from pathlib import Path
from runtime.preload import preload_torch
thread = preload_torch()
thread.join()
assert "torch" not in sys.modules
print("MAPPED", "libtorch_cpu" in Path("/proc/self/maps").read_text())
import torch
assert float(torch.ones(2).sum()) == 2.0
"""


def test_the_libraries_of_torch_are_loaded_ahead_of_it():
    done = subprocess.run([sys.executable, "-c", PRELOAD], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "MAPPED True\n"


def test_where_there_is_no_torch_nothing_is_loaded_ahead(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert preload_torch() is None
    assert preload_device() is None


class Driver:
    """NVIDIA's, as far as it is asked. `status`: what each function returns."""

    def __init__(self, **status: int) -> None:
        self.asked: list[str] = []
        self._status = status

    def __getattr__(self, name):
        return lambda *arguments: self.asked.append(name) or self._status.get(name, 0)


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        ({}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ({"cuInit": 100}, ["cuInit"]),
        ({"cuDeviceGet": 101}, ["cuInit", "cuDeviceGet"]),
    ],
)
def test_a_context_is_made_where_the_driver_finds_a_device(status, asked):
    driver = Driver(**status)
    preload._begin_context(lambda name: driver)
    assert driver.asked == asked


def test_where_there_is_no_driver_no_context_is_made():
    def missing(name):
        raise OSError(name)

    preload._begin_context(missing)


def test_a_context_is_made_only_for_a_torch_that_computes_there(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    made = threading.Event()
    monkeypatch.setattr(preload, "_begin_context", made.set)
    assert preload_device() is None
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    thread = preload_device()
    assert thread is not None
    thread.join()
    assert made.is_set()


DEFERRED = f"""
from runtime.torch_import import defer_parts_of_torch, import_all_of_torch
defer_parts_of_torch()
{START}
import torch
def looked_up():
    rows = torch.zeros(3, dtype=torch.long, device="meta")
    return torch.nn.functional.embedding(rows, torch.empty(4, 2, device="meta"))
assert "torch._prims" not in sys.modules and "torch._export" not in sys.modules
try:
    looked_up()
except NotImplementedError:
    print("WITHOUT")
assert not hasattr(torch.export, "__wrapped__") and "torch._export" not in sys.modules
defers_more = (*map(int, torch.__version__.split(".")[:2]),) >= (2, 13)
for name in ("torch._higher_order_ops.scan", "torch.optim.sgd", "torch._subclasses", "torch.utils.data.dataloader"):
    assert (name in sys.modules) != defers_more, name
try:
    torch.cond()
except TypeError as error:
    assert "cond() missing" in str(error)
assert torch.cond is torch._higher_order_ops.cond and torch.while_loop is torch._higher_order_ops.while_loop
assert torch.vmap(lambda x: x + 1)(torch.zeros(2)).tolist() == [1.0, 1.0] and torch.vmap is torch.func.vmap
assert not torch.compiler.is_compiling() and torch.utils.data.DataLoader
assert torch.optim.SGD.__name__ == "SGD" and torch.ao.quantization.QConfig and torch.nn.quantized.Linear
assert torch.export.Dim("n").__name__ == "n" and not hasattr(torch.export, "Dimension")
import_all_of_torch()
assert looked_up().shape == (3, 2)
"""


def test_what_a_start_leaves_out_of_torch_is_there_for_whoever_asks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run([sys.executable, "-c", DEFERRED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "WITHOUT\n"), done.stderr


TRANSFORMERS = """
import sys
from runtime.torch_import import defer_parts_of_torch
defer_parts_of_torch()
import torch
assert "torch._prims" not in sys.modules
import accelerate
assert "torch._prims" in sys.modules
"""


ASKED_FIRST = """
from runtime.torch_import import defer_parts_of_torch
defer_parts_of_torch()
import torch
assert not torch.compiler.is_compiling()
"""


def test_the_first_who_asks_for_the_compiler_finds_it_in_torch_s_own_order():
    done = subprocess.run([sys.executable, "-c", ASKED_FIRST], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_describes_models_without_memory_has_all_of_torch():
    done = subprocess.run([sys.executable, "-c", TRANSFORMERS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
