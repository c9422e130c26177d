"""Ranks that would write different values in a scope raise on every rank, and write nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy, gathered
from fsdp_compose.base.process import here

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, Twin, by_block, data, mesh_of_replicas, seeded, square, units, whole

DIFFERENT = "leave a scope of full parameters in different ways"

Edit = Callable[[Tower, int], object]


def edit_on_one_rank(model: Tower, rank: int) -> None:
    if rank == 1:
        model.head.weight[0, 0] = 7.0


def edit_by_rank(model: Tower, rank: int) -> None:
    model.blocks[1].up.bias.fill_(rank)


def draw_by_rank(model: Tower, rank: int) -> None:
    torch.manual_seed(rank)
    nn.init.orthogonal_(model.head.weight)


def replace_on_one_rank(model: Tower, rank: int) -> None:
    if rank == 0:
        model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))


def write_unseen(model: Tower, rank: int) -> None:
    model.head.weight.data[0, 0] = rank


def swap_on_one_rank(model: Tower, rank: int) -> None:
    if rank == 1:
        first, second = model.blocks[0], model.blocks[1]
        first.up.weight, second.up.weight = second.up.weight, first.up.weight


EDITS = (
    edit_on_one_rank,
    edit_by_rank,
    draw_by_rank,
    replace_on_one_rank,
    write_unseen,
    swap_on_one_rank,
)

SHARDED: dict[str, Callable[[nn.Module], object]] = {
    "sharded": by_block,
    "copied": partial(by_block, strategy=ShardingStrategy.NO_SHARD),
    "hybrid": lambda model: by_block(model, mesh=mesh_of_replicas(2, 2)),
    "replicas": lambda model: by_block(model, mesh=mesh_of_replicas(2, 1)),
}


def edit(model: Tower, body: Callable[[], object], part: nn.Module | None = None) -> None:
    with torch.no_grad(), gathered(part or model, writeback=True):
        model.blocks[0].up.bias.zero_()
        body()


def fail() -> None:
    raise LookupError("mine")


@pytest.mark.parametrize(
    ("way", "change"),
    [
        *itertools.product(("sharded", "copied", "replicas"), EDITS),
        *itertools.product(("hybrid",), (edit_on_one_rank, write_unseen)),
    ],
)
def test_different_edits_raise_on_every_rank(way: str, change: Edit) -> None:
    world = 4 if way == "hybrid" else 2

    def check(rank: int) -> str:
        twin = Twin(rank, world, Tower, SHARDED[way])
        twin.train()
        with pytest.raises(RuntimeError, match=DIFFERENT) as caught:
            edit(twin.model, lambda: change(twin.model, rank))
        twin.check()
        twin.train()
        return str(caught.value)

    texts = simulate_ranks(check, world)
    assert len(set(texts)) == 1
    name = "blocks.1.up.bias" if change is edit_by_rank else "weight"
    assert name in texts[0]
    assert "edits unit" in texts[0] or "edit unit" in texts[0], texts[0]
    assert "nothing was written" in texts[0]


@pytest.mark.parametrize("where", ["first", "blocks.0.up", "head"])
def test_ranks_of_other_meshes_write_nothing_either(where: str) -> None:
    """What differs between two ranks of one mesh is raised on all ranks that share another."""

    def check(rank: int) -> None:
        model, world = seeded(Tower), dist.group.WORLD
        pairs = mesh_of_replicas(2, 2)["shard"]
        fc.fully_shard(model.first, mesh=world)
        fc.fully_shard(model.blocks[0], mesh=pairs)
        fc.fully_shard(model.head, mesh=pairs)
        fc.fully_shard(model, mesh=world)
        before = [whole(p) for p in model.parameters()]
        bias = model.get_submodule(where)
        for failing in (False, True):
            with pytest.raises((RuntimeError, LookupError), match=rf"{DIFFERENT}|failed|mine"):
                edit(model, fail if failing and rank == 3 else lambda: bias.bias.fill_(rank // 3))
            assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before))
            with torch.no_grad():
                square(model, data(0, rank))

    simulate_ranks(check, 4)


def test_different_gradients_raise() -> None:
    """Of gradients that are written back, each rank keeps a slice too."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        weight = twin.model.head.weight

        def scale() -> None:
            weight.grad.mul_(rank + 1)

        def remove() -> None:
            if rank == 0:
                weight.grad = None

        def train() -> None:
            square(twin.model, data(1, rank)).backward()

        missing = r"(?s)no gradient.*gradient with"
        for change, text in ((scale, DIFFERENT), (remove, missing), (train, "unless it has with_")):
            with pytest.raises(RuntimeError, match=text):
                edit_gradients(twin.model, change)
        twin.step()
        twin.train()

    simulate_ranks(check)


