"""The default device of the caller decides where the caller's tensors are, and nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import fsdp_compose as fc

from harness import run_ranks, simulate_ranks, single_process
from models import Block, data, seeded, square, two_blocks, whole


def test_sharding_while_the_default_is_meta() -> None:
    """A model is built and sharded on the meta device, by nested calls, and written afterwards."""

    def build(rank: int) -> list[float]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
            for module in (model[0], model[1], model):
                fc.fully_shard(module)
        model.to_empty(device="cpu")
        fc.apply(model, lambda m: isinstance(m, nn.Linear) and m.reset_parameters())
        with fc.gathered(model, writeback=True):
            for param in model.parameters():
                param.fill_(1.0)
        model(torch.full((2, 3), rank + 1.0)).sum().backward()
        return whole(model[0].weight.grad)[0].tolist()

    for world in (2, 3):
        assert run_ranks(build, world) == [[world + 1.0] * 3] * world


def train(rank: int, folder: Path, scope) -> list[float]:
    """Numbers from steps, scopes and checkpoints that were made under a default device."""
    model, seen = seeded(two_blocks), []
    inputs = [data(step, rank) for step in range(6)]
    with scope():
        fc.fully_shard(model, units=fc.wrap.by_class({Block}))
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step, x in enumerate(inputs[:2]):
            square(model, x).backward()
            seen.append(fc.clip_grad_norm_(model, 0.1).item())
            optim.step()
            optim.zero_grad()
            with fc.skippable_step(model) as attempt:
                loss = square(model, inputs[2 + step])
                assert attempt.check(loss) and attempt.check(1.0)
                loss.backward()
            with fc.no_sync(model):
                square(model, inputs[4 + step]).backward()
            fc.reduce_grads(model)
            optim.step()
            optim.zero_grad()
        fc.verify_replicas(model)
        fc.save_checkpoint(folder / "sharded", model, optim)
        fc.load_checkpoint(folder / "sharded", model, optim)
        fc.save_full(folder / "full.safetensors", model)
        fc.load_full(folder / "full.safetensors", model)
        fc.load_optim_state_dict(model, optim, fc.optim_state_dict(model, optim))
        fc.undo(model)
    return seen + [param.sum().item() for param in model.parameters()]


def test_training_while_the_default_is_meta(tmp_path: Path) -> None:
    """Steps, scopes and checkpoints of a model on the CPU give the numbers that they give alone."""
    for name, run in (("simulated", simulate_ranks), ("real", run_ranks)):
        plain = run(train, 2, tmp_path / name / "plain", nullcontext)
        ambient = run(train, 2, tmp_path / name / "meta", lambda: torch.device("meta"))
        torch.testing.assert_close(torch.tensor(ambient), torch.tensor(plain))


def test_one_process_while_the_default_is_meta(tmp_path: Path) -> None:
    """The same without a process group."""
    with single_process():
        plain = train(0, tmp_path / "plain", nullcontext)
        ambient = train(0, tmp_path / "meta", lambda: torch.device("meta"))
    torch.testing.assert_close(ambient, plain)
