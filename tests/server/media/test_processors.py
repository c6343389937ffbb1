"""What stands for pictures in a prompt, and their tensors: as transformers' own processors make them of the whole conversation."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import transformers
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from server.config.server_config import ServerConfig
from server.http.errors import InvalidMedia, InvalidRequest, TextOnly
from server.http.offload import to_the_end
from server.media.limits import MediaLimits
from server.media.media_options import MediaOptions
from server.media.placeholders import Expansion, PlaceholderError, PromptMedia, ReadMedia
from server.media.processor import Processor, ProcessorError, Refused
from server.media.reader import NoMedia
from server.media.video import read_video
from tests.server.media.pictures import drawn
from tests.server.media.processors import KINDS, STRINGS, tokenizer, written
from tests.server.media.reading import part, prompt, reader, seeing
from tests.server.media.sounds import sine, video, wav

SEEING = [kind for kind in KINDS if "audio" not in kind]
A, B, C = drawn(24, 16, 1), drawn(40, 70, 2), drawn(64, 20, 3)
CONVERSATIONS = {
    "one": [["What is ", part(A), "?"]],
    "first": [[part(B), "What is it?"]],
    "last": [["What is it?", part(C)]],
    "several of mixed sizes": [["One", part(A), part(B), "and ", part(C)]],
    "over turns": [["Look", part(A)], "Yes?", [part(C), "\n\nand\n", part(B)]],
    "twice the same": [[part(A), part(A)]],
}


def pictures(contents):
    return [
        each.source.value
        for content in contents
        if not isinstance(content, str)
        for each in content
        if not isinstance(each, str)
    ]


def rendered(tiny, contents):
    """What the template writes, and transformers' processor makes of it."""
    messages = [
        {"role": "user", "content": content if isinstance(content, str) else [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in content
        ]}
        for content in contents
    ]  # fmt: skip
    text = tiny.processor.apply_chat_template(messages, tokenize=False)
    processor = tiny.processor  # whose pictures are Pillow's
    if transformers.utils.is_torchvision_available():
        processor = transformers.AutoProcessor.from_pretrained(tiny.folder)
    return processor(text=[text], images=pictures(contents), return_tensors="pt")


@pytest.fixture(scope="module")
def tinies(tmp_path_factory):
    return {kind: written(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("kind", SEEING)
async def test_ids_and_places_are_transformers_own(tinies, kind, name):
    tiny, contents = tinies[kind], CONVERSATIONS[name]
    found, expected = await prompt(seeing(tiny), *contents), rendered(tiny, contents)
    assert found.prompts[0] == expected["input_ids"][0].tolist()
    [output_id] = {found.prompts[0][position] for item in found.media for position in item.positions.tolist()}
    assert output_id == next(value for key, value in tiny.config.items() if key.startswith("image"))
    places = [position for item in found.media for position in item.positions.tolist()]
    assert places == [place for place, id in enumerate(found.prompts[0]) if id == output_id]
    assert len(found.media) == len(pictures(contents))


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "gemma3"])
async def test_tensors_side_by_side_are_those_of_the_whole_conversation(tinies, kind):
    tiny, contents = tinies[kind], CONVERSATIONS["several of mixed sizes"]
    found, expected = await prompt(seeing(tiny), *contents), rendered(tiny, contents)
    names = {name for name in expected if name.startswith(("pixel", "image"))}
    assert names
    for item in found.media:
        assert set(item.inputs) == names
    for name in names:
        joined = np.concatenate([item.inputs[name] for item in found.media])
        assert np.array_equal(joined, expected[name].numpy()), name


def test_a_text_that_no_template_writes_is_put_as_its_processor_does():
    """PaliGemma's: pictures, then what begins a text, then what is asked, and the end of a line."""
    backend = tokenizer(["<image>", "<bos>"])
    backend.bos_token = "<bos>"
    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.image_seq_length = 4
    theirs = transformers.PaliGemmaProcessor(images, backend)
    ours = Processor(theirs, {"image_token_index": theirs.image_token_id})
    for text in ("<image>What?", "<image><image> and <image>"):
        num = text.count("<image>")
        media = PromptMedia(
            [ReadMedia("image", b"", *ours.process("image", A, {})) for _ in range(num)], ours.tokens, ours.output_ids,
            ours.layout,
        )  # fmt: skip
        assert set(media.read[0].inputs) == {"pixel_values"}
        written, ordered = media.written(media.layout(text))
        ids, items = media.placed(theirs.tokenizer(written)["input_ids"], ordered)
        assert ids == theirs(text=[text], images=[[A] * num], return_tensors="pt")["input_ids"][0].tolist()
        assert [len(item.positions) for item in items] == [4] * num


