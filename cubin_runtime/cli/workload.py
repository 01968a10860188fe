"""What `run` runs: a ragged batch by its lengths, and the exact amount of work in it. Needs no torch."""

from __future__ import annotations

import math

import msgspec

from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.request import KernelRequest, MaskType

SMALL_LENGTH = 512  # tokens
SMALL_WINDOW = 64  # keys
SMALL_HEADS = 4  # query heads per kv head, and kv heads


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One call by its shapes. Sequence n has q_lens[n] queries and kv_lens[n] keys.

    request              dtypes, heads, head dims, mask and variants
    window_left          keys left of the diagonal that a row sees; -1 = all. Only for a sliding mask
    skip_softmax_factor  skip_softmax_threshold_scale_factor of the call
    """

    request: KernelRequest
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    window_left: int = -1
    return_lse: bool = False
    has_sinks: bool = False
    skip_softmax_factor: float = 0.0

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.kv_lens):
            raise InvalidArgumentError(
                f"there are {len(self.q_lens)} q lens and {len(self.kv_lens)} kv lens; expected as many"
            )
        if min(*self.q_lens, *self.kv_lens) < 0:
            raise InvalidArgumentError("a length is below 0; expected lengths of at least 0")

    @property
    def is_causal(self) -> bool:
        """Whether a row sees no key behind its diagonal."""
        return self.request.mask_type is not MaskType.DENSE

    @property
    def scale(self) -> float:
        """bmm1_scale of the call."""
        return 1 / math.sqrt(self.request.head_dim_qk)

    def visible_pairs(self, sequence: int) -> int:
        """(query row, key) pairs of a sequence that the mask lets through, for one head."""
        q_len, kv_len = self.q_lens[sequence], self.kv_lens[sequence]
        if not self.is_causal:
            return q_len * kv_len
        diagonals = range(kv_len - q_len, kv_len)
        window = self.window_left if self.window_left >= 0 else kv_len
        return sum(max(0, diagonal + 1 - max(0, diagonal - window)) for diagonal in diagonals)

    def flops(self) -> int:
        """Floating-point operations of both matrix products, over visible pairs only."""
        pairs = sum(map(self.visible_pairs, range(len(self.q_lens))))
        request = self.request
        return 2 * pairs * request.num_heads_q * (request.head_dim_qk + request.head_dim_v)

    def spell_lengths(self) -> str:
        """The lengths as text."""
        text = f"q lens {_listed(self.q_lens)}; kv lens "
        text += "the same" if self.kv_lens == self.q_lens else _listed(self.kv_lens)
        return text if self.window_left < 0 else f"{text}; window {self.window_left}"

    def shrunk(self) -> Workload:
        """The same call with lengths, heads and window cut down to what a CPU computes in a moment."""
        request = self.request
        kv_heads = min(request.num_heads_kv, SMALL_HEADS)
        group = min(request.num_heads_q // request.num_heads_kv, SMALL_HEADS)
        return msgspec.structs.replace(
            self,
            request=msgspec.structs.replace(request, num_heads_q=kv_heads * group, num_heads_kv=kv_heads),
            q_lens=tuple(min(length, SMALL_LENGTH) for length in self.q_lens),
            kv_lens=tuple(min(length, SMALL_LENGTH) for length in self.kv_lens),
            window_left=min(self.window_left, SMALL_WINDOW),
        )


def _listed(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths))
