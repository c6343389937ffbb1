"""Files that place experts, and models whose devices have whole ones."""

from __future__ import annotations

import json

import pytest
import torch

from runtime.config import EngineConfig, PlanError
from runtime.models.registry import spec_from_config
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.placement import read_placement
from runtime.models.spec.sharding import Placement, cuts, sharded
from runtime.start import plan_engine
from tests.runtime.models.checkpoints import checkpoint
from tests.runtime.models.test_sharding import MODELS, check_together, parameters, quiet

WITH_EXPERTS = [name for name in MODELS if "expert" in name or name == "latents"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7", "expected a list for each device"),
        ("[[0, 1]]", "lists for 1 devices instead of 2"),
        ("[[0, 1], [2]]", "same number of experts"),
        ("[[0, 1], [1, 2]]", "names an expert twice"),
        ("[[0, true], [1, 2]]", "not a list of lists of integers"),
        ("[0, 1]", "not a list of lists of integers"),
        ('{"5": [[0], [1]]}', "there is no layer 5: they go from 0 to 4"),
        ('{"1": [[0], [0]]}', "layer 1 names an expert twice"),
        ("nothing", "Expecting value"),
    ],
)
def test_files_that_place_nothing_say_why(text, says, tmp_path):
    path = tmp_path / "placement.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_placement(path, 5, 2)


def test_a_file_is_for_all_layers_or_for_some(tmp_path):
    path = tmp_path / "placement.json"
    path.write_text("[[3, 0], [2, 1]]")
    assert read_placement(path, 2, 2).orders == {0: (3, 0, 2, 1), 1: (3, 0, 2, 1)}
    path.write_text(json.dumps({"1": [[1], [0]]}))
    assert read_placement(path, 2, 2).orders == {1: (1, 0)}


@pytest.mark.parametrize("order", [(), (2, 0, 3, 1)])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_whole_experts_on_each_device_compute_what_the_whole_computes(name, order, tmp_path, monkeypatch):
    files = checkpoint(tmp_path, MODELS[name], 1)
    placement = Placement(dict.fromkeys(range(9), order) if order else {})
    monkeypatch.setattr(
        "tests.runtime.models.shard_group.sharded", lambda spec, rank, size: sharded(spec, rank, size, placement)
    )
    check_together(files, 2)


def test_a_device_reads_its_own_experts_whole_and_routers_in_the_order_of_places(tmp_path):
    files = checkpoint(tmp_path, MODELS["experts"], 1)
    spec = spec_from_config(files.config)
    whole = parameters(spec, files)
    part = sharded(spec, 1, 2, Placement({0: (2, 0, 3, 1)}))
    own = parameters(part, files)
    experts = "model.layers.0.mlp.experts"
    assert {name for name in own if name.startswith(f"{experts}.")} == {
        f"{experts}.{number}.{half}.weight" for number in (3, 1) for half in ("gate_up", "down")
    }
    for name in (f"{experts}.3.down.weight", f"{experts}.1.gate_up.weight"):
        assert torch.equal(own[name], whole[name])
    router = "model.layers.0.mlp.gate.weight"
    assert torch.equal(own[router], whole[router][[2, 0, 3, 1]])
    assert "model.layers.1.mlp.gate.weight" not in cuts(part)


def test_what_cannot_be_placed_is_refused_by_name(tmp_path):
    spec = spec_from_config(checkpoint(tmp_path, MODELS["experts"], 1).config)
    with pytest.raises(UnsupportedModel, match="a placement of 3 experts of layer 1, which has 0 to 3"):
        sharded(spec, 0, 2, Placement({1: (0, 1, 2)}))
    with pytest.raises(UnsupportedModel, match="4 experts, which --enable-expert-parallel keeps whole"):
        sharded(spec, 0, 8, Placement())


def test_options_that_need_others_say_which(tmp_path):
    files = checkpoint(tmp_path, MODELS["as many kv heads"], 1)
    for options, says in (
        ({"enable_expert_parallel": True}, "add --tensor-parallel-size"),
        ({"expert_placement": "x.json", "tensor_parallel_size": 2}, "requires --enable-expert-parallel"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "has no experts"),
    ):
        with pytest.raises(PlanError, match=says):
            plan_engine(EngineConfig(device="cpu", **options), files, quiet)
