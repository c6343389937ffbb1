"""First launches of Triton kernels by several threads: each gets its own kernel's launcher, with its machine code loaded."""

import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from triton.compiler import CompiledKernel
from triton.runtime import build

import ops.launch  # noqa: F401 - replaces the functions of Triton that are called here

# As Triton up to 3.6 writes one for each kernel signature: single-phase initialisation, and the same name for all.
_LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths of four launchers; the function of each returns its place in the list."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("needs gcc, as Triton does")
    paths = []
    for place in range(4):
        folder = tmp_path_factory.mktemp("launcher")
        path = folder / f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}"
        (folder / "launcher.c").write_text(_LAUNCHER % place)
        include = sysconfig.get_paths()["include"]
        subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", folder / "launcher.c", "-o", path], check=True)
        paths.append(str(path))
    return paths


def _load(path: str) -> int:
    return int(build._load_module_from_path("__triton_launcher", path).launch())


def test_a_loaded_launcher_stays_what_it_is_when_others_are_loaded(launchers: list[str]) -> None:
    first, second = (build._load_module_from_path("__triton_launcher", path) for path in launchers[:2])
    again = build._load_module_from_path("__triton_launcher", launchers[0])
    assert [first.launch(), second.launch(), again.launch()] == [0, 1, 0]


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_switches")
def test_each_thread_loads_the_launcher_of_its_own_file(launchers: list[str]) -> None:
    with ThreadPoolExecutor(len(launchers)) as threads:
        loads = [threads.submit(_load, launchers[index % 4]) for index in range(2000)]
    assert [load.result() for load in loads] == [index % 4 for index in range(2000)]


class _Kernel(CompiledKernel):
    """A kernel that is loaded as Triton loads one, the launcher first; the machine code comes when a second thread waits for it."""

    _module_pid = -1  # of no process, so nothing is unloaded

    def __init__(self) -> None:
        self.module = self.function = self._run = None
        self.loading, self.awaited, self.num_loads = threading.Event(), threading.Event(), 0
        self._oneloop_loading = self
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        if self.loading.is_set():
            self.awaited.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def _init_handles(self) -> None:
        if self.module is None:
            self.num_loads += 1
            self._run = "launcher"
            self.loading.set()
            self.awaited.wait()
            self.module = self.function = "machine code"


def test_a_kernel_that_another_thread_loads_is_launched_with_its_machine_code() -> None:
    kernel = _Kernel()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: (kernel.run, kernel.function))
        kernel.loading.wait()
        try:
            second = threads.submit(lambda: (kernel.run, kernel.function)).result()
        finally:
            kernel.awaited.set()
    assert first.result() == second == ("launcher", "machine code")
    assert kernel.num_loads == 1
