"""What a rank of an accelerator takes the others to have used, until they compare it.

The host must not wait for the device at each reduction, so a rank takes its bucket's entries for
used where some rank used them when the ranks last compared that, and hands zeros to those that it
left alone. A rank that uses others than then has a doubt, and waits when its step ends: where every
rank has one and all used the same, such as another head than before, those zeros are taken back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm.flags import Flags
from fsdp_compose.sharded import replace_grad


@dataclass(frozen=True, eq=False)
class Guess:
    """Which entries of a bucket this rank takes for used by some rank; bits by entry.

    Attributes:
        here: used by this rank.
        anywhere: assumed to be used by some rank.
        unset: assumed only, and without a gradient before.
        is_seen: a hook is told of those zeros, so that none can be taken back.
        is_doubted: it is another set than when the ranks last compared it.
    """

    bucket: weakref.ref[Bucket]
    here: int
    anywhere: int
    unset: int
    is_seen: bool
    is_doubted: bool


def make_guess(bucket: Bucket, used: Flags) -> Guess:
    """Add to ``used`` what other ranks used when last compared, of what trains still."""
    mine, known = used.bits, bucket.history.agreed
    is_doubted = known is None or known[0] != mine
    if known is not None:
        used.bits |= known[1] & used.possible
    assumed, unset, is_seen = used.bits & ~mine, 0, False
    if assumed and is_doubted:
        unit = None if bucket.users.unit is None else bucket.users.unit()
        is_seen = bool(unit is not None and unit.post_reduce_hooks) or _are_hooked(bucket, assumed)
        if bucket.history.mirror is not None:
            bucket.history.mirror.share_gradients()  # its owner may have cleared gradients
        with raw():
            for index, param in enumerate(bucket.views.params):
                unset |= (assumed >> index & 1 and get_grad(param) is None) << index
    return Guess(weakref.ref(bucket), mine, used.bits, unset, is_seen, is_doubted)


def _are_hooked(bucket: Bucket, entries: int) -> bool:
    """Whether some of the entries, which are bits, have a hook that is not removed by now."""
    flags = [entries >> index & 1 for index in range(len(bucket.entries))]
    hooks = [entry.spec.hooks for entry in compress(bucket.entries, flags)]
    return any(each.gradient or each.accumulated for each in hooks)


def sum_up(guesses: Sequence[Guess], rank: int) -> tuple[object, ...]:
    """The doubted ones, the same on ranks that all used the same, unless a hook saw zeros."""
    doubted = [(i, guess.here) for i, guess in enumerate(guesses) if guess.is_doubted]
    return (*doubted, rank if any(guess.is_seen for guess in guesses) else -1)


def take_back_zeros(guesses: Sequence[Guess]) -> None:
    """Take the zeros back of what no rank used: of the doubted ones each used what this one did."""
    zeros: dict[Bucket, int] = {}
    for guess in guesses:
        if (bucket := guess.bucket()) is not None:
            zeros[bucket] = zeros.get(bucket, 0) & ~guess.here | guess.unset
            if guess.is_doubted:
                bucket.history.agreed = guess.here, guess.here
    for bucket, unused in zeros.items():
        bucket.arriving.used &= ~unused
        flags = [unused >> index & 1 for index in range(len(bucket.entries))]
        with raw():
            for param in compress(bucket.views.params, flags):
                replace_grad(param, None)