async def test_tiles_are_an_items_own_whatever_is_beside_it(tinies):
    """Of several pictures transformers makes as many tiles each as the one that has most."""
    tiny = tinies["idefics3"]
    alone = await prompt(seeing(tiny), ["a", part(C)])
    beside = await prompt(seeing(tiny), ["b", part(B), part(C)])
    assert len(beside.media[0].positions) > len(alone.media[0].positions)
    for name, tensor in alone.media[0].inputs.items():
        assert np.array_equal(beside.media[1].inputs[name], tensor)


async def test_how_many_outputs_follows_the_size(tinies):
    small, large = [(await prompt(seeing(tinies["qwen2_vl"]), [part(one)])).media[0] for one in (A, C)]
    for item in (small, large):
        [[_, height, width]] = item.inputs["image_grid_thw"].tolist()
        assert len(item.positions) == height * width // 4
    assert len(small.positions) < len(large.positions)


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
async def test_a_template_of_strings_gets_its_placeholders_too(tmp_path, kind):
    loaded = seeing(written(kind, tmp_path, STRINGS))
    found = await prompt(loaded, ["Look", part(A), "here"])
    text = loaded.tokenizer.decode(found.prompts[0], skip_special_tokens=False)
    run = loaded.media.processor.tokens["image"]
    assert text.startswith("[user] Look\n")
    assert text.endswith("\nhere\n")
    assert run in text


# --- sounds and videos --------------------------------------------------------------------------------------------


async def test_sounds_are_transformers_own(tinies):
    tiny, sounds = tinies["qwen2_audio"], [sine(0.4), sine(1.1, pitch=700.0)]
    found = await prompt(seeing(tiny), ["Hear ", part(sounds[0], "audio"), " and ", part(sounds[1], "audio")])
    token = tiny.processor.audio_token
    expected = tiny.processor(
        text=[f"[user] Hear {token} and {token}"], audio=sounds, sampling_rate=16_000, return_tensors="pt"
    )
    assert found.prompts[0] == expected["input_ids"][0].tolist()
    for name in ("input_features", "feature_attention_mask"):
        joined = np.concatenate([item.inputs[name] for item in found.media])
        assert np.array_equal(joined, expected[name].numpy()), name
    assert [item.modality for item in found.media] == ["audio", "audio"]
    assert len(found.media[0].positions) < len(found.media[1].positions)


async def test_a_file_of_a_sound_is_heard_as_its_samples_are(tinies):
    loaded = seeing(tinies["qwen2_audio"])
    samples = np.round(sine() * 32767).astype(np.float32) / 32767
    file, given = [(await prompt(loaded, [part(each, "audio")])).media[0] for each in (wav(samples), samples)]
    assert np.allclose(file.inputs["input_features"], given.inputs["input_features"], atol=1e-2)
    assert file.digest != given.digest


async def test_a_sound_longer_than_the_model_hears_is_refused_and_not_cut(tinies):
    loaded = seeing(tinies["qwen2_audio"])
    await prompt(loaded, [part(sine(2.0), "audio")])
    with pytest.raises(InvalidMedia, match=r"audio of at most 2 s; this one is 2\.5 s long"):
        await prompt(loaded, [part(sine(2.5), "audio")])


async def test_videos_are_transformers_own(tinies):
    """Where torchvision is installed, which videos need."""
    pytest.importorskip("torchvision")
    tiny, data = tinies["qwen2_vl"], video(12)
    found = await prompt(
        seeing(tiny, media_io_kwargs='{"video": {"num_frames": 6}}'), ["See ", part(data, "video"), "!"]
    )
    shown = to_the_end(read_video(data, "x", MediaLimits(), {"num_frames": 6}))
    processor = transformers.AutoProcessor.from_pretrained(tiny.folder)
    expected = processor(
        text=["[user] See <|vision_start|><|video_pad|><|vision_end|>!"], videos=[shown.frames], return_tensors="pt",
        video_metadata=[shown.metadata], do_sample_frames=False,
    )  # fmt: skip
    assert found.prompts[0] == expected["input_ids"][0].tolist()
    [item] = found.media
    for name in ("pixel_values_videos", "video_grid_thw"):
        assert np.array_equal(item.inputs[name], expected[name].numpy()), name
    assert len(item.positions) == found.prompts[0].count(tiny.config["video_token_id"])


