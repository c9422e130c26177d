"""What the user chose, as frozen values that check themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from fsdp_compose.base.arguments import check_flags, check_function, check_int, check_kind
from fsdp_compose.base.codec import GatherCodec
from fsdp_compose.layout.shards import Granularity


class ShardingStrategy(Enum):
    """Where weights live between the passes; gradients and optimizer state live with the shards.

    ======================  ==================  ===================  =====================
    strategy                weights between     shards cut over      shards copied over
                            forward, backward
    ======================  ==================  ===================  =====================
    FULL_SHARD (ZERO3)      sharded             all ranks            none
    SHARD_GRAD_OP (ZERO2)   gathered            all ranks            none
    ZERO1                   gathered, and over  all ranks            none
                            microbatches
    NO_SHARD                whole, always       none                 all ranks
    HYBRID_SHARD            sharded             ``shard`` axis       ``replicate`` axis
    HYBRID_SHARD_ZERO2      gathered            ``shard`` axis       ``replicate`` axis
    HYBRID_SHARD_OPTIMIZER  sharded             both axes            none
    ======================  ==================  ===================  =====================

    ZERO1 differs from SHARD_GRAD_OP under accumulation without gradient sync (``no_sync``): weights
    stay gathered from one microbatch to the next, as gradients stay whole.

    HYBRID_SHARD_OPTIMIZER keeps the weights that compute reads cut over the ``shard`` axis and
    copied over ``replicate``, as HYBRID_SHARD does; parameters, gradients and so the optimizer's
    state and work are cut over both. Each step adds one gather over ``replicate``, of the weights
    that the optimizer wrote, and reduce-scatters there instead of an all-reduce. It is for a
    DeviceMesh.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2), strategy=ShardingStrategy.SHARD_GRAD_OP)
    """

    FULL_SHARD = "full_shard"
    ZERO3 = FULL_SHARD
    SHARD_GRAD_OP = "shard_grad_op"
    ZERO2 = SHARD_GRAD_OP
    ZERO1 = "zero1"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    HYBRID_SHARD_OPTIMIZER = "hybrid_shard_optimizer"


@dataclass(frozen=True)
class Placement:
    """What a strategy decides, as separate choices.

    Args:
        keep_after_forward: weights stay gathered from forward to backward; None: only those of the
            outermost unit, which backward needs first.
        spread: ranks that share the weights between forward and backward, when fewer than share
            the shards.
        keep_over_microbatches: weights stay gathered while gradients are not synchronised.
        replicate_only: every rank holds whole shards.
        fused: parameters, gradients and optimizer state are cut over both axes of the mesh, while
            the weights that are gathered from are cut over the shard axis.
        axes: mesh axes the strategy is for; None where it fits both one and two.
    """

    keep_after_forward: bool | None = None
    spread: int | None = None
    keep_over_microbatches: bool = False
    replicate_only: bool = False
    fused: bool = False
    axes: int | None = None


_PLACEMENTS = {
    None: Placement(),
    ShardingStrategy.FULL_SHARD: Placement(axes=1),
    ShardingStrategy.SHARD_GRAD_OP: Placement(keep_after_forward=True, axes=1),
    ShardingStrategy.ZERO1: Placement(keep_after_forward=True, keep_over_microbatches=True, axes=1),
    ShardingStrategy.NO_SHARD: Placement(keep_after_forward=True, replicate_only=True, axes=1),
    ShardingStrategy.HYBRID_SHARD: Placement(axes=2),
    ShardingStrategy.HYBRID_SHARD_ZERO2: Placement(keep_after_forward=True, axes=2),
    ShardingStrategy.HYBRID_SHARD_OPTIMIZER: Placement(fused=True, axes=2),
}


def place(strategy: ShardingStrategy | None, reshard_after_forward: bool | int | None) -> Placement:
    """Turn ``strategy`` and ``reshard_after_forward`` into a placement.

    Raises:
        ValueError: they contradict each other.
        TypeError: one is of the wrong type.
    """
    found: Any = strategy
    if found is not None and not isinstance(found, ShardingStrategy):
        known = {str(member.value): member for member in ShardingStrategy}
        meant = known.get(str(found).lower(), ShardingStrategy.FULL_SHARD)
        raise TypeError(
            f"fully_shard: strategy is {found!r}; wanted an fsdp_compose.ShardingStrategy or "
            f"None, such as ShardingStrategy.{meant.name}."
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise TypeError(
            f"fully_shard: reshard_after_forward is {reshard_after_forward!r}; wanted a bool, a "
            "number of ranks, or None."
        )
    placement = _PLACEMENTS[strategy]
    if reshard_after_forward is None:
        return placement
    if strategy is not None and placement.fused and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"fully_shard: strategy {strategy.name} keeps weights over the shard axis, but "
            f"reshard_after_forward={reshard_after_forward} was passed; pass one of the two."
        )
    if strategy is not None and bool(reshard_after_forward) is bool(placement.keep_after_forward):
        raise ValueError(
            f"fully_shard: strategy {strategy.name} means reshard_after_forward="
            f"{not placement.keep_after_forward}, but reshard_after_forward="
            f"{reshard_after_forward} was passed; pass one of the two."
        )
    if isinstance(reshard_after_forward, bool):
        return replace(placement, keep_after_forward=not reshard_after_forward)
    return replace(placement, keep_after_forward=False, spread=reshard_after_forward)


@dataclass(frozen=True)
class Dtypes:
    """What a bucket computes, reduces and keeps its gradients in."""

    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype  # of ``.grad``
    summed: torch.dtype  # of sums over ranks, until those over the replicas are added; real


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a unit's compute and communication; the shards keep the dtype they came with.

    Args:
        param_dtype: dtype of floating-point parameters in forward and backward, and of the gather.
        reduce_dtype: dtype in which gradients travel; ``param_dtype``'s when None. They are summed
            in at least fp32 where the library sums (gloo) and end in the shard's dtype. Over the
            replicas of a hybrid mesh, the sums travel in the wider of both dtypes. In float16
            they are first divided, in float16, by a power of two near the square root of the
            number of ranks, as their sum may overflow.
        output_dtype: dtype floating-point outputs are cast to, of every unit that has the policy.
        buffer_dtype: dtype the unit's floating-point buffers are cast to, once, when sharded.
            State dicts of kind "full" and ``save_full`` have them in the dtype they had.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype``: of every unit, of none,
            or (``"root"``) of the unit that is entered from outside only.
        keep_low_precision_grads: leave ``.grad`` in the reduce dtype instead of the shard's, for
            optimizers that expect it.
        gather_codec: what travels in a gather in place of the weights in ``param_dtype``; see
            ``fsdp_compose.base.codec.GatherCodec``. For floating-point parameters alone.
        full_precision_in_eval: forwards in eval mode compute in the shards' own dtype, with buffers
            in the dtype they had; the next one in training casts them to ``buffer_dtype`` again.
        full_precision_classes: modules of these classes become units of their own that compute and
            reduce in their parameters' own dtype: what they are given is cast to it, and what they
            return to ``param_dtype``. Their buffers are not cast. Not of a policy that a function
            or a dictionary gives to some parameters.

    Example:
        >>> policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> model = fully_shard(nn.Linear(2, 2), mp_policy=policy)
        >>> model(torch.ones(1, 2)).dtype, model.weight.dtype
        (torch.bfloat16, torch.float32)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool | Literal["root"] = True
    keep_low_precision_grads: bool = False
    full_precision_in_eval: bool = False
    full_precision_classes: tuple[type[nn.Module], ...] = ()
    gather_codec: GatherCodec | None = None

    @property
    def in_full_precision(self) -> tuple[type[nn.Module], ...]:
        """``full_precision_classes``, where there is any other precision."""
        return self.full_precision_classes if self.param_dtype is not None else ()

    def __post_init__(self) -> None:
        classes: Any = self.full_precision_classes
        listed = not isinstance(classes, type | str) and isinstance(classes, Iterable)
        kinds = tuple(classes) if listed else (classes,)  # an iterator is read once
        if not listed or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in kinds):
            raise ValueError(
                f"MixedPrecision: full_precision_classes is {classes!r}; wanted a tuple of classes "
                "of modules, such as (nn.BatchNorm2d,)."
            )
        object.__setattr__(self, "full_precision_classes", kinds)
        check_flags(
            "MixedPrecision",
            keep_low_precision_grads=self.keep_low_precision_grads,
            full_precision_in_eval=self.full_precision_in_eval,
        )
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(
                    f"MixedPrecision: {name} is {dtype!r}; wanted a floating-point torch.dtype "
                    "such as torch.bfloat16, or None."
                )
        reduce = self.reduce_dtype or self.param_dtype
        if reduce is not None and reduce.itemsize < 2:
            said = reduce if self.reduce_dtype is not None else f"None, for param_dtype {reduce}"
            raise ValueError(
                f"MixedPrecision: reduce_dtype is {said}, in which gradients cannot be added up; "
                "wanted a torch.dtype of 16 bits or more, such as torch.bfloat16. To send fewer, "
                "register_comm_hook(module, Int8ErrorFeedback(), int8_error_feedback_hook)."
            )
        if self.gather_codec is not None:
            wanted = "GatherCodec(encode, decode) or None"
            check_kind("MixedPrecision", "gather_codec", self.gather_codec, GatherCodec, wanted)
        found: Any = self.cast_forward_inputs
        if not isinstance(found, bool) and found != "root":
            raise ValueError(
                f"MixedPrecision: cast_forward_inputs is {self.cast_forward_inputs!r}; wanted "
                'True, False or "root".'
            )

    def dtypes_for(self, storage: torch.dtype, replicas: int = 1) -> Dtypes:
        """What this decides for parameters kept in ``storage``.

        Args:
            replicas: ranks over which sums travel behind those between shards.
        """
        if storage.is_complex:
            return Dtypes(storage, storage.to_real(), storage, storage.to_real())
        if not storage.is_floating_point:
            return Dtypes(storage, storage, storage, storage)
        compute = self.param_dtype or storage
        reduce = self.reduce_dtype or compute
        grad = reduce if self.keep_low_precision_grads else storage
        summed = torch.promote_types(reduce, grad) if replicas > 1 else grad
        return Dtypes(compute, reduce, grad, summed)


@dataclass(frozen=True)
class FullPrecision(MixedPrecision):
    """The precision of a unit for ``full_precision_classes``; its outputs have the dtype around it.

    In a forward of eval mode for which that is full precision too, nothing is cast.
    """


MixedPrecisionLike: TypeAlias = (
    "MixedPrecision | Callable[[str, nn.Parameter], MixedPrecision | None]"
    " | Mapping[str, MixedPrecision]"
)
GranularityLike: TypeAlias = (
    "Granularity | Callable[[str, nn.Parameter], Granularity | None] | Mapping[str, Granularity]"
)


@dataclass(eq=False)
class ByName:
    """A function of (fqn, parameter) made of a mapping: the first pattern that matches decides.

    Attributes:
        option: the option of ``fully_shard`` it was passed as, for messages.
        unused: patterns that matched no parameter so far.
        seen: names it was asked about.
    """

    option: str
    table: dict[str, Any]
    unused: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tests = {name: name_pattern(name, self.option) for name in self.table}
        self.unused = set(self.table)

    def __call__(self, fqn: str, parameter: nn.Parameter) -> Any:
        self.seen.append(fqn)
        matching = [pattern for pattern, test in self.tests.items() if test(fqn)]
        self.unused.difference_update(matching)
        return self.table[matching[0]] if matching else None


def name_pattern(pattern: Any, where: str) -> Callable[[str], bool]:
    """Whether a full name matches ``pattern``; see ``wrap.by_name`` for how it is written.

    Raises:
        TypeError: ``pattern`` is not a string.
        ValueError: it cannot be read.
    """
    if not isinstance(pattern, str):
        raise TypeError(
            f'{where}: {pattern!r} is not a pattern of names; wanted a string, such as "layers.*".'
        )
    text = re.escape(pattern).replace(r"\[", "[").replace(r"\]", "]").replace(r"\-", "-")
    text = text.replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\.\*\*", r"(?:\.[^.]+)*")
    text = text.replace(r"\*\*", ".*").replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(
            f"{where}: {pattern!r} is not a pattern of names ({error}); wanted brackets that are "
            "closed, such as 'layers.[0-3]'."
        ) from None
    return lambda name: compiled.fullmatch(name) is not None


PrefetchRule: TypeAlias = Callable[[Sequence[tuple[str, int]], int], int]
"""How many of the next units to gather ahead: ``(upcoming, held) -> count``; see ``Prefetch``."""


@dataclass(frozen=True)
class Prefetch:
    """How many units are gathered ahead of use, in the order that was recorded.

    The depth is a limit: units that are gathered ahead and not used yet never exceed it, so that
    with the unit that computes ``depth + 1`` are gathered at most. It needs no wait on the host: on
    an accelerator each gather is queued behind the free of an earlier unit.

    Args:
        forward: units gathered ahead in forward.
        backward: units gathered ahead in backward.
        backward_moment: ``"pre"`` issues them before a unit's own backward, so that they overlap
            it; ``"post"`` once it is released, so that one unit less is gathered at a time; None
            never.
        rule: says how many of the units that the depth allows are gathered now; None: all of them.
            It is a function ``rule(upcoming, held)``: ``upcoming`` has a pair (unit name, bytes
            that gathering it takes) for each of those units, the next one first, and ``held`` is
            how many bytes of gathered parameters there are on the device already. Every rank must
            give the same answer, so let it depend on nothing else.

    >>> def within_a_gigabyte(upcoming, held):
    ...     return 1 if held + upcoming[0][1] <= 1 << 30 else 0
    >>> Prefetch(forward=2, rule=within_a_gigabyte).count_ahead([("layers.1", 4096)], held=4096)
    1
    """

    forward: int = 1
    backward: int = 1
    backward_moment: Literal["pre", "post"] | None = "pre"
    rule: PrefetchRule | None = field(default=None, repr=False)  # ranks compare the others by repr

    def __post_init__(self) -> None:
        for name, depth in (("forward", self.forward), ("backward", self.backward)):
            check_int("Prefetch", name, depth, 0, "how many units are gathered ahead, an int >= 0")
        if self.backward_moment not in ("pre", "post", None):
            raise ValueError(
                f"Prefetch: backward_moment is {self.backward_moment!r}; wanted 'pre', 'post' or "
                "None."
            )
        if self.rule is not None:
            check_function("Prefetch", "rule", self.rule, "(upcoming, held)")

    def count_ahead(self, upcoming: Sequence[tuple[str, int]], held: int) -> int:
        """How many of ``upcoming``, which the depth allows, are gathered now.

        Raises:
            TypeError: ``rule`` returned something else than a number of units.
        """
        if self.rule is None:
            return len(upcoming)
        count: Any = self.rule(upcoming, held)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise TypeError(
                f"Prefetch: rule returned {count!r} for the units {[u for u, _ in upcoming]}; "
                "wanted how many of them to gather now, an int >= 0."
            )
        return count


@dataclass(frozen=True)
class Offload:
    """What lives in host memory, in parameters' storage dtype, while compute runs on a device.

    Args:
        params: the shards; each gather copies this rank's slice to the device.
        optimizer: the shards and so the optimizer's state and step; a copy of the shard in the
            compute dtype stays on the device, refreshed once after each step.
        grads: sharded gradients accumulated over microbatches. Without it they are summed on the
            device and cross to the shards' memory in the last backward of a step only
            (``set_is_last_backward``).
        pin_memory: page-locked host memory, so that copies overlap compute.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2), offload_policy=Offload(params=True))
        >>> model.weight.to_local().device
        device(type='cpu')
    """

    params: bool = False
    grads: bool = False
    optimizer: bool = False
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_flags("Offload", **vars(self))

    @cached_property
    def shards(self) -> bool:
        """Whether the shards are in host memory."""
        return self.params or self.optimizer


Init: TypeAlias = Literal["verify", "broadcast", "as_is"]
INITS: tuple[Init, ...] = ("verify", "broadcast", "as_is")
