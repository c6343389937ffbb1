"""Tests run alike wherever they are started. Without a GPU, Triton kernels run in its interpreter, and what needs the real
thing is skipped. A test that hangs ends with a traceback: pytest-timeout fails it by a signal; what no signal reaches (uvloop,
compiled code, a teardown after a failure) ends its process at twice that limit, with the stacks of all threads."""

import faulthandler
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a core; torch reads this when it is imported

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key  # the only stderr that is not captured
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is decorated

TESTS = Path(__file__).parent
# On a push the same examples each time; nightly, by `--hypothesis-profile nightly`, many and others each time.
_ANY_SPEED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("push", max_examples=25, derandomize=True, deadline=None, suppress_health_check=_ANY_SPEED)
settings.register_profile("nightly", max_examples=250, print_blob=True, deadline=None, suppress_health_check=_ANY_SPEED)
settings.load_profile("push")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip folders named nightly where all of their tests would be deselected: importing them takes as long as fast tests do."""
    return True if config.getoption("markexpr") == "not nightly" and collection_path.name == "nightly" else None


class LeftOut:
    """What collections leave out. A server that ends lets them have it, and so does an engine that sleeps; behind their tests each
    would go through all that was ever imported."""

    def __init__(self) -> None:
        self._is_let_in, self._let_in = False, gc.unfreeze
        gc.unfreeze = self._note

    def _note(self) -> None:
        self._let_in()
        self._is_let_in = True

    def again(self) -> None:
        """What a test has let in is left out once more, with what it has left behind."""
        if self._is_let_in:
            gc.collect(1)
            gc.freeze()
            self._is_let_in = False


LEFT_OUT = LeftOut()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded now stays, and nobody goes through it again: each of some hundred collections would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "nightly" in item.path.relative_to(TESTS).parts:
            item.add_marker(pytest.mark.nightly)
    interpreted: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("interpreted") is not None:
            interpreted.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for cases in interpreted.values():
        for item in cases[1:-1]:
            item.add_marker(pytest.mark.nightly)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def hang_limit_s(config: pytest.Config) -> float:
    """The limit of pytest-timeout, in its own order: command line, environment, pyproject."""
    return float(config.getoption("timeout") or os.environ.get("PYTEST_TIMEOUT") or config.getini("timeout"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test under the second limit: pytest's own would be lifted by the first failure. 0 means no limit."""
    limit_s = 2 * hang_limit_s(item.config)
    if limit_s > 0:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        LEFT_OUT.again()