# --- what clients write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SEEING)
@pytest.mark.parametrize("name", ["token", "its own"])
async def test_a_placeholder_that_a_client_writes_is_text(tinies, kind, name):
    tiny = tinies[kind]
    loaded = seeing(tiny)
    token = loaded.media.processor.tokens["image"]
    if name == "its own":
        token = tiny.processor.tokenizer.convert_ids_to_tokens(loaded.media.processor.output_ids["image"])
    found = await prompt(loaded, [f"What is {token}?", part(A), token])
    plain = await prompt(loaded, ["What is ?", part(A)])
    assert [len(item.positions) for item in found.media] == [len(item.positions) for item in plain.media]
    spelled = loaded.tokenizer.decode(found.prompts[0], skip_special_tokens=False)
    assert spelled.count(f"What is {token}?") == 1
    assert loaded.tokenizer.backend.token_to_id(token) not in found.prompts[0][: found.media[0].positions[0] - 20]


@pytest.mark.parametrize("kind", SEEING)
async def test_one_that_is_meant_and_has_no_picture_is_refused(tinies, kind):
    loaded = seeing(tinies[kind])
    token = loaded.media.processor.tokens["image"]
    with pytest.raises(InvalidRequest, match="placeholders") as caught:
        await prompt(loaded, [f"What is {token}?", part(A)], allow_special_tokens=True)
    assert caught.value.param == "messages"


async def test_a_template_that_leaves_pictures_out_is_told_on(tmp_path):
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    loaded = seeing(written("llava", tmp_path, template))
    with pytest.raises(InvalidRequest, match=r"0 placeholders .* for 1 images"):
        await prompt(loaded, ["What?", part(A)])


# --- digests ------------------------------------------------------------------------------------------------------


