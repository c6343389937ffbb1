"""The C heap: how many arenas a server's threads share, and memory that is there before a call wants it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from server.http.offload import MAX_ARENAS

HAS_GLIBC = hasattr(ctypes.CDLL(None), "malloc_info")
COUNT = """
import ctypes, os, sys, threading
from server.http.offload import limit_arenas

limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.fdopen.argtypes = [ctypes.c_size_t], [ctypes.c_int, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fflush.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
all_have = threading.Barrier(7)

def work():
    libc.malloc(4000)
    all_have.wait()

threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
all_have.wait()
stream = libc.fdopen(1, b"w")
libc.malloc_info(0, stream)
libc.fflush(stream)
"""


def num_arenas(**environ: str) -> int:
    """Of a process with six threads that have allocated."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment | environ, capture_output=True, check=True)
    return done.stdout.count(b"<heap nr=")


@pytest.mark.skipif(not HAS_GLIBC, reason="the C library is not glibc")
@pytest.mark.parametrize(
    ("environ", "num"),
    [({}, MAX_ARENAS), ({"MALLOC_ARENA_MAX": "3"}, 3), ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, 4)],
)
def test_threads_share_few_arenas_unless_it_is_said_how_many(environ, num):
    assert num_arenas(**environ) == num


FAULTS = """
import resource, threading
import msgspec
from server.http.body import joined

chunks = [b'"', *[b"a" * 65536] * 128, b'"']

def num_faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def work():
    body = joined(chunks)
    before = num_faults()
    decoded = msgspec.json.decode(body)
    print(num_faults() - before, len(decoded))

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not HAS_GLIBC, reason="of glibc's heap")
def test_memory_for_a_large_body_is_there_before_the_interpreter_is_kept_for_it():
    found = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    faults, num_chars = map(int, found.stdout.split())
    assert num_chars == 128 * 65536
    assert faults < 200  # of 2,048 pages
