"""Ray, which has no place in our own environment (requirements/ray.txt): where it is not installed, these tests are not there, and
to ask for nothing but these is an error."""

from __future__ import annotations

from importlib.metadata import distributions

# By its distribution: a module `ray` is there already, this folder.
is_there = any(each.name == "ray" for each in distributions())
collect_ignore_glob = [] if is_there else ["test_*.py"]
