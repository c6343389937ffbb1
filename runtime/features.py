"""List of all scheduling features, in the order in which the scheduler calls them. To remove a feature, delete its folder and
its line in `FEATURES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runtime.config import EnginePlan, PlanError
from runtime.encode.scheduling import EncoderLimits, EncoderScheduling
from runtime.feature import Feature
from runtime.lora.adapters import Adapters
from runtime.lora.scheduling import AdapterScheduling
from runtime.models.model import Model
from runtime.models.spec.draft_head import PairSpec
from runtime.parallel.stage_turns import StageTurns
from runtime.snapshots.scheduling import SnapshotScheduling
from runtime.speculate.scheduling import DraftScheduling
from runtime.tiers.scheduling import TierScheduling


def _stages(plan: EnginePlan, model: Model, adapters: Adapters | None) -> Feature | None:
    return StageTurns(plan.num_stages) if plan.num_stages > 1 else None


def _drafts(plan: EnginePlan, model: Model, adapters: Adapters | None) -> Feature | None:
    speculation = plan.speculation(model.spec.draft_share if isinstance(model.spec, PairSpec) else 0.0)
    return None if speculation is None else DraftScheduling(speculation)


def _snapshots(plan: EnginePlan, model: Model, adapters: Adapters | None) -> Feature | None:
    has_states = any(group.kind.is_replaced for group in plan.layout.groups)
    return SnapshotScheduling() if plan.enable_prefix_caching and has_states else None


def _adapters(plan: EnginePlan, model: Model, adapters: Adapters | None) -> Feature | None:
    return None if adapters is None else AdapterScheduling(adapters.slots)


def _encoders(plan: EnginePlan, model: Model, adapters: Adapters | None) -> Feature | None:
    spec = None if model.encoder is None else model.encoder.spec
    whole_prompts = plan.layout.in_one_step and model.spec.generates
    if spec is None and not whole_prompts and not takes_embeds(plan, model):
        return None
    return EncoderScheduling(
        EncoderLimits(
            plan.max_num_encoder_tokens,
            plan.encoder_cache_size,
            plan.max_model_len,
            spec is not None and spec.whole_items,
            model.spec.pooler_info.embedding_size * (1 + (0 if spec is None else spec.num_deepstack)),
            None if spec is None else spec.rope_positions,
            whole_prompts,
            spec is not None and spec.apart,
            0 if spec is None else spec.num_outputs,
        )
    )


def takes_embeds(plan: EnginePlan, model: Model) -> bool:
    """Return True if prompts may contain embeddings instead of token ids.

    Return False if all tokens of a media item or of a prompt must attend to each other, because embeddings do not. Also return
    False if layers need more than an embedding, or read media items themselves."""
    spec = None if model.encoder is None else model.encoder.spec
    takes = spec is None or not (spec.whole_items or spec.num_deepstack or spec.num_outputs)
    return plan.enable_prompt_embeds and model.spec.generates and takes and not plan.layout.in_one_step


def _tiers(plan: EnginePlan, model: Model, adapters: Adapters | None) -> Feature | None:
    tiers = plan.tiers
    if tiers is None:
        return None
    from runtime.tiers.disk import DiskTier
    from runtime.tiers.host import HostTier
    from runtime.tiers.slabs import Slabs

    slot_bytes = plan.layout.block_bytes * tiers.num_ranks
    num_slots = tiers.host_bytes // slot_bytes
    disk = None
    if tiers.folder is not None:
        try:
            disk = DiskTier(Path(tiers.folder), tiers.fingerprint, tiers.disk_bytes)
        except OSError as error:
            raise PlanError(f"--kv-disk {tiers.folder}: {error}") from error
    has_bus = model.device.startswith("cuda")
    return TierScheduling(
        HostTier(num_slots), Slabs(slot_bytes, num_slots, page_locked=has_bus), plan.token_s, disk,
        copy_bytes=(64 if has_bus else 16) << 20,  # a CPU's allocator keeps pieces this small, whose pages are mapped then
    )  # fmt: skip


FEATURES: tuple[Callable[[EnginePlan, Model, Adapters | None], Feature | None], ...] = (
    _stages,
    _drafts,
    _snapshots,
    _adapters,
    _encoders,
    _tiers,
)


def features_of(plan: EnginePlan, model: Model, adapters: Adapters | None) -> list[Feature]:
    """Return the scheduling features that `plan` and `model` require."""
    made = [make(plan, model, adapters) for make in FEATURES]
    return [feature for feature in made if feature is not None]
