"""Trainable parameters around sharded units that no unit has are an error that names them (D18)."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose import fully_shard
from fsdp_compose.base.process import here
from fsdp_compose.core.guards import surroundings
from fsdp_compose.optim import unaveraged_parameters

from harness import run_ranks, simulate_ranks
from models import Block, Tower, data, seeded, sgd, square


def shard_blocks(model: nn.Module, **options: object) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return model


def test_plain_siblings_of_units_are_an_error() -> None:
    """At the first backward, at clipping and at saving; not when sharded, frozen or ignored."""
    wanted = r"'first\.weight', 'first\.bias', 'head\.weight', 'head\.bias'.*fully_shard\(model\)"

    def check(rank: int, folder: str) -> None:
        model = shard_blocks(seeded(Tower))
        with torch.no_grad():
            model(data(0, rank))  # an evaluation first
        with pytest.raises(RuntimeError, match="backward: .*" + wanted):
            square(model, data(0, rank)).backward()
        with pytest.raises(RuntimeError, match="backward: .*" + wanted):
            nn.Sequential(model)(data(0, rank)).sum().backward()
        with pytest.raises(RuntimeError, match="clip_grad_norm_: .*" + wanted):
            fc.clip_grad_norm_(model, 1.0)
        for save in (fc.save_full, fc.save_checkpoint):
            with pytest.raises(RuntimeError, match=wanted):
                save(Path(folder) / "saved", model)
        fully_shard(model)
        square(model, data(0, rank)).backward()
        fc.clip_grad_norm_(model, 1.0)
        sgd(model.parameters()).step()
        frozen = shard_blocks(seeded(Tower))
        frozen.first.requires_grad_(False), frozen.head.requires_grad_(False)
        square(frozen, data(0, rank)).backward()
        told = seeded(Tower)
        shard_blocks(told, ignored=[told.first, told.head.weight, told.head.bias])
        square(told, data(0, rank)).backward()
        for param in (*told.first.parameters(), *told.head.parameters()):
            dist.all_reduce(param.grad)  # what is ignored is the caller's to average
        fc.clip_grad_norm_(told, 1.0)

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check, 2, folder=folder)


class Unsaid(nn.Module):
    """A part of a model that only a script's own loop knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_step_over_units_and_plain_parts_is_an_error() -> None:
    """No module is around the units. Not where the others are ignored, in DDP, frozen, unused, or
    a model of their own with an optimizer of its own; nor on one rank, where nothing drifts."""
    wanted = r"SGD.step\(\): .*unit '.*Linear\.weight of shape \(6, 6\).*ignored="

    def step(parts: list[nn.Module], rank: int, uses: slice = slice(None)) -> None:
        optimizer = sgd([p for part in parts for p in part.parameters()])
        for _ in range(2):
            x = data(0, rank)
            for part in parts[uses]:
                x = part(x)
            x.square().mean().backward()
            optimizer.step()

    def make(**options: object) -> list[nn.Module]:
        first, blocks = seeded(Unsaid), [seeded(Block) for _ in range(2)]
        options = {key: value(first) for key, value in options.items()}
        return [first, *(fully_shard(block, **options) for block in blocks)]

    def check(rank: int) -> None:
        parts = make()
        with pytest.raises(RuntimeError, match=wanted):
            step(parts, rank)
        optimizer = sgd(fc.local_parameters(nn.Sequential(*parts)))
        parts[1](parts[0](data(0, rank))).sum().backward()
        with pytest.raises(RuntimeError, match=wanted):
            optimizer.step()
        late = make()
        optimizer = sgd([*late[1].parameters(), *late[0].parameters()])
        late[1](data(0, rank)).sum().backward()
        optimizer.step()  # nothing was computed with the plain part yet
        late[1](late[0](data(0, rank))).sum().backward()
        with pytest.raises(RuntimeError, match=wanted):
            optimizer.step()
        step(make(ignored=lambda first: [first]), rank)
        step(make(ignored=lambda first: list(first.parameters())), rank)
        step(make(), rank, uses=slice(1, None))
        first, *blocks = make()
        step([first.requires_grad_(False), *blocks], rank)
        first, *blocks = make()
        step([nn.parallel.DistributedDataParallel(first), *blocks], rank)
        first, *blocks = make()
        own = sgd(first.parameters())
        step(blocks, rank)
        first(data(0, rank)).sum().backward()
        own.step()
        alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("each", "alone"))["alone"]
        step([seeded(Unsaid), fully_shard(seeded(Block), mesh=alone)], rank)

    run_ranks(check, 2)


