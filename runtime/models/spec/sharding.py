"""Tensor parallel sharding: the spec of the part of a model that one device computes, and the slice of each parameter in it.

Heads, inner sizes of MLPs and of every expert, and the vocabulary are split (Megatron-LM, Shoeybi et al. 2019). Linear layers
whose columns are split yield partial sums (`reduced_linears`), and only the first device adds their bias. If there are fewer KV
heads than devices, adjacent devices have the same KV head. If inner parts of a mixer depend on all heads or on earlier tokens,
every device computes the whole mixer (`kept_whole`). These are pure functions on data; the caller sums over devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from runtime.models.spec.attention import Attention, CrossAttention, LatentAttention, NormScope
from runtime.models.spec.decoder import FINAL_NORM, DecoderSpec, ShardOf, layer_name
from runtime.models.spec.layer import (
    MLP,
    AnyLayer,
    FusedLayer,
    HybridLayer,
    Layer,
    Mixer,
    OnlyBlock,
    ParallelLayer,
    ParallelMixers,
    PostNormLayer,
    SingleLayer,
)
from runtime.models.spec.mlp import GatedMLP, MoE, PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import Cut, Parameter, Span


class Placement(NamedTuple):
    """Assignment of whole experts to devices (expert parallelism). `orders`: by layer index, the checkpoint numbers of all experts
    in the order of devices. Every device has the same number of experts. Layers not in `orders` keep the checkpoint's order."""

    orders: Mapping[int, tuple[int, ...]] = MappingProxyType({})


def sharded(spec: DecoderSpec, rank: int, size: int, placement: Placement | None = None) -> DecoderSpec:
    """Return the part of `spec` that device `rank` of `size` computes. Names of parameters are unchanged. `placement`:
    assignment of whole experts to devices; None splits each expert by columns. Raises UnsupportedModel if a size cannot be
    divided by `size`."""
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} of {size}")
    if size == 1:
        return spec
    try:
        _share(spec.vocab_size, size, "rows of the vocabulary")
        layers = tuple(_layer(layer, size) for layer in spec.layers)
        if placement is not None:
            layers = tuple(_placed(spec, index, layer, rank, size, placement) for index, layer in enumerate(layers))
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{spec.architecture} cannot be cut for {size} devices: {error}. Change --tensor-parallel-size"
        ) from error
    return replace(spec, layers=layers, shard_of=ShardOf(spec, rank, size))


def cuts(spec: DecoderSpec) -> dict[str, Cut]:
    """Return the slice of each split parameter that `spec`, a result of `sharded`, contains, by parameter name."""
    spec = spec.all_layers  # cuts of all layers, also of other stages
    if spec.shard_of is None:
        return {}
    rank, size = spec.shard_of.rank, spec.shard_of.size
    added_once = set(_reduced_biases(spec)) if rank else set()
    found = {}
    held = {own.name: own for own in spec.parameters()}
    for whole in spec.whole.parameters():
        own = held.get(whole.name)
        if own is None:
            continue  # an expert of another device
        if whole.name in added_once:
            found[whole.name] = Cut(whole.shape, (), None)
        elif whole.shape != own.shape:
            found[whole.name] = _cut(whole, own, rank, size)
    for index, layer in enumerate(spec.layers):
        for moe in (block for block in layer.blocks if isinstance(block, MoE)):
            if moe.order and moe.order != tuple(range(moe.num_experts)):
                found |= dict(_reordered(moe, layer_name(index), spec.hidden_size))
    return found


def _reordered(moe: MoE, layer: str, hidden_size: int) -> Iterator[tuple[str, Cut]]:
    """Yield (parameter name, slice) of the router's parameters, which have one row per expert in the router's order."""
    rows = tuple(Span(number, number + 1) for number in moe.order)
    router = moe.router_linear(layer, hidden_size)
    for parameter in router.parameters():
        yield parameter.name, Cut(parameter.shape, rows, None)
    if moe.router.e_score_correction_bias:
        yield moe.correction_bias_name(layer), Cut((moe.num_experts,), rows, None)


def _cut(whole: Parameter, own: Parameter, rank: int, size: int) -> Cut:
    aligned = len(whole.parts) == len(own.parts)
    parts = (whole.parts, own.parts) if aligned and whole.parts else (whole.shape[:1], own.shape[:1])
    rows, start = [], 0
    for count, held in zip(*parts, strict=True):
        first, last = _span(count, held, rank, size)
        rows.append(Span(start + first, start + last))
        start += count
    narrower = len(whole.shape) == 2 and whole.shape[1] != own.shape[1]
    return Cut(whole.shape, tuple(rows), _span(whole.shape[1], own.shape[1], rank, size) if narrower else None)


