"""Faster import of torch: defers submodules that no step needs, such as `torch.export`, meta kernels in Python, functorch
operators, the compiler frontend, data loaders, optimisers, torch's quantisation and NVIDIA's bindings.

They serve compilation, training and shape inference, and take two fifths of torch's import time. A deferred module is an empty
module that loads completely at the first attribute access. Importing a module that uses meta tensors (`NEEDS_ALL`) loads all
deferred modules first. Torch itself is unchanged. This file imports little, because every command runs it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # otherwise `--help` would become slower
    Loader = MetaPathFinder = object

# Torch versions with which deferring was tested: how torch's parts import each other may change.
DEFERRED = dict.fromkeys(("torch._meta_registrations", "torch.export"), (2, 11)) | dict.fromkeys(
    (
        "cuda.bindings.driver", "cuda.bindings.runtime", "torch._higher_order_ops", "torch.ao", "torch.compiler", "torch.func",
        "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.optim", "torch.quantization",
        "torch.utils.data",
    ),
    (2, 13),
)  # fmt: skip
# Functions of deferred modules that torch re-exports as its own.
TORCH_S_OWN = {"torch._higher_order_ops": ("cond", "while_loop"), "torch.func": ("vmap",)}
BEHIND = dict.fromkeys(("torch.compiler", "torch._higher_order_ops"), "torch.func")  # avoids a circular import
NEEDS_ALL = (
    "torch._dynamo", "torch._export", "torch._inductor", "torch.distributed.tensor", "torch.onnx", "accelerate", "transformers",
)  # fmt: skip


def defer_parts_of_torch() -> None:
    """Defer imports of rarely used submodules of torch from now on. Has no effect if torch is already imported."""
    if "torch" not in sys.modules and not any(isinstance(finder, _Deferring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Deferring())


def import_all_of_torch() -> None:
    """Import all deferred submodules and stop deferring. Call this before running third-party code."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Deferring)]:
        finder.end()


class _Deferring(MetaPathFinder):
    """Import hook that defers the modules of `DEFERRED`, and loads all of them if a module of `NEEDS_ALL` is imported."""

    def __init__(self) -> None:
        self._deferred: dict[str, _WhenAsked] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in NEEDS_ALL:
            self.end()
        elif name in DEFERRED and _torch_version() >= DEFERRED[name]:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = self._deferred[name] = _WhenAsked(spec.loader, partial(self._fill, BEHIND.get(name)))
            return spec
        return None

    def _fill(self, name: str | None) -> None:
        if name in self._deferred:
            self._deferred[name].fill()

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for loader in list(self._deferred.values()):
            loader.fill()


def _torch_version() -> tuple[int, ...]:
    """Return torch's version, such as (2, 9), while torch is being imported; (0,) until its version is set."""
    said = getattr(sys.modules.get("torch"), "__version__", "0")
    return tuple(map(int, str(said).split(".")[:2]))


class _WhenAsked(Loader):
    """Loader of a module that stays empty until its first attribute access. One thread then fills it; other threads wait."""

    def __init__(self, loader: Loader, prepare: Callable[[], None]) -> None:
        """Wrap `loader`. `prepare` is called before the module is executed."""
        self._loader, self._prepare = loader, prepare
        self._module: ModuleType | None = None
        self._given: dict[str, object] = {}  # attributes that torch sets on the module in place of its functions
        self._filling = threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._module = module
        vars(module)["__getattr__"] = partial(self._first, module)

    def _first(self, module: ModuleType, name: str) -> object:
        if self._module is not None and name in TORCH_S_OWN.get(module.__name__, ()):
            return self._given.setdefault(name, partial(self._call, module, name))
        # `inspect` and `warnings` go through all modules and must not load this one.
        if not name.startswith("__") or name == "__all__":
            self.fill()
        its_own = vars(module)["__getattr__"]
        if name not in vars(module) and isinstance(
            its_own, FunctionType
        ):  # torch finds some of its parts as they are needed
            return its_own(name)
        if name not in vars(module):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return vars(module)[name]

    def _call(self, module: ModuleType, name: str, /, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return vars(module)[name](*args, **kwargs)

    def fill(self) -> None:
        with self._filling:
            module, self._module = self._module, None
            if module is not None:
                self._prepare()
                self._loader.exec_module(module)
                for name, given in self._given.items():
                    if vars(torch := sys.modules["torch"]).get(name) is given:
                        setattr(torch, name, vars(module)[name])
