"""Checkpoints with draft heads in the layouts in which they are published, with random weights; and a plain reference of what such
a head guesses, by transformers' layers, without a cache: every guess is made of the whole text again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """`model`: gives hidden states [T, H'] of ids [T], as a head reads them; `head`: of those and the embeddings of the ids behind
    them the head's own hidden states and what its logits are made of, [T, H] each. `lm_head`: those to logits."""

    model: Callable[[Tensor], Tensor]
    embed: Callable[[Tensor], Tensor]
    enter: Callable[[Tensor], Tensor]
    head: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    lm_head: Callable[[Tensor], Tensor]

    @torch.inference_mode()
    def guesses(self, ids: Sequence[int], num: int) -> tuple[list[int], list[float]]:
        """What is guessed to follow `ids`, the last of which was sampled and not computed; and by how much each guess is likelier
        than the next."""
        text = torch.tensor(ids)
        hidden = self.enter(self.model(text[:-1]))
        found: list[int] = []
        margins: list[float] = []
        for _ in range(num):
            own, last = self.head(hidden, self.embed(text[1:]))
            best = self.lm_head(last[-1:])[0].topk(2)
            found.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            text = torch.cat([text, best.indices[:1]])
            hidden = torch.cat([hidden, own[-1:]])
        return found, margins


def random_linear(out_features: int, in_features: int, *, bias: bool = False) -> torch.nn.Linear:
    linear = torch.nn.Linear(in_features, out_features, bias=bias)
    torch.nn.init.normal_(linear.weight, std=0.2)
    return linear


def final_norm(model: torch.nn.Module) -> torch.nn.Module:
    return model.norm_f if hasattr(model, "norm_f") else model.norm


def last_states(model, embeds: Tensor) -> tuple[Tensor, Tensor]:
    """embeds [T, H] -> what a transformers model's last layer gives and what its final norm makes of that."""
    given: list[Tensor] = []
    hook = final_norm(model).register_forward_pre_hook(lambda _, args: given.append(args[0]))
    try:
        normed = model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state
    finally:
        hook.remove()
    return given[0][0], normed[0]


def spread(model: torch.nn.Module) -> None:
    """Numbers by which greedy texts differ, and norms that are not ones."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=parameter.data.mean().item(), std=0.2)


def echo(model: torch.nn.Module, loudness: float) -> None:
    """What it says next hangs on the last token alone, but for what its layers add, multiplied by `loudness`."""
    spread(model)
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            torch.nn.init.constant_(parameter, 0.0 if "Qwen3" in type(model).__name__ else 1.0)
        elif any(each in name for each in ("o_proj", "down_proj", "out_proj")):
            parameter.data *= loudness
    embedding = model.model.embed_tokens.weight.data
    embedding.copy_(embedding.sign())  # all of a length


def passing(linear: torch.nn.Linear, which: int) -> None:
    """Give on the first or the second half of what it is given."""
    size = linear.out_features
    linear.weight.data.zero_()
    linear.weight.data[:, which * size : (which + 1) * size] = torch.eye(size)
    if linear.bias is not None:
        linear.bias.data.zero_()


@dataclass(frozen=True)
class MtpLayout:
    """Names of a published checkpoint: where the layer is, or, by number, the layers are, and the parts around."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None
    hands_on_normed: bool
    hidden_first: bool = False
    copies: tuple[str, str] | None = None  # of embedding and head


def mtp_checkpoint(
    folder: Path, config: transformers.PretrainedConfig, one_layer: transformers.PretrainedConfig, layout: MtpLayout,
    told: dict, loudness: float | None = None,
) -> Reference:  # fmt: skip
    """A model of `config` whose checkpoint has an MTP layer as `one_layer` has its only one. `told`: what config.json says.
    `loudness`: both say nearly the same, see `echo`; None: whatever they do."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = transformers.AutoModelForCausalLM.from_config(one_layer, dtype=torch.float32)
    for each in (model, layer):
        spread(each) if loudness is None else echo(each, loudness)
    model.save_pretrained(folder)
    layer.save_pretrained(folder / "layer")
    tensors = load_file(folder / "model.safetensors")
    norm_class = type(final_norm(layer.base_model))
    size, eps = config.hidden_size, getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    norms = norm_class(size, eps), norm_class(size, eps)
    for norm in norms if loudness is None else ():
        torch.nn.init.normal_(norm.weight, mean=norm.weight.data.mean().item(), std=0.2)
    projection = random_linear(size, 2 * size)
    if loudness is not None:
        passing(projection, int(layout.hidden_first))
    for name, tensor in load_file(folder / "layer" / "model.safetensors").items():
        inner = name.split(".layers.")[-1]
        if inner != name:
            number, rest = inner.split(".", 1)
            tensors[layout.layer.format(number) + rest] = tensor
        elif name.endswith((".norm.weight", ".norm_f.weight")) and layout.final_norm is not None:
            tensors[layout.final_norm] = tensor
    tensors[layout.embedding_norm], tensors[layout.hidden_norm] = (norm.weight.data for norm in norms)
    tensors[layout.projection] = projection.weight.data
    if layout.copies is not None:
        for name, matrix in zip(layout.copies, (model.get_input_embeddings(), model.lm_head), strict=True):
            tensors[name] = matrix.weight.data.clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | told))

    def head(hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        parts = [norms[0](embeds), norms[1](hidden)]
        given, normed = last_states(
            layer.base_model, projection(torch.cat(parts[::-1] if layout.hidden_first else parts, dim=1))
        )
        if layout.final_norm is None:
            return given, given
        return (normed if layout.hands_on_normed else given), normed

    embedding = model.get_input_embeddings()
    return Reference(
        lambda ids: model.base_model(ids[None], use_cache=False).last_hidden_state[0], embedding, lambda read: read, head,
        model.lm_head,
    )  # fmt: skip


LLAMA_HEAD = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def eagle_checkpoint(
    folder: Path, model: torch.nn.Module, config: transformers.LlamaConfig, *, bias: bool, loudness: float | None = None
) -> Reference:
    """EAGLE's, as its authors write it: a layer without a norm before its attention, and no norm behind."""
    layer = transformers.LlamaForCausalLM(config)
    spread(layer) if loudness is None else echo(layer, loudness)
    layer.model.layers[0].input_layernorm = torch.nn.Identity()
    layer.model.norm = torch.nn.Identity()
    fc = random_linear(config.hidden_size, 2 * config.hidden_size, bias=bias)
    if loudness is not None:
        passing(fc, 0)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in layer.state_dict().items()
        if name.startswith("model.layers.")
    }
    tensors |= {f"fc.{name}": tensor for name, tensor in fc.state_dict().items()}
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.data
    _save(folder, tensors, json.loads(config.to_json_string()) | LLAMA_HEAD | {"bias": bias})

    def head(hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        given, _ = last_states(layer.model, fc(torch.cat([embeds, hidden], dim=1)))
        return given, given

    return Reference(
        lambda ids: model.model(ids[None], use_cache=False).last_hidden_state[0], model.model.embed_tokens, lambda read: read, head,
        model.lm_head,
    )  # fmt: skip


def eagle3_checkpoint(
    folder: Path, model: torch.nn.Module, config: transformers.LlamaConfig, layers: Sequence[int], *, num_ids: int | None,
    speculators: bool = False, loudness: float | None = None,
) -> Reference:  # fmt: skip
    """EAGLE-3's, as its authors write it, or, `speculators`, as vLLM's library does: then the norm comes before the residual.
    `layers`: of the model, whose inputs it reads. `num_ids`: of its own vocabulary, None for all of the model's."""
    layer = transformers.LlamaForCausalLM(config)
    size, of_model = config.hidden_size, model.config.hidden_size
    attention = layer.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, random_linear(getattr(attention, name).out_features, 2 * size))
    hidden_norm = type(layer.model.norm)(size, config.rms_norm_eps)
    layer.model.layers[0].hidden_norm = hidden_norm
    spread(layer) if loudness is None else echo(layer, loudness)
    fc = random_linear(size, len(layers) * of_model)
    ids = torch.arange(model.config.vocab_size)
    if num_ids is not None:
        ids = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))[:num_ids].sort().values
    lm_head = random_linear(len(ids), size)
    if loudness is not None:  # it attends to the embedding beside it alone, which is what it says, in the model's words
        for name, factor in (("q_proj", 40.0), ("k_proj", 40.0), ("v_proj", 1.0)):
            passing(getattr(attention, name), 0)
            getattr(attention, name).weight.data *= factor
        attention.o_proj.weight.data.copy_(torch.eye(size))
        hidden_norm.weight.data.fill_(loudness)
        lm_head.weight.data.copy_(model.lm_head.weight.data[ids])
    place = "layers.0." if speculators else "midlayer."
    tensors = {
        place + name.removeprefix("model.layers.0."): tensor
        for name, tensor in layer.state_dict().items()
        if name.startswith("model.layers.0.")
    }
    tensors |= {
        "fc.weight": fc.weight.data,
        "norm.weight": layer.model.norm.weight.data,
        "lm_head.weight": lm_head.weight.data,
    }
    embedding = model.model.embed_tokens
    if size != of_model:
        embedding = layer.model.embed_tokens
        tensors["embed_tokens.weight"] = embedding.weight.data
    if num_ids is not None:
        tensors["d2t"] = ids - torch.arange(num_ids)
        tensors["t2d"] = torch.isin(torch.arange(model.config.vocab_size), ids)
    said = json.loads(config.to_json_string())
    told = {
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "target_hidden_size": of_model,
    }
    if speculators:
        more = {"architectures": ["Eagle3Speculator"], "norm_before_residual": True, "transformer_layer_config": said}
        _save(folder, tensors, told | more)
    else:
        _save(folder, tensors, said | told | LLAMA_HEAD | {"architectures": ["LlamaForCausalLMEagle3"]})

    def read(text: Tensor) -> Tensor:
        """The inputs of layers, and behind the last one its output."""
        states: list[Tensor] = []
        hooks = [
            each.register_forward_pre_hook(lambda _, args: states.append(args[0][0])) for each in model.model.layers
        ]
        hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0][0])))
        model.model(text[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([states[index] for index in layers], dim=1)

    def head(hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        block = layer.model.layers[0]
        normed = hidden_norm(hidden)
        stream = normed if speculators else hidden
        rotary = layer.model.rotary_emb(hidden[None], torch.arange(len(hidden))[None])
        both = torch.cat([block.input_layernorm(embeds), normed], dim=1)[None]
        stream = stream + block.self_attn(both, position_embeddings=rotary, attention_mask=None)[0][0]
        stream = stream + block.mlp(block.post_attention_layernorm(stream))
        return stream, layer.model.norm(stream)

    def logits(last: Tensor) -> Tensor:
        found = torch.full((len(last), model.config.vocab_size), -torch.inf)
        found[:, ids] = lm_head(last)
        return found

    return Reference(read, embedding, fc, head, logits)


def _save(folder: Path, tensors: dict[str, Tensor], config: dict) -> None:
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