async def test_a_digest_is_of_the_bytes_and_of_how_they_are_processed(tinies, tmp_path):
    tiny, other = tinies["llava"], written("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"crop_size": 16}')

    async def digest(reader, picture=A):
        return (await reader.read([part(picture)])).read[0].digest

    first = await digest(reader(tiny))
    assert await digest(reader(tiny)) == first
    changed = [
        await digest(reader(tiny), B),
        await digest(reader(tiny, mm_processor_kwargs='{"do_normalize": false}')),
        await digest(reader(tiny, media_io_kwargs='{"image": {"rgba_background_color": [0, 0, 0]}}')),
        await digest(reader(other)),
    ]
    assert len({first, *changed}) == 5
    assert len(first) == 32


async def test_processor_kwargs_reach_the_processor(tinies):
    tiny = tinies["qwen2_vl"]
    few = await prompt(seeing(tiny, mm_processor_kwargs='{"max_pixels": 256}'), [part(C)])
    many = await prompt(seeing(tiny), [part(C)])
    assert len(few.media[0].positions) < len(many.media[0].positions)


async def test_a_requests_kwargs_stand_over_the_operators(tinies):
    loaded = seeing(tinies["qwen2_vl"], mm_processor_kwargs='{"max_pixels": 1024}')
    many = await prompt(loaded, [part(C)])
    few = await prompt(loaded, [part(C)], processor_kwargs={"max_pixels": 256})
    assert len(few.media[0].positions) < len(many.media[0].positions)
    assert few.media[0].digest != many.media[0].digest
    same = await prompt(loaded, [part(C)], processor_kwargs={"max_pixels": 1024})
    assert same.media[0].digest == many.media[0].digest


@pytest.mark.parametrize(("kwargs", "complaint"), [
    ({"size": {"height": 1}}, "size is not one of min_pixels, max_pixels"),
    ({"min_pixels": 1 << 30}, "min_pixels: 1073741824 is not a count from 1 to 16777216"),
    ({"max_pixels": True}, "max_pixels: True is not a count"),
    ({"max_patches": 65}, "max_patches: 65 is not a count from 1 to 64"),
    ({"do_pan_and_scan": 1}, "do_pan_and_scan: 1 is not true or false"),
])  # fmt: skip
async def test_a_requests_kwargs_have_bounds(tinies, kwargs, complaint):
    with pytest.raises(InvalidRequest, match=complaint) as refusal:
        await prompt(seeing(tinies["qwen2_vl"]), [part(C)], processor_kwargs=kwargs)
    assert refusal.value.param == "mm_processor_kwargs"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_processor_takes_its_sample(tinies, kind):
    made = reader(tinies[kind])
    before = made.modalities
    assert made.probe() == {}
    assert made.modalities == before


def test_kwargs_that_the_processor_does_not_take_fail_at_the_start(tinies):
    tiny = tinies["llava"]
    options = MediaOptions(ServerConfig(mm_processor_kwargs='{"crop_size": {"width": 3}}'))
    with pytest.raises(ValueError, match="--mm-processor-kwargs: the model's processor fails for image with them"):
        options.reader(tiny.folder, tiny.config, frozenset({"image"}))


def test_a_processor_that_fails_leaves_the_model_its_text_and_the_log_says_so(tinies, monkeypatch, caplog):
    tiny = tinies["llava"]

    def broken(*_):
        raise Refused("crop_size is missing")

    monkeypatch.setattr(Processor, "process", broken)
    found = MediaOptions(ServerConfig()).reader(tiny.folder, tiny.config, frozenset({"image"}))
    assert isinstance(found, NoMedia)
    assert "image disabled: the model's processor fails: crop_size is missing" in caplog.text


# --- processors that cannot be had --------------------------------------------------------------------------------


def test_a_folder_without_a_processor(tmp_path):
    with pytest.raises(ProcessorError, match="names no processor"):
        Processor.load(tmp_path, {"model_type": "llama"})


def test_a_class_that_is_not_there(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"processor_class": "HomeMadeProcessor"}')
    with pytest.raises(ProcessorError, match="HomeMadeProcessor"):
        Processor.load(tmp_path, {})


def test_what_needs_a_package_names_it(tmp_path, monkeypatch):
    tiny = written("llava", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ProcessorError, match=r"oneloop\[media\]"):
        Processor.load(tiny.folder, tiny.config)


@pytest.mark.skipif(transformers.utils.is_torchvision_available(), reason="torchvision is installed")
def test_videos_without_torchvision_are_no_modality(tinies):
    processor = Processor.load(tinies["qwen2_vl"].folder, tinies["qwen2_vl"].config)
    assert processor.modalities == {"image"}


async def test_a_picture_that_its_processor_refuses(tinies):
    with pytest.raises(InvalidMedia, match="aspect ratio") as caught:
        await prompt(seeing(tinies["qwen2_vl"]), [part(drawn(900, 2))])
    assert caught.value.param == "where"


async def test_a_modality_that_the_model_lacks(tinies):
    with pytest.raises(TextOnly, match="accepts text and image only"):
        await prompt(seeing(tinies["llava"]), [part(A, "audio")])


def test_threads_share_a_processor(tinies):
    processor = Processor.load(tinies["idefics3"].folder, tinies["idefics3"].config)
    expected = {each: processor.process("image", picture, {}) for each, picture in (("a", A), ("b", B))}
    found, start = [], threading.Barrier(4)

    def work(name, picture):
        start.wait()
        found.append((name, processor.process("image", picture, {})))

    threads = [threading.Thread(target=work, args=pair) for pair in [("a", A), ("b", B)] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for name, (expansion, inputs) in found:
        assert expansion == expected[name][0]
        assert all(np.array_equal(inputs[each], tensor) for each, tensor in expected[name][1].items())


# --- placeholders by themselves -----------------------------------------------------------------------------------


def media(*runs, modality="image"):
    return ReadMedia(modality, b"d", Expansion("X" * len(runs), tuple(runs)), {})


def test_runs_are_one_token_until_they_are_placed():
    assert Expansion.of("a<i><i><i>b<i>", "<i>") == Expansion("a<i>b<i>", (3, 1))
    found = PromptMedia([media(2, 3), media(1)], {"image": "P"}, {"image": 9})
    text, ordered = found.written("..P.P")
    assert text == "..XX.X"
    ids, items = found.placed([1, 2, 9, 9, 3, 9], ordered)
    assert ids == [1, 2, 9, 9, 9, 9, 9, 3, 9]
    assert [item.positions.tolist() for item in items] == [[2, 3, 4, 5, 6], [8]]
    assert items[0].positions.dtype == np.int32


@pytest.mark.parametrize("text", ["", "P", "PPP"])
def test_as_many_placeholders_as_pictures(text):
    found = PromptMedia([media(1), media(1)], {"image": "P"}, {"image": 9})
    with pytest.raises(PlaceholderError, match=f"{len(text)} placeholders"):
        found.written(text)


def test_a_token_too_many():
    found = PromptMedia([media(1)], {"image": "P"}, {"image": 9})
    with pytest.raises(PlaceholderError, match="without an image"):
        found.placed([9, 1, 9], found.written("P")[1])
