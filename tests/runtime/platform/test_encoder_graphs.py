"""Captured passes of an encoder: which are captured and kept; and, on a GPU, what they give for other pixels on the same grid."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import pytest
import torch

from runtime.api.media import MediaItem
from runtime.platform.encoder_graphs import EncoderGraphs
from tests.equality.test_media import FAMILIES, drawn, load

PACKED = [name for name in FAMILIES if name.startswith("qwen")]
WHOLE = [
    "llava 1.5",
    "vip-llava",
    "mistral 3",
    "gemma 3",
    "internvl",
    "llava-next",
]  # a tower of each kind, and ways to use one


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


def seen(name: str, seed: int, encoder) -> list[MediaItem]:
    """A picture of whatever size the family draws, of as many outputs as come of it."""
    inputs = FAMILIES[name].draw(np.random.default_rng(seed), seed % 2 == 1)
    num = len(encoder._outputs("image", [inputs]))
    return [MediaItem("image", b"%d" % seed, np.arange(num, dtype=np.int32), inputs)]


class Rerun:
    """A graph of a whole tower, without a device."""

    def __init__(self, inputs, compute) -> None:
        self._inputs, self._compute = inputs, compute
        self.outputs = compute(inputs)

    def replay(self) -> None:
        self.outputs.copy_(self._compute(self._inputs))


class Reruns(EncoderGraphs):
    def _record(self, key, inputs, compute):
        graph = Rerun(inputs, compute)
        return graph, graph.outputs


@pytest.mark.parametrize("name", WHOLE)
def test_a_tower_of_pictures_alone_is_captured_and_gives_what_it_gave(name, tmp_path):
    drawn(FAMILIES[name]).save_pretrained(tmp_path)
    encoder = load(tmp_path).encoder
    groups = [seen(name, seed, encoder) for seed in (0, 1, 2, 3, 4, 5)]
    expected = [encoder.encode(group)[0] for group in groups]
    encoder.passes = Reruns()
    found = [encoder.encode(group)[0] for group in groups]
    num_shapes = len({str([each.shape for each in item.inputs.values()]) for (item,) in groups})
    assert encoder.passes.num_replays == len(groups) - num_shapes  # the first of each was none
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def test_pictures_of_one_size_are_encoded_together(tmp_path):
    drawn(FAMILIES["llava 1.5"]).save_pretrained(tmp_path)
    encoder = load(tmp_path).encoder
    items = [item for seed in range(3) for item in seen("llava 1.5", seed, encoder)]
    alone = [encoder.encode([item])[0] for item in items]
    computed, sizes = encoder._computed, []

    def counted(modality, inputs, beside):
        sizes.append(len(inputs["pixel_values"]))
        return computed(modality, inputs, beside)

    encoder._computed = counted
    for ours, plain in zip(encoder.encode(items), alone, strict=True):
        torch.testing.assert_close(ours, plain)
    assert sizes == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*PACKED, *WHOLE])
def test_a_replayed_pass_gives_what_it_would_without_a_graph(name, tmp_path):
    drawn(FAMILIES[name]).save_pretrained(tmp_path)
    encoder = load(tmp_path, "cuda").encoder
    if name in PACKED:
        vision = encoder._model.config.vision_config
        channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        groups = [[picture(side, seed, width) for side in sides] for sides in ((8,), (4, 8), (8,)) for seed in range(4)]
    else:
        groups = [seen(name, seed, encoder) for seed in range(6)]
    expected = [[each.clone() for each in encoder.encode(group)] for group in groups]
    graphs = encoder.passes = EncoderGraphs()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [encoder.encode(group) for group in groups]
        stream.synchronize()
    num_shapes = len({str([each.shape for item in group for each in item.inputs.values()]) for group in groups})
    assert graphs.num_replays == len(groups) - num_shapes  # the first of each was none
    for ours, plain in zip(found, expected, strict=True):
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