def _span(count: int, held: int, rank: int, size: int) -> Span:
    start = rank * (count // held) // size * held
    return Span(start, start + held)


def reduced_linears(spec: DecoderSpec) -> Iterator[str]:
    """Yield the names of linear layers that yield partial sums, except those of experts. `spec`: a result of `sharded`."""
    if spec.shard_of is not None:
        whole = {linear.name: linear for linear in spec.whole.linears()}
        for linear in spec.linears():
            if linear.reduce and linear.in_features != whole[linear.name].in_features:
                yield linear.name


class DeferredSums(NamedTuple):
    """All-reduces that are fused with the next norm. `norms`: names of the norms that first sum their input over ranks. `parts`:
    names of the linear layers and experts whose partial sums these norms read; they are not reduced separately."""

    norms: frozenset[str]
    parts: frozenset[str]


def deferred_sums(spec: DecoderSpec) -> DeferredSums:
    """Return the all-reduces that can be fused with the next norm of the residual stream. `spec`: a result of `sharded`. Blocks
    in parallel need a single all-reduce."""
    spec = spec.all_layers  # the first norm of a stage adds the sums that the previous stage left
    reduced = frozenset(reduced_linears(spec)) | (
        frozenset() if spec.shard_of is None else {each.name for each in spec.experts()}
    )

    def of(name: str, *blocks: OnlyBlock) -> frozenset[str]:
        """Return the names of the linear layers and experts that yield the blocks' partial sums; none if some output is not a
        partial sum."""
        found = [_last_of(block, name, spec.hidden_size) & reduced for block in blocks]
        return frozenset().union(*found) if all(found) else frozenset()

    within = {part for parts in _within_experts(spec) for part in parts & reduced}
    if spec.aux_layers:  # a draft head reads the residual stream itself
        return DeferredSums(frozenset(), frozenset(within))
    norms: dict[str, frozenset[str]] = {}
    added: frozenset[str] = frozenset()  # partial sums that the previous layer left
    for index, layer in enumerate(spec.layers):
        name, before, added = layer_name(index), added, frozenset()
        match layer:
            case Layer():
                if layer.before is not None:
                    norms[f"{name}.{layer.before[0]}"] = before
                if layer.before is not None and layer.after is None:
                    norms[f"{name}.{layer.before[1]}"] = of(name, *layer.mixers)
                    added = of(name, layer.mlp)
            case ParallelLayer():
                norms[f"{name}.{layer.norms[0]}"] = before
                added = of(name, *layer.mixers, layer.mlp)
            case SingleLayer(block):
                norms[f"{name}.{layer.before}"] = before
                added = of(name, block)
            case PostNormLayer():
                norms[f"{name}.{layer.norms[0]}"] = of(name, *layer.mixers)
                norms[f"{name}.{layer.norms[1]}"] = of(name, layer.mlp)
    norms[FINAL_NORM] = added
    return DeferredSums(
        frozenset(norm for norm, parts in norms.items() if parts), frozenset(within).union(*norms.values())
    )


def _last_of(block: OnlyBlock, layer: str, hidden_size: int) -> frozenset[str]:
    """Return the names of the block's last linears or experts, if they may yield partial sums."""
    if isinstance(block, MoE):
        return frozenset() if block.latent else frozenset({block.experts(layer, hidden_size).name})
    return frozenset(linear.name for linear in block.linears(layer, hidden_size) if linear.reduce)


def _within_experts(spec: DecoderSpec) -> Iterator[frozenset[str]]:
    """Yield the last linear layers of blocks parallel to experts, whose outputs are added to the experts' before the all-reduce."""
    for index, layer in enumerate(spec.layers):
        for block in layer.blocks:
            if isinstance(block, MoE) and block.shared is not None and block.latent is None:
                yield _last_of(block.shared, layer_name(index), spec.hidden_size)


def kept_whole(spec: DecoderSpec) -> frozenset[str]:
    """Return the class names of blocks that every device computes completely. `spec`: a result of `sharded`."""
    if spec.shard_of is None:
        return frozenset()
    layers = zip(spec.whole.layers, spec.all_layers.layers, strict=True)
    return frozenset(
        type(own).__name__
        for whole_layer, layer in layers
        for whole, own in zip(whole_layer.mixers, layer.mixers, strict=True)
        if whole == own
    )


def _reduced_biases(spec: DecoderSpec) -> Iterator[str]:
    yield from (f"{name}.bias" for name in reduced_linears(spec))
    by_columns = (each for each in spec.experts() if not each.num_routed)  # whole experts need no sum
    halves = (half for each in by_columns for number in range(each.num_experts) for half in each.halves(number))
    yield from (f"{half.name}.bias" for half in halves if half.reduce)


def _layer(layer: AnyLayer, size: int) -> AnyLayer:
    match layer:
        case HybridLayer():
            return layer
        case FusedLayer():
            raise UnsupportedModel("layers of a draft head")
        case SingleLayer(GatedMLP() | PlainMLP() | MoE() as mlp):
            return replace(layer, block=_mlp(mlp, size))
        case SingleLayer(mixer):
            return replace(layer, block=_one_mixer(mixer, size))
        case _:
            return replace(layer, mixer=_mixer(layer.mixer, size), mlp=_mlp(layer.mlp, size))


def _placed(spec: DecoderSpec, index: int, layer: AnyLayer, rank: int, size: int, placement: Placement) -> AnyLayer:
    whole = next((block for block in spec.layers[index].blocks if isinstance(block, MoE)), None)
    if whole is None:
        return layer
    num = whole.num_experts
    order = placement.orders.get(index, tuple(range(num)))
    if sorted(order) != list(range(num)):
        raise UnsupportedModel(f"a placement of {len(order)} experts of layer {index}, which has 0 to {num - 1}")
    if whole.router.num_groups > 1 and order != tuple(range(num)):
        raise UnsupportedModel("experts that a router chooses by groups, in another order than their own")
    held = _share(num, size, "experts, which --enable-expert-parallel keeps whole")

    def of(moe: MoE) -> MoE:
        return replace(moe, intermediate_size=whole.intermediate_size, order=order, first=rank * held, num_held=held)

    match layer:
        case SingleLayer(MoE() as moe):
            return replace(layer, block=of(moe))
        case Layer() | PostNormLayer() | ParallelLayer() if isinstance(layer.mlp, MoE):
            return replace(layer, mlp=of(layer.mlp))
    raise UnsupportedModel("experts in layers of this kind")


def _mixer(mixer: Mixer | ParallelMixers, size: int) -> Mixer | ParallelMixers:
    if not isinstance(mixer, ParallelMixers):
        return _one_mixer(mixer, size)
    return ParallelMixers(tuple(replace(branch, mixer=_one_mixer(branch.mixer, size)) for branch in mixer.branches))


def _one_mixer(mixer: OnlyBlock, size: int) -> Mixer:
    match mixer:
        case LatentAttention():
            return replace(mixer, num_heads=_share(mixer.num_heads, size, "attention heads"))
        case Attention() if _by_heads(mixer):
            return _attention(mixer, size)
        case CrossAttention():
            raise UnsupportedModel("layers that read an encoder")
        case _:
            assert not isinstance(mixer, GatedMLP | PlainMLP | MoE)
            return mixer


def _mlp(mlp: MLP, size: int) -> MLP:
    if not isinstance(mlp, MoE):
        return _plain_or_gated(mlp, size)
    inner = _share(mlp.intermediate_size, size, "columns of an expert")
    return replace(
        mlp, intermediate_size=inner, shared=None if mlp.shared is None else _plain_or_gated(mlp.shared, size)
    )


def _plain_or_gated(mlp: GatedMLP | PlainMLP, size: int) -> GatedMLP | PlainMLP:
    return replace(mlp, intermediate_size=_share(mlp.intermediate_size, size, "columns of an MLP"))


def _by_heads(attention: Attention) -> bool:
    over_all = attention.qk_norm is not None and attention.qk_norm.over is NormScope.ALL_HEADS
    return not attention.output_gate and attention.alibi is None and not over_all


def _attention(attention: Attention, size: int) -> Attention:
    num_heads, num_kv_heads = _share(attention.num_heads, size, "attention heads"), attention.num_kv_heads
    if num_kv_heads % size and size % num_kv_heads:
        raise UnsupportedModel(f"{num_kv_heads} kv heads")
    return replace(attention, num_heads=num_heads, num_kv_heads=max(1, num_kv_heads // size))


def _share(count: int, size: int, what: str) -> int:
    if count % size:
        raise UnsupportedModel(f"{count} {what}")
    return count // size
