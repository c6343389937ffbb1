"""Several client processes do what one does."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from loadtests.address import Address
from loadtests.arrivals import Poisson
from loadtests.clients import measure_with_clients, num_clients, parts_of
from loadtests.figures import summarise
from loadtests.load import Limits, RequestOptions, scripts_of
from loadtests.workloads import Workload, find_workloads
from tests.loadtests.test_processes import toy, wait_healthy

HERE = Address("127.0.0.1", 1)


def workload(**changes: object) -> Workload:
    fields = {"num_requests": 13, "num_warmup": 0} | changes
    return replace(find_workloads(["c5_8_4"])[0], **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("arrivals", [None, Poisson(100.0)])
def test_every_request_and_every_stream_belongs_to_one_client(arrivals):
    whole = workload(arrivals=arrivals)
    parts = parts_of(HERE, whole, RequestOptions("m"), Limits(), 3)
    sent = [request for part in parts for request in part.scripts]
    assert sorted(sent) == sorted(scripts_of(HERE, whole, RequestOptions("m")))
    assert [part.concurrency for part in parts] == [2, 2, 1]
    if arrivals is None:
        assert {part.arrivals_s for part in parts} == {None}
    else:
        assert sorted(moment for part in parts for moment in part.arrivals_s or ()) == whole.arrivals_s()


@pytest.mark.parametrize("clients", [1, 3])
def test_the_answers_of_all_clients_are_one_run(tmp_path, clients):
    process, address = toy(tmp_path)
    with process:
        wait_healthy(process, address)
        run = measure_with_clients(address, workload(num_warmup=1), RequestOptions("m"), Limits(), clients, lambda: 1.0)
    figures = summarise(run)
    assert (figures["ok"], figures["errors"], figures["out_tokens"]) == (13, 0, 52)
    assert (figures["client_processes"], figures["server_cpu_s"]) == (clients, 0.0)
    assert run.client_cpu_s is not None
    assert run.busiest_client_cpu_s is not None
    assert run.busiest_client_cpu_s <= run.client_cpu_s
    assert all(answer.ended_s - answer.sent_s <= run.wall_s for answer in run.answers)


def test_a_server_that_is_not_there_is_an_error_for_every_request_of_every_client():
    figures = summarise(measure_with_clients(HERE, workload(), RequestOptions("m"), Limits(), 2))
    assert (figures["ok"], figures["errors"]) == (0, 13)


@pytest.mark.parametrize(
    ("cores", "concurrency", "requested", "clients"),
    [(16, 256, None, 4), (16, 128, None, 2), (16, 32, None, 1), (2, 256, None, 1), (2, 256, 3, 3), (16, 2, 8, 2)],
)
def test_clients_follow_the_streams_and_leave_most_cores_to_the_server(
    monkeypatch, cores, concurrency, requested, clients
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_clients(concurrency, requested) == clients
