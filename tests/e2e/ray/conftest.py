"""Ray, which has no place in our own environment (requirements/ray.txt): where it is not installed, these tests are not there, and
to ask for nothing but these is an error."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = ["test_*.py"] if find_spec("ray") is None else []
