"""Importing torch without parts of it that no step needs: `torch.export`, and kernels in Python for tensors that have no memory.

They are for compilers, and for describing modules without computing them, and a fifth of torch's import. Deferred, they are empty
modules: whoever looks into one finds it whole, and whoever imports what works with tensors without memory (`NEEDS_ALL`) has both
before it begins. Nothing of torch is changed. Standard library only, and little of it: every command comes this way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # which would cost what is saved in `--help`
    Loader = MetaPathFinder = object

DEFERRED = ("torch._meta_registrations", "torch.export")
NEEDS_ALL = ("torch._dynamo", "torch._export", "torch._inductor", "torch.onnx", "accelerate", "transformers")


def defer_parts_of_torch() -> None:
    """From now on `import torch` goes without them. For a process of our own; does nothing where torch is imported already."""
    if "torch" not in sys.modules and not any(isinstance(finder, _Deferring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Deferring())


def import_all_of_torch() -> None:
    """What was deferred is there when this returns, and nothing is deferred any more: for code that is not ours."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Deferring)]:
        finder.end()


class _Deferring(MetaPathFinder):
    """Finds what is deferred, and notices what needs it."""

    def __init__(self) -> None:
        self._deferred: list[_WhenAsked] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in NEEDS_ALL:
            self.end()
        elif name in DEFERRED:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._deferred.append(_WhenAsked(spec.loader))
                spec.loader = self._deferred[-1]
            return spec
        return None

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for loader in self._deferred:
            loader.fill()


class _WhenAsked(Loader):
    """Gives an empty module, which is filled by the first who asks for a name in it. One thread fills, others wait."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._module: ModuleType | None = None
        self._filling = threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._module = module
        vars(module)["__getattr__"] = partial(self._first, module)

    def _first(self, module: ModuleType, name: str) -> object:
        # Who goes through all modules, as `inspect` and `warnings` do, wants nothing of this one.
        if not name.startswith("__") or name == "__all__":
            self.fill()
        if name not in vars(module):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return vars(module)[name]

    def fill(self) -> None:
        with self._filling:
            module, self._module = self._module, None
            if module is not None:
                self._loader.exec_module(module)
