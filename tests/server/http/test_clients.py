"""The process' limit of open files, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ASK = """
import resource, sys
from server.http.clients import raise_file_limit
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_file_limit(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "connections", "files"),
    [
        (512, 4096, 100, 100, 512),  # enough as it is
        (512, 4096, 1000, 1000, 1256),  # raised as far as needed
        (512, 1024, 1000, 768, 1024),  # and as far as it may be
        (300, 300, 1000, 150, 300),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_connections_need(soft, hard, wanted, connections, files):
    command = [sys.executable, "-c", ASK, str(soft), str(hard), str(wanted)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(connections), str(files)]
