"""Captured passes of an encoder: which are captured and kept; and, on a GPU, what they give for other pixels on the same grid."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import pytest
import torch

from runtime.media import MediaItem
from runtime.models.through_transformers.vision_blocks import VisionBlock
from runtime.platform.encoder_graphs import EncoderGraphs
from tests.equality.test_media import FAMILIES, drawn, load

PACKED = [name for name in FAMILIES if name.startswith("qwen")]


class Replayed:
    """A graph that computes anew."""

    def __init__(self, captured: list[bytes], key: bytes, inputs, compute) -> None:
        captured.append(key)
        self._inputs, self._compute = inputs, doubled
        self.outputs = compute(inputs)

    def replay(self) -> None:
        self.outputs.copy_(self._compute(self._inputs))


class Graphs(EncoderGraphs):
    """Without a device."""

    def __init__(self, **bounds) -> None:
        super().__init__(**bounds)
        self.captured: list[bytes] = []

    def _record(self, key, inputs, compute):
        graph = Replayed(self.captured, key, inputs, compute)
        return graph, graph.outputs


def doubled(inputs):
    return inputs["x"] * 2


def run(graphs: EncoderGraphs, key: bytes, value: float, num: int = 3) -> float:
    outputs = graphs.run(key, num, {"x": torch.full((num, 1), value)}, doubled)
    assert outputs.shape == (num, 1)
    return float(outputs[0])


def test_a_pass_is_captured_when_its_shape_comes_again():
    graphs = Graphs()
    assert [run(graphs, b"a", value) for value in (1, 2, 3)] == [2, 4, 6]
    assert (graphs.captured, graphs.num_replays) == ([b"a"], 2)


def test_what_was_given_stays_as_it_is():
    graphs = Graphs()
    x = {"x": torch.ones(3, 1)}
    kept = [graphs.run(b"a", 3, x, doubled) for _ in range(3)]
    graphs.run(b"a", 3, {"x": torch.zeros(3, 1)}, doubled)
    assert all(float(each.sum()) == 6 for each in kept)


def test_what_a_pass_hangs_on_is_kept_as_long_as_its_graph():
    """A graph knows addresses alone."""

    class Beside: ...

    beside = Beside()
    there = weakref.ref(beside)
    graphs = Graphs(max_graphs=1)
    for _ in range(2):
        graphs.run(b"a", 3, {"x": torch.ones(3, 1)}, partial(lambda inputs, beside: doubled(inputs), beside=beside))
    del beside
    assert there() is not None
    run(graphs, b"b", 1)
    run(graphs, b"b", 1)
    assert there() is None


def test_few_are_kept_and_none_of_large_passes():
    graphs = Graphs(max_graphs=2, max_outputs=3)
    for key in (b"a", b"b", b"c"):
        run(graphs, key, 1)
        run(graphs, key, 1)
    assert len(graphs._captured) == 2
    run(graphs, b"a", 1)
    assert graphs.captured == [b"a", b"b", b"c", b"a"]
    for _ in range(3):
        run(graphs, b"large", 1, num=4)
    assert b"large" not in graphs.captured


def test_what_refuses_to_be_captured_runs_as_it_is_from_then_on(caplog):
    class Refused(Graphs):
        def _record(self, key, inputs, compute):
            self.captured.append(key)
            raise RuntimeError("it asks the device")

    graphs = Refused()
    assert [run(graphs, b"a", value) for value in (1, 2, 3)] == [2, 4, 6]
    assert graphs.captured == [b"a"]
    assert "it asks the device" in caplog.text


def picture(side: int, seed: int, width: int) -> MediaItem:
    pixels = np.random.default_rng(seed).standard_normal((side * side, width)).astype(np.float32)
    positions = np.arange(side * side // 4, dtype=np.int32)
    digest = b"%d %d" % (side, seed)
    return MediaItem(
        "image", digest, positions, {"pixel_values": pixels, "image_grid_thw": np.array([[1, side, side]])}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED)
def test_a_replayed_pass_gives_what_it_would_without_a_graph(name, tmp_path):
    drawn(FAMILIES[name]).save_pretrained(tmp_path)
    encoder = load(tmp_path, "cuda").encoder
    vision = encoder._model.config.vision_config
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    groups = [[picture(side, seed, width) for side in sides] for sides in ((8,), (4, 8), (8,)) for seed in range(4)]
    expected = [[each.clone() for each in encoder.encode(group)] for group in groups]
    graphs = encoder.passes = EncoderGraphs()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [encoder.encode(group) for group in groups]
        stream.synchronize()
    assert graphs.num_replays == len(groups) - 2  # the first of each of two shapes was none
    for ours, plain in zip(found, expected, strict=True):
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", [*PACKED, "glm 4.1v"])
def test_their_blocks_are_computed_by_ops(name, tmp_path):
    drawn(FAMILIES[name]).save_pretrained(tmp_path)
    blocks = [each for each in load(tmp_path).encoder._model.modules() if type(each).__name__.endswith("VisionBlock")]
    assert len(blocks) > 1
    assert all(isinstance(each, VisionBlock) for each in blocks)
