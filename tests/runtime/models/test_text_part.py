"""Models that also see: their text is computed as transformers computes it, from checkpoints that have their eyes as well."""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime.models.load import load_model
from runtime.models.registry import spec_from_config
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.fetch import resolve
from tests.equality.test_families import GROUPED, HEADS, QWEN3_NEXT, SLIDING, WINDOW, YARN
from tests.runtime.models.paged import Paged

VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
MINISTRAL = {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}}
TEXTS = {
    "Gemma3": ({**HEADS, "sliding_window": WINDOW, "layer_types": [SLIDING, "full_attention"]}, VISION),
    "Mistral3": ({"model_type": "mistral", **GROUPED}, {"model_type": "pixtral", **VISION}),
    "Mistral3, Ministral": ({**HEADS, **MINISTRAL}, {"model_type": "pixtral", **VISION}),
    "Qwen3_5": ({**QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"]}, QWEN_VISION),
    "Qwen3_5Moe": ({**QWEN3_NEXT, "layer_types": ["full_attention", "linear_attention"]}, QWEN_VISION),
}


@pytest.fixture(scope="module", params=TEXTS)
def theirs(request):
    name, (text, vision) = request.param.split(",")[0], TEXTS[request.param]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.data.flatten()[0]) if parameter.ndim == 1 else 0.0, 0.2)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("as_first_written", [True, False])
def test_logits_equal_transformers(theirs, as_first_written, tmp_path):
    theirs.save_pretrained(tmp_path, save_original_format=as_first_written)
    files = resolve(str(tmp_path), None, lambda progress: None)
    ours = load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)
    ids = torch.randint(128, (50,), generator=torch.Generator().manual_seed(1))
    (logits,) = Paged(ours, 1, 50).step({0: ids.tolist()}).values()
    torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_a_text_of_another_kind_is_refused_by_name():
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "gpt2"}}
    with pytest.raises(UnsupportedModel, match="text_config is of model_type 'gpt2'; supported: mistral, ministral3"):
        spec_from_config(config)
