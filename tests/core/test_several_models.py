"""Several models in one process, in turn, in threads and inside each other's backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import Prefetch, ShardingStrategy, fully_shard, wrap

from harness import run_ranks
from models import (
    WIDTH,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    square,
    train_twin,
    two_blocks,
)


@pytest.mark.parametrize("has_root", [True, False])
def test_an_optimizer_over_a_copy_beside_another_model(has_root: bool) -> None:
    """Another model that has gradients too does not hide what the optimizer does not see (D4)."""
    other, model = by_block(Tower()), Tower()
    if has_root:
        by_block(model)
    else:
        for part in (model.first, *model.blocks, model.head):
            fully_shard(part)
    optim = torch.optim.SGD(Tower().parameters(), lr=0.1)
    for each in (other, model):
        square(each, torch.ones(2, WIDTH)).backward()
    with pytest.raises(RuntimeError, match="whose gradients it does not see"):
        optim.step()
    for each in (other, model):
        each.zero_grad()
    optim.step()  # has nothing to do, and nobody waits for it


def test_teacher_and_student_interleaved() -> None:
    """A frozen teacher runs layer by layer between the student's layers, on the same device."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Tower(2), Tower(2)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            s = t = x
            for mine, theirs in zip(self.student.blocks, self.teacher.blocks):
                s = mine(s)
                with torch.no_grad():
                    t = theirs(t)
                s = s + t * 0.1
            return self.student.head(s) - self.teacher.head(t.detach())

    train_twin(Both)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_separate_models_step_by_step() -> None:
    """GAN-like: two models, one feeding the other, updated in turn; each sharded on its own."""

    def ranks(rank: int) -> None:
        def build() -> nn.Module:
            return nn.ModuleDict(
                {"maker": Tower(1), "judge": nn.Sequential(nn.Linear(2, WIDTH), Tower(1))}
            )

        def shard(pair: nn.Module) -> None:
            by_block(pair["maker"])
            by_block(pair["judge"])

        twin = Twin(rank, 2, build, shard)
        fake = lambda m, x: m["judge"](m["maker"](x)).square().mean()  # noqa: E731
        real = lambda m, x: (m["judge"](x[:, :2]) - 1).square().mean()  # noqa: E731

        def judged(m: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                made = m["maker"](x)
            return real(m, x) + m["judge"](made).square().mean()

        def both(m: nn.Module, x: Tensor) -> Tensor:
            return real(m, x) + m["judge"](m["maker"](x).detach()).square().mean()

        for seed, forward in enumerate((judged, fake, both, fake, judged, real)):
            twin.backward(forward, seed)
            twin.step()
        twin.check()

    run_ranks(ranks)


def test_backward_inside_the_backward_of_another() -> None:
    """A tensor hook in one model's backward runs a whole training step of another's."""

    def ranks(rank: int) -> None:
        outer = Twin(rank, 2, two_blocks)
        inner = Twin(rank, 2, lambda: Tower(1), seed=1)

        def nested_step(grad: Tensor) -> None:
            with torch.enable_grad():
                inner.backward(square, 5)

        for seed in range(2):
            xs = outer.inputs(seed)
            handle = outer.model.blocks[0].register_forward_hook(
                lambda m, a, out: out.register_hook(nested_step) and None
            )
            loss = square(outer.model, xs[rank])
            handle.remove()
            loss.backward()
            torch.stack([square(m, x) for m, x in zip(outer.plain, xs)]).mean().backward()
            inner.step()
            outer.step()
        inner.check()
        outer.check()

    run_ranks(ranks)


def test_training_in_a_thread() -> None:
    """Autograd state is per thread; the library's must follow."""
    import threading

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                twin.train()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors, errors
        twin.train()

    run_ranks(ranks)


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
def test_a_frozen_model_is_released_in_grad_mode(
    strategy: ShardingStrategy | None,
) -> None:
    """A teacher called without no_grad: no backward will come that could release it."""

    def ranks(rank: int) -> None:
        teacher = by_block(Tower(2).double().requires_grad_(False), strategy=strategy)
        teacher(data(0, rank))
        assert_at_rest(teacher)

    run_ranks(ranks)


def test_a_model_beside_one_whose_ranks_differed() -> None:
    """Over a part of its mesh: what ranks sent ahead there is no answer to the other model."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()

    def ranks(rank: int) -> list[Tensor]:
        mesh = mesh_of_replicas(2, 2)
        ahead = Prefetch(forward=3)  # some ranks send more than others before they hear of it
        linears = wrap.by_class(nn.Linear)
        models = [
            fully_shard(make(), units=linears, mesh=each, prefetch=ahead)
            for each in (mesh, mesh["shard"])
        ]
        for _ in range(3):
            for model in models:
                square(model, data(0, rank)).backward()
        with pytest.raises(RuntimeError, match="ranks run different units"):
            (models[0][0] if rank == 0 else models[0])(data(0, rank)).sum().backward()
        for _ in range(2):
            for model in reversed(models):
                model.zero_grad()
                square(model, data(1, rank)).backward()
        return [p.grad.full_tensor() for p in models[0].parameters()]

    plain = make()
    square(plain, torch.cat([data(1, rank) for rank in range(4)])).backward()
    for found in run_ranks(ranks, 4, timeout=20):
        for grad, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)