def test_an_error_holds_no_full_tensors() -> None:
    """Else they would be held until Python collects garbage."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        gc.disable()
        try:
            with contextlib.suppress(RuntimeError):
                with gathered(model, writeback=True), torch.no_grad():
                    model.head.weight.fill_(float(rank))
                raise AssertionError("the ranks wrote in different ways")
            assert not [node for unit in units(model) for node in unit.graphs.nodes]
        finally:
            gc.enable()

    simulate_ranks(check)


def edit_gradients(model: Tower, body: Callable[[], None]) -> None:
    with gathered(model, with_grads=True, writeback=True):
        body()


def test_a_problem_on_one_rank_reaches_the_others() -> None:
    """What one rank cannot write back, it says there; the others write nothing either."""

    def check(rank: int) -> None:
        twin = Twin(rank, 3, Tower)

        def body() -> None:
            if rank == 2:
                twin.model.head.bias = nn.Parameter(torch.zeros(5))

        wanted = "was replaced by" if rank == 2 else rf"{DIFFERENT}.*error: .*was replaced by"
        with pytest.raises(RuntimeError, match=rf"(?s){wanted}"):
            edit(twin.model, body)
        twin.train()

    simulate_ranks(check, 3)


@pytest.mark.parametrize("way", SHARDED)
@pytest.mark.parametrize("failing", [{1}, {0, 1}], ids=["one", "several"])
def test_an_exception_reaches_the_other_ranks(way: str, failing: set[int]) -> None:
    """A rank whose body raised waits for nobody; the others raise too, and nothing is written."""
    world = 4 if way == "hybrid" else 2

    def check(rank: int) -> None:
        twin = Twin(rank, world, Tower, SHARDED[way])
        for _ in range(2):
            if rank in failing:
                with pytest.raises(LookupError, match="mine"):
                    edit(twin.model, fail)
            else:
                with pytest.raises(RuntimeError, match=r"rank [01] failed in"):
                    edit(twin.model, twin.model.head.weight.zero_)
            twin.train()

    simulate_ranks(check, world)


def test_an_exception_is_heard_in_the_next_gather() -> None:
    """A rank may be at a forward of another unit inside its scope when it hears of the failure."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        body = fail if rank else lambda: twin.model(twin.inputs(0)[rank])
        with pytest.raises(LookupError if rank else RuntimeError, match=r"mine|rank 1 failed in"):
            edit(twin.model, body, twin.model.blocks[0])
        twin.train()

    simulate_ranks(check)


@pytest.mark.parametrize("caught", [False, True])
def test_an_exception_inside_nested_scopes(caught: bool) -> None:
    """Inner and outer scopes end alike on every rank, whether or not one catches between them."""

    def check(rank: int) -> None:
        twin = Twin(rank, 3, Tower)
        seen = []

        def body() -> None:
            try:
                edit(twin.model, fail if rank == 2 else int, twin.model.blocks[0])
            except LookupError as error:
                seen.append(error)
                if not caught:
                    raise

        with pytest.raises((LookupError, RuntimeError)):
            edit(twin.model, body)
        assert len(seen) == (rank == 2)
        twin.train()

    simulate_ranks(check, 3)


def test_a_failure_that_is_caught_inside_the_scope() -> None:
    """Whoever catches what tells of another rank's failure writes nothing all the same."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)

        def body() -> None:
            if rank:
                fail()
            with contextlib.suppress(RuntimeError):
                twin.model(twin.inputs(0)[rank])

        with pytest.raises(LookupError if rank else RuntimeError, match=r"mine|was caught there"):
            edit(twin.model, body, twin.model.blocks[0])
        twin.train()

    simulate_ranks(check)


def test_an_exception_leaves_gathers_under_way_alone() -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        fc.prefetch_units(twin.model, twin.model.blocks[1])
        with pytest.raises(LookupError, match="mine"):
            edit(twin.model, fail, twin.model.blocks[0])
        twin.train()

    run_ranks(check)
    simulate_ranks(check)


def test_a_rank_that_fails_waits_for_nobody() -> None:
    """What it raised is seen at once, also where the others never come to the scope's end."""

    def check(rank: int) -> str:
        model = by_block(seeded(Tower))
        if rank == 0:
            with pytest.raises(LookupError, match="mine"):
                edit(model, fail)
            dist.barrier()
        else:
            with pytest.raises(RuntimeError, match="rank 0 failed in"):
                edit(model, dist.barrier)  # where rank 0 comes to after its scope
        return "went on"

    assert run_ranks(check) == ["went on"] * 2


def test_a_rank_that_dies_in_a_scope_is_missed() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        with torch.no_grad(), gathered(model, writeback=True):
            if rank == 0:
                os._exit(3)

    text = rank_errors(check)[1]
    assert text is not None and "rank 0 does not answer" in text, text


def test_a_scope_compares_once() -> None:
    """Each scope that writes compares once for each group, whatever the number of parameters."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        for writeback, wanted in ((True, 1), (False, 0)):
            here.traffic.reset()
            with torch.no_grad(), gathered(model, writeback=writeback):
                if writeback:
                    model.head.weight.zero_()
            assert here.traffic.control == wanted
        assert not whole(model.head.weight).any()

    run_ranks(check)


def test_apply_draws_as_the_first_rank_does() -> None:
    """Initialisers draw alike however ranks were seeded, and each rank's own numbers go on."""

    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.uniform_(module.weight[:1])

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        torch.manual_seed(5 + rank)
        after = torch.Generator()
        after.set_state(torch.get_rng_state())
        fc.apply(twin.model, start)
        mine = torch.rand(3)
        torch.manual_seed(5)
        twin.reference.apply(start)
        assert torch.equal(mine, torch.rand(3) if rank == 0 else torch.rand(3, generator=after))
        for plain in twin.plain:
            plain.load_state_dict(twin.reference.state_dict())
        twin.check()

    run_ranks(check)


def test_apply_compares_what_it_writes() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        before = [whole(p) for p in model.parameters()]

        def fill(module: nn.Module) -> None:
            if module is model.blocks[0].norm:
                module.weight.fill_(rank)

        with pytest.raises(RuntimeError, match=r"'blocks\.0\.norm\.weight'"):
            fc.apply(model, fill)
        assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before))

    simulate_ranks(check)