def torch_in_two_calls(params: list[torch.Tensor], norm: float, **options: object) -> None:
    grads = [p.grad for p in params if p.grad is not None]
    total = nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(params, norm, total)


def test_parts_that_only_tensor_parallelism_split() -> None:
    """Nothing averages them over the ranks of the units; what is cut over those, its maker does."""
    wanted = r"Linear\.weight of shape \(6, 6\)"

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name in ("tp", "dp"):
            head = seeded(lambda: nn.Linear(6, 6))
            parallelize_module(head, mesh[name], ColwiseParallel())
            block = fully_shard(seeded(Block), mesh=mesh["dp"])
            optim = sgd([*block.parameters(), *head.parameters()])
            head(block(data(0, rank // 2))).sum().backward()
            if name == "dp":
                fc.clip_grad_norm_([*block.parameters(), *head.parameters()], 0.01)
                optim.step()
                continue
            with pytest.raises(RuntimeError, match=r"clip_grad_norm_: .*" + wanted):
                fc.clip_grad_norm_([*block.parameters(), *head.parameters()], 0.01)
            with pytest.raises(RuntimeError, match=r"SGD\.step\(\): .*" + wanted):
                optim.step()

    simulate_ranks(ranks, 4)


CLIPS = {
    "torch": nn.utils.clip_grad_norm_,
    "one by one": partial(nn.utils.clip_grad_norm_, foreach=False),
    "in two calls": torch_in_two_calls,
    "ours": fc.clip_grad_norm_,
}


@pytest.mark.parametrize("how", CLIPS)
def test_clipping_units_and_plain_parts_is_an_error(how: str) -> None:
    """Before any gradient is scaled; of ignored ones where ranks differ, as of their own experts.

    Not where nothing drifts: ignored and alike, in DDP, frozen, apart.
    """
    wanted = r"clip_grad_norm_: .*unit '.*Linear\.weight of shape \(6, 6\).*ignored="
    clip = CLIPS[how]
    kept: list[nn.Module] = []

    def gradients(rank: int, *parts: nn.Module) -> list[torch.Tensor]:
        kept.extend(parts)
        x = data(0, rank)
        for part in parts:
            x = part(x)
        x.square().sum().backward()
        return [p for part in parts for p in part.parameters()]

    def check(rank: int) -> None:
        first, block = seeded(Unsaid), fully_shard(seeded(Block))
        params = gradients(rank, first, block)
        before = [p.grad.norm() for p in params]
        with pytest.raises(RuntimeError, match=wanted):
            clip(params, 0.01)
        with pytest.raises(RuntimeError, match=wanted):
            clip(params[::-1], 0.01)
        assert before == [p.grad.norm() for p in params]
        clip(list(block.parameters()), 0.01)
        clip(list(first.parameters()), 0.01)
        first, low = seeded(Unsaid).bfloat16(), fully_shard(seeded(Block).float())
        loss = low(data(0, rank).float()).sum() + first(data(0, rank).bfloat16()).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match=wanted):  # in groups of one dtype
            clip([*first.parameters(), *low.parameters()], 0.01)
        first = seeded(Unsaid)
        clip(gradients(0, first, fully_shard(seeded(Block), ignored=[first])), 0.01)
        params = gradients(rank, first, fully_shard(seeded(Block), ignored=[first]))
        with pytest.raises(RuntimeError, match=r"with gradients of no unit.*If they are experts"):
            clip(params, 0.01)
        averaged = nn.parallel.DistributedDataParallel(seeded(Unsaid))
        for _ in range(2):
            clip(gradients(rank, averaged, fully_shard(seeded(Block))), 0.01)
        frozen = seeded(Unsaid).requires_grad_(False)
        clip(gradients(rank, frozen, fully_shard(seeded(Block))), 0.01)
        alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("each", "alone"))["alone"]
        clip(gradients(rank, seeded(Unsaid), fully_shard(seeded(Block), mesh=alone)), 0.01)

    run_ranks(check, 2)


@pytest.mark.parametrize("change", ["wrapped", "unfrozen"])
def test_plain_parts_that_are_trained_later(change: str) -> None:
    """A head around a model that was trained before, with an optimizer of its own, raises."""

    def ranks(rank: int) -> None:
        encoder, head = fully_shard(seeded(Block)), seeded(lambda: nn.Linear(6, 2))
        model = nn.Sequential(nn.Sequential(encoder), head)
        head.requires_grad_(False)
        first = model[0] if change == "wrapped" else model
        own = sgd(encoder.parameters())
        for step in range(2):
            square(first, data(step, rank)).backward()
            own.step()
        head.requires_grad_(True)
        later = sgd(head.parameters())
        square(model, data(2, rank)).backward()
        later.step()
        with pytest.raises(RuntimeError, match=r"backward: .* in no unit: '1\.weight', '1\.bias'"):
            square(model, data(3, rank)).backward()

    simulate_ranks(ranks)


@pytest.mark.parametrize("change", ["unfrozen", "exchanged", "used"])
def test_an_optimizer_whose_parameters_change(change: str) -> None:
    """It is looked through again where it has as many parameters, and others are to be trained."""

    def ranks(rank: int) -> None:
        block, head = fully_shard(seeded(Block)), seeded(lambda: nn.Linear(6, 2))
        head.requires_grad_(change == "used")
        first = block if change == "used" else nn.Sequential(block, head)
        optim = sgd([*block.parameters(), *head.parameters()])
        for step in range(2):
            square(first, data(step, rank)).backward()
            optim.step()
        if change == "unfrozen":
            head.requires_grad_(True)
        elif change == "exchanged":
            head = seeded(lambda: nn.Linear(6, 2))
            optim.param_groups[0]["params"][-2:] = head.parameters()
        head(block(data(2, rank))).sum().backward()
        with pytest.raises(RuntimeError, match=r"step\(\): .* 'Block', .* in no unit: 'Linear\."):
            optim.step()

    simulate_ranks(ranks)


def test_clipping_what_was_unfrozen_since() -> None:
    """Ranks would scale the gradients of the block by different numbers."""

    def ranks(rank: int) -> None:
        block, head = fully_shard(seeded(Block)), seeded(lambda: nn.Linear(6, 2))
        model = nn.Sequential(block, head.requires_grad_(False))
        for _ in range(2):
            square(model, data(0, rank)).backward()
            fc.clip_grad_norm_(model, 1.0)
        head.requires_grad_(True)
        square(model, data(1, rank)).backward()
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_: .* in no unit: 'Linear\.weight"):
            fc.clip_grad_norm_(model, 1.0)

    simulate_ranks(ranks)


def test_a_block_that_is_sharded_over_more_ranks() -> None:
    """It was each rank's own before, as what is trained with it still is."""

    def ranks(rank: int) -> None:
        block, head = seeded(Block), seeded(lambda: nn.Linear(6, 2))
        optim = sgd([*block.parameters(), *head.parameters()])
        for mesh in ("self", None):
            fully_shard(block, mesh=mesh)
            head(block(data(0, rank if mesh is None else 0))).sum().backward()
            if mesh is None:
                with pytest.raises(RuntimeError, match=r"in no unit: 'Linear\.weight"):
                    optim.step()
            else:
                optim.step()
                fc.undo(block)

    simulate_ranks(ranks)


def test_a_later_unit_beside_plain_parts() -> None:
    """Two units were trained together; then the second runs with a head, without the first."""

    def ranks(rank: int) -> None:
        first, second = (fully_shard(seeded(Block)) for _ in range(2))
        both = nn.Sequential(first, second)
        own = sgd(both.parameters())
        for step in range(2):
            square(both, data(step, rank)).backward()
            own.step()
        head = seeded(lambda: nn.Linear(6, 2))
        sgd(head.parameters()).step()
        other = nn.Sequential(second, head)
        with pytest.raises(RuntimeError, match=r"backward: .* in no unit: '1\.weight', '1\.bias'"):
            square(other, data(2, rank)).backward()

    simulate_ranks(ranks)


def of_one_rank() -> DeviceMesh:
    """A mesh of this rank alone, where nothing drifts."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("each", "alone"))["alone"]


def test_plain_parts_beside_units_on_one_rank() -> None:
    """No error, until another part is sharded over more ranks, whose first backward names them."""
    wanted = r"backward: .* are in no unit: '0\.inner\.weight', '0\.inner\.bias'\. "

    def ranks(rank: int) -> None:
        parts = [seeded(Unsaid), fully_shard(seeded(Block), mesh=of_one_rank()), seeded(Block)]
        model = nn.Sequential(*parts)
        model[2].requires_grad_(False)
        square(model, data(0, rank)).backward()
        fully_shard(model[2].requires_grad_(True))
        with pytest.raises(RuntimeError, match=wanted):
            square(model, data(0, rank)).backward()
        alone = nn.Sequential(seeded(Unsaid), fully_shard(seeded(Block), mesh=of_one_rank()))
        square(alone, data(0, rank)).backward()
        assert fc.clip_grad_norm_(alone, 1.0) > 0

    simulate_ranks(ranks)


class Scaled(nn.Module):
    """A part that has a parameter of its own, beside what it contains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.block = nn.Parameter(torch.ones(())), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.scale


def test_what_the_outermost_unit_ignores() -> None:
    """Units inside it, which were not told, run in a module that it contains: no error."""

    def ranks(rank: int) -> None:
        model = shard_blocks(seeded(lambda: nn.Sequential(Scaled(), nn.Linear(6, 6))))
        fully_shard(model, ignored=[model[0].scale])
        square(model, data(0, rank)).backward()
        assert not model[0].scale.grad.isnan() and model[1].weight.grad is not None

    simulate_ranks(ranks)


def test_a_model_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its gradients are clipped; so is another model, and one on two devices."""
    seen: list[nn.Module] = []
    check = surroundings.check_surroundings

    def counted(module: nn.Module, caller: str) -> None:
        seen.append(module)
        check(module, caller)

    monkeypatch.setattr(surroundings, "check_surroundings", counted)

    def ranks(rank: int) -> None:
        models = [fully_shard(seeded(Block)), fully_shard(seeded(Block))]
        for step in range(3):
            for model in models:
                square(model, data(step, rank)).backward()
                fc.clip_grad_norm_(model, 1.0)
        assert list(map(seen.count, models)) == [1, 1]
        on_two = nn.Sequential(fully_shard(seeded(Block)), seeded(Block))
        cpu = torch.device("cpu")
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(here.engines, cpu)  # as on another device
            fully_shard(on_two[1])
            for _ in range(3):
                fc.clip_grad_norm_(on_two, 1.0)
        assert seen.count(on_two) == 1

    simulate_ranks(ranks)


def test_later_backwards_look_at_no_model_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward looks through it, once for all of its units."""
    looks: dict[str, list[nn.Module]] = {"iter_units": [], "check_surroundings": []}
    for name, modules in looks.items():
        real = getattr(surroundings, name)

        def counted(module: nn.Module, *args: Any, real: Any = real, seen: Any = modules) -> Any:
            seen.append(module)
            return real(module, *args)

        monkeypatch.setattr(surroundings, name, counted)

    def ranks(rank: int) -> None:
        model = nn.Sequential(*(fully_shard(seeded(Block)) for _ in range(3)))
        square(model, data(0, rank)).backward()
        assert looks["check_surroundings"].count(model) == 1
        asked = looks["iter_units"].count(model)
        for step in range(2):
            square(model, data(step, rank)).backward()
        assert looks["iter_units"].count(model) == asked

    simulate_ranks(ranks)


def test_norms_that_nothing_compares_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators ranks compare no plain gradients, for which the host would have to wait."""
    taken: list[Any] = []
    take = torch.linalg.vector_norm

    def note(x: Any, *rest: Any, **options: Any) -> Any:
        taken.extend([] if rest or options else [x])
        return take(x, *rest, **options)

    def ranks(rank: int) -> None:
        first = seeded(Unsaid)
        block = fully_shard(seeded(Block), ignored=[first])
        block(first(data(0, 0))).square().sum().backward()
        fc.clip_grad_norm_([*first.parameters(), *block.parameters()], 0.01)

    monkeypatch.setattr(torch.linalg, "vector_norm", note)
    simulate_ranks(ranks)
    assert taken
    taken.clear()
    monkeypatch.setattr(unaveraged_parameters, "compares", lambda *_: False)
    simulate_ranks(ranks)
    assert not taken
