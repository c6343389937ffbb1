"""`oneloop ray`'s own options, and what becomes of the server's."""

from __future__ import annotations

import pytest

from server.config.server_options import ConfigError
from server.ray.options import RayOptions, num_devices


def test_what_is_not_its_own_goes_to_the_server():
    options, config = RayOptions.parse(["--replicas", "3", "--port", "9", "--max-num-seqs", "4", "--max-queue=5"], {})
    assert (options.replicas, options.replica_range, options.scales) == (3, (3, 3), False)
    assert (config.port, config.max_num_seqs, options.max_ongoing(config)) == (9, 4, 9)


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--min-replicas", "0", "--max-replicas", "4"], (0, 1, 4)),
        (["--replicas", "2", "--max-replicas", "4"], (1, 2, 4)),
        (["--replicas", "2", "--min-replicas", "2"], (2, 2, 2)),
    ],
    ids=str,
)
def test_a_range_has_their_number_follow_the_requests(argv, asked):
    options, _ = RayOptions.parse(argv, {})
    low, high = options.replica_range
    assert options.scales
    assert (low, options.replicas, high) == asked


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--replicas", "0"], "--replicas: 0 is out of range"),
        (["--replicas", "two"], "invalid int value: 'two'"),
        (["--replicas", "5", "--max-replicas", "4"], "--replicas 5 is not from --min-replicas 1 to --max-replicas 4"),
        (["--target-ongoing-requests", "nan"], "--target-ongoing-requests: nan is out of range"),
        (["--replica", "2"], "unknown option --replica (did you mean --replicas?)"),
        (["--batch-dir", "there"], "--batch-dir is not supported by oneloop ray"),
        (["--uds", "there"], "--uds is not supported by oneloop ray"),
        (["--min-replicas", "1", "--max-num-seqs", "none"], "--max-num-seqs: 'none' is not a whole number"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(argv, words):
    with pytest.raises(ConfigError) as refused:
        RayOptions.parse(argv, {})
    assert words in str(refused.value)


def test_names_and_values_say_the_same_as_flags():
    options, config = RayOptions.of_names(
        {"replicas": 2, "max_queue": "7", "enforce_eager": True, "access-log": "false", "api_key": ["a", "b"]}
    )
    assert options.replicas == 2
    assert (config.max_queue, config.enforce_eager, config.access_log, config.api_key) == (7, True, False, ("a", "b"))


def test_a_replica_keeps_nothing_for_later_requests():
    _, config = RayOptions.parse([], {})
    assert config.max_stored_responses == 0


def test_a_replica_takes_the_devices_that_its_model_is_shared_out_over():
    _, config = RayOptions.parse(["-tp", "2", "-dp", "3", "--pipeline-parallel-size", "2"], {})
    assert num_devices(config) == 12
