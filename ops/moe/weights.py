"""ExpertWeights: the experts of one layer in the form that their kernel reads, filled one by one at load.

Expert e computes down_e(activation(gate_e(x)) * up_e(x)), where gate and up are one matrix, gate first. Without a gate, it computes
down_e(activation(up_e(x)))."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from ops.stored import Stored

if TYPE_CHECKING:
    from ops.lora.share import TokenAdapters

# Routing: rules by which a router's logits select experts for a token, and their weights. Data only.
Score = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["best", "top-2 sum"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of experts by a router. A token takes the `top_k` experts with the largest score, plus a correction bias if there
    is one, which affects the choice only (Wang et al. 2024). An expert's weight is its score, divided by the sum of the chosen
    ones (at least `min_sum`) if `renormalize`, times `scale`.

    With `num_groups` > 1 experts are in groups of equal size, and only the `top_groups` best groups can be chosen. A group is
    ranked by its best score or the sum of its two best (DeepSeek-V2 and V3, 2024).

    "sparsemixer" (Liu et al. 2023) takes the largest logits one by one; a weight is its softmax among the logits not yet
    taken and within 2 `jitter` of it, relatively. None of the other rules apply to it."""

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "best"
    min_sum: float = 1e-20
    jitter: float = 0.0


Half = Literal["gate_up", "down"]


class ClampedActivation(Protocol):
    """Activation (up + 1) * gate * sigmoid(alpha * gate), gate clamped to at most `limit` and up to both sides (GPT-OSS,
    2025). Hashable."""

    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Shape of a layer's experts. `activation`: name for `ops.activate`, or a function of gate and up together. `bias`: all
    matrices have a bias. `gated`: if False, gate_up contains up only. `first`, `num_routed`: these experts are numbers `first` and
    following of the `num_routed` experts that the router selects from (0: they are all). Outputs of other experts are omitted."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: str | ClampedActivation = "silu"
    gated: bool = True
    first: int = 0
    num_routed: int = 0

    @property
    def are_all(self) -> bool:
        return self.num_routed in (0, self.num_experts)

    def matrix(self, half: Half) -> tuple[int, int]:
        """Return (out, in) features of one expert's gate_up or down."""
        if half == "down":
            return self.hidden_size, self.intermediate_size
        return (2 if self.gated else 1) * self.intermediate_size, self.hidden_size


class ExpertShares(NamedTuple):
    """Adapters of one half of all experts, on a device: tokens [T] int32, the slot of each token's adapter, -1 for none. For
    expert 0 a [slots, parts, rank, in], b [slots, out, rank], and scale [slots, parts] float32, 0 where an adapter does not
    change a part; the next expert is `stride` bytes on. Parts are equally large: gates and ups, or all."""

    tokens: Tensor
    a: Tensor
    b: Tensor
    scale: Tensor
    stride: int


class Beside(Protocol):
    """LoRA adapters of experts, whose products are added to those of the experts' matrices."""

    def shares(self, half: Half) -> ExpertShares:
        """Return the adapters, for device kernels that add them themselves."""
        ...

    def add(self, half: Half, expert: int, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        """Add adapters' products of x [n, in features] to out [n, out features]; rows are the step's tokens [n] int64,
        ascending."""
        ...


class ExpertWeights(ABC):
    """Weights of a layer's experts. `nbytes`: memory of the experts filled so far, or allocated for all. `takes_adapters`: LoRA
    adapters are supported."""

    takes_adapters: ClassVar[bool] = True
    shape: ExpertShape
    nbytes: int

    @abstractmethod
    def fill(self, half: Half, expert: int, stored: Stored) -> None:
        """Copy one expert's matrix [out, in] and bias [out], as `shape.matrix` requires. A later call replaces values; what
        `stored` lacks, such as the bias, stays. Raises ValueError for another shape, or a format that this kernel does not keep."""

    def of(self, adapters: TokenAdapters | None) -> ExpertWeights:
        """Return the experts for tokens that have the LoRA adapters `adapters`."""
        return self

    @abstractmethod
    def mix(
        self, x: Tensor, logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None, plus: Tensor | None,
        beside: Beside | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute `ops.moe`. `beside`: adapters of the experts, or None."""
