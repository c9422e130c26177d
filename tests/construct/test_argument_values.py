"""Arguments of functions and scopes with a wrong value: an error of the library's own, at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks

import fsdp_compose as fc
from fsdp_compose.checkpoint.formats.safetensors import SAFETENSORS
from fsdp_compose.comm.transports import PAIRS

from harness import simulate_ranks


@dataclass(frozen=True)
class Wrong:
    """A call of a sharded module, the error it ends with, and a part of its text."""

    call: Callable[[Any], object]
    kind: type[Exception]
    text: str


def swapped(model: Any) -> None:
    fc.register_comm_hook(model, fc.bf16_compress_hook, None)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sgd_groups(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def tower() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))


def swapped_grid() -> Any:
    return dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "replicate"))


def grid() -> Any:
    return dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "ep"))


STATE: Any = {"state": {}, "param_groups": [{"params": ["weight"]}]}
WRONG = [
    *(Wrong(lambda m, v=v: fc.set_gradient_divide_factor(m, v), kind, "value is")
      for v, kind in (("4", TypeError), ([], TypeError), (True, TypeError),
                      (10**400, ValueError), (float("nan"), ValueError))),
    *(Wrong(lambda m, v=v: fc.clip_grad_norm_(m, v), TypeError, "max_norm is")
      for v in ("1.0", None, [1.0])),
    *(Wrong(lambda m, f=f, v=v: f(m, norm_type=v), TypeError, "norm_type is")
      for f in (fc.grad_norm, lambda m, norm_type: fc.clip_grad_norm_(m, 1.0, norm_type))
      for v in ("inf", None)),
    *(Wrong(lambda m, v=v: fc.grad_norm(m, v), ValueError, "norm_type is nan; wanted")
      for v in (float("nan"), torch.tensor(torch.nan))),
    Wrong(lambda m: fc.grad_norm(m, expert_mesh="ep"), TypeError, "expert_mesh is 'ep'"),
    *(Wrong(lambda m, a=a: fc.grad_norm(m, **{a: grid()}), ValueError,
            f"{a} is a mesh of 2 dimensions, ('pp', 'ep'); wanted a DeviceMesh or process group")
      for a in ("expert_mesh", "pipeline_mesh")),
    *(Wrong(lambda m, v=v: fc.grad_norm(list(map(v, m.parameters()))), TypeError,
            "has what 'weight' (unit 'Linear') holds or its gradient; wanted a module")
      for v in (lambda p: p.grad, lambda p: p.detach())),
    Wrong(lambda m: fc.grad_norm(m, pipeline_mesh=2), TypeError, "pipeline_mesh is 2"),
    *(Wrong(lambda m, f=f, v=v: f(v(m)), TypeError, "module_or_params")
      for f in (fc.grad_norm, lambda params: fc.clip_grad_norm_(params, 1.0))
      for v in (lambda m: [m], lambda m: m.named_parameters(), lambda m: nn.Linear)),
    *(Wrong(lambda m, v=v: fc.register_comm_hook(m, None, v), TypeError, "(state, grads)")
      for v in (nn.Linear, lambda state: None, "bf16")),
    Wrong(lambda m: fc.register_comm_hook(m, None, torch_hooks.bf16_compress_hook), TypeError,
          "gradients of DDP or FSDP1; wanted a hook of fsdp_compose"),
    Wrong(lambda m: m.weight.__setitem__((slice(None), 0), 1.0), fc.ShardedWeightError,
          "gathered(module):` (writeback=True to write it"),
    Wrong(swapped, TypeError, "hook is None, which restores the default, and state is a function"),
    *(Wrong(lambda m, v=v: fc.register_post_reduce_hook(m, v), TypeError, "(module, parameters)")
      for v in (None, lambda module: None)),
    Wrong(lambda m: fc.Int8ErrorFeedback(0), ValueError, "block is 0"),
    Wrong(lambda m: fc.Int8ErrorFeedback("x"), TypeError, "block is 'x'"),
    *(Wrong(lambda m, f=f, v=v: f(m, v(m)), TypeError, text)
      for f in (fc.set_forward_prefetch, fc.set_backward_prefetch)
      for v, text in ((lambda m: m, "modules is a Linear"), (lambda m: ["0"], "module is '0'"))),
    Wrong(lambda m: fc.prefetch_units(m, None), TypeError, "modules is None"),
    Wrong(lambda m: fc.optim_state_dict(m, None), TypeError, "got a NoneType"),
    Wrong(lambda m: fc.load_optim_state_dict(m, None, {}), TypeError, "got a NoneType"),
    *(Wrong(lambda m, f=f: f(None, m), TypeError, "path is None; wanted a path")
      for f in (fc.save_checkpoint, fc.load_checkpoint, fc.save_full, fc.load_full)),
    *(Wrong(lambda m, f=f: f("", m), ValueError, "path is ''; wanted a path")
      for f in (fc.save_checkpoint, fc.load_checkpoint, fc.save_full, fc.load_full)),
    *(Wrong(lambda m, p=p: fc.save_checkpoint(p, m), ValueError, "a URL; wanted a path in a file")
      for p in ("s3://bucket/run", "hf://a", Path("gs://bucket/run"))),
    *(Wrong(lambda m, f=f, p=p: f(p, m), ValueError, "only a shell knows what '~' is; wanted '/")
      for f in (fc.save_checkpoint, fc.load_full) for p in ("~/run", Path("~"))),
    *(Wrong(lambda m, f=f, v=v: f("never", m, timeout=v), kind, f"timeout is {v!r}; wanted seconds")
      for f in (fc.save_checkpoint, fc.load_checkpoint, fc.save_full, fc.load_full)
      for v, kind in (("x", TypeError), (-1, ValueError), (0, ValueError))),
    *(Wrong(lambda m, f=f: f("never", m, process_group="x"), TypeError, "process_group is 'x'")
      for f in (fc.save_checkpoint, fc.load_checkpoint, fc.save_full, fc.load_full)),
    *(Wrong(lambda m, f=f: f("never", m, format="pt"), TypeError, "format is 'pt'; wanted a fsdp_")
      for f in (fc.save_full, fc.load_full)),
    *(Wrong(lambda m, f=f, a=a: f("never", m, **{a: "no"}), TypeError, f"{a} is 'no'; wanted True")
      for f, a in ((fc.save_checkpoint, "asynchronous"), (fc.save_checkpoint, "checksum"),
                   (fc.load_checkpoint, "strict"), (fc.load_checkpoint, "verify_files"),
                   (fc.load_full, "strict"), (fc.load_full, "verify_files"))),
    Wrong(lambda m: fc.save_full("never", m, max_file_bytes="5GB"), TypeError, "wanted a number"),
    *(Wrong(lambda m, f=f, a=a: f(m, **{a: []}), TypeError, f"{a} is []; wanted True or False")
      for f in (fc.state_dict, partial(fc.set_state_dict_type, kind="full"),
                lambda m, **options: fc.optim_state_dict(m, sgd(m), **options))
      for a in ("cpu_offload", "rank0_only")),
    *(Wrong(lambda m, a=a: fc.load_state_dict(m, m.state_dict(), **{a: "no"}), TypeError, a)
      for a in ("strict", "broadcast_from_rank0")),
    Wrong(lambda m: fc.load_optim_state_dict(m, sgd(m), {}, broadcast_from_rank0=1), TypeError,
          "broadcast_from_rank0 is 1; wanted True or False"),
    *(Wrong(lambda m, v=v: fc.owner_step(v(m), sgd_groups), TypeError, "owner_step: params")
      for v in (lambda m: m, lambda m: m.weight, lambda m: None, lambda m: ["weight"],
                lambda m: [{"lr": 0.1}])),
    *(Wrong(lambda m, v=v: fc.owner_step([m.weight], sgd_groups).owner_of(v(m)), ValueError,
            "; wanted a parameter of this optimizer") for v in (lambda m: m.bias, lambda m: None)),
    Wrong(lambda m: fc.owner_step([], sgd_groups), ValueError, "params is empty; wanted sharded"),
    *(Wrong(lambda m, v=v: fc.owner_step([m.weight], v), TypeError, "make is")
      for v in (None, lambda: None)),
    *(Wrong(lambda m, v=v: fc.owner_step([m.weight], sgd_groups, work=v), TypeError, text)
      for v, text in ((3, "work is 3; wanted a function of (shape)"),
                      (lambda shape: None, "what work returned is None; wanted a number"))),
    Wrong(lambda m: fc.plan(nn.Linear(2, 2), world_size=2, ignored=nn.Linear), TypeError,
          "plan: ignored is a type; wanted a sequence"),
    Wrong(lambda m: fc.fully_shard(nn.Linear(2, 2), mesh=torch.ones(2)), TypeError, "mesh is"),
    Wrong(lambda m: fc.fully_shard(tower(), units=list(tower())), TypeError, "units is a list; wa"),
    Wrong(lambda m: fc.fully_shard(tower(), mp_policy=torch_fsdp.MixedPrecision(torch.float16)),
          TypeError, "mp_policy is a MixedPrecision; wanted fsdp_compose.MixedPrecision("),
    Wrong(lambda m: fc.fully_shard(nn.Linear(2, 2), mesh=swapped_grid()), ValueError,
          "mesh has dimensions ('shard', 'replicate'); wanted (replicate, shard)"),
    Wrong(lambda m: list(fc.iter_full(m, device=[])), TypeError, "device is []; wanted a torch.de"),
    Wrong(lambda m: fc.seeded_init(m, 0, "x"), TypeError, "init is 'x'; wanted a function"),
    Wrong(lambda m: fc.wrap.by_name("layers.["), ValueError, "is not a pattern of names"),
    *(Wrong(lambda m, v=v: fc.fully_shard(nn.Linear(2, 2), mesh=v), TypeError, "mesh is (")
      for v in ((0, 1), ("dp", "tp"), ())),
    Wrong(lambda m: fc.explain(m, "x"), TypeError, "optimizer is 'x'"),
    *(Wrong(lambda m, f=f: f("x", "x.svg"), TypeError, "is 'x'; wanted a")
      for f in (fc.plot_memory, fc.plot_timeline, fc.plot_shards, fc.plot_plan)),
    Wrong(lambda m: fc.plot_shards(m, 3), TypeError, "path is 3; wanted a path"),
    Wrong(lambda m: fc.trace_execution_order(nn.Linear(2, 2), config="x"), TypeError,
          "config is 'x'; wanted TracingConfig(...)"),
    Wrong(lambda m: fc.apply(m, None), TypeError, "fn is None; wanted a function of (module)"),
    Wrong(lambda m: list(fc.iter_full(m, "x")), TypeError, "bucket_bytes is 'x'"),
    Wrong(lambda m: list(fc.iter_full(m, dtype="float32")), TypeError, "dtype is 'float32'"),
    *(Wrong(lambda m, v=v: fc.seeded_init(m, v), TypeError, f"seed is {v!r}; wanted an integer")
      for v in ("x", None, 1.5)),
    *(Wrong(lambda m, v=v: fc.rekey_optim_state_dict(v, "name", m), TypeError,
            "rekey_optim_state_dict: state_dict ")
      for v in (None, {}, {"state": {}}, {"state": {}, "param_groups": [{}]})),
    Wrong(lambda m: fc.rekey_optim_state_dict(STATE, "id", "x"), TypeError, "module is 'x'"),
    *(Wrong(lambda m, v=v: fc.declare_tensor_parallel(v, dist.group.WORLD, 0), TypeError,
            "declare_tensor_parallel: params is") for v in (None, nn.Linear(2, 2), 3)),
    Wrong(lambda m: fc.declare_tensor_parallel(nn.Linear(2, 2).weight, dist.group.WORLD, True),
          TypeError, "dim is True; wanted the dimension"),
    *(Wrong(lambda m, v=v: fc.register_comm_hook(m, v, fc.int8_error_feedback_hook), TypeError,
            "; wanted Int8ErrorFeedback()") for v in (None, {}, 256)),
    Wrong(lambda m: fc.Int8ErrorFeedback(True), TypeError, "block is True; wanted a number"),
    Wrong(lambda m: fc.plot_plan(fc.plan(m), "never", 3), TypeError, "measured is 3; wanted a rec"),
    Wrong(lambda m: fc.Timeline().save(None), TypeError, "Timeline.save: path is None; wanted a p"),
    Wrong(lambda m: list(fc.iter_full(m, device="x")), ValueError, "device is 'x'; wanted a torch"),
    Wrong(lambda m: list(fc.iter_full(m, device=True)), TypeError, "device is True; wanted a torc"),
    *(Wrong(lambda m, v=v: list(fc.iter_full(m, v)), ValueError, f"bucket_bytes is {v}; wanted")
      for v in (float("nan"), -1)),
    *(Wrong(lambda m, v=v: fc.plan(v), TypeError, "plan: got") for v in (None, [], [nn.Linear])),
    *(Wrong(lambda m, v=v: fc.clip_grad_norm_(m, v), ValueError, f"max_norm is {v}; wanted")
      for v in (-1.0, float("nan"))),
    *(Wrong(lambda m, v=v: fc.save_full("never", m, max_file_bytes=v), ValueError,
            f"max_file_bytes is {v}; wanted") for v in (0, -1, float("nan"))),
    *(Wrong(lambda m, v=v: fc.owner_step([m.weight], sgd_groups, work=lambda shape: v), ValueError,
            f"what work returned is {v}; wanted a number, 0 or more and finite")
      for v in (float("nan"), float("inf"), -1)),
    Wrong(lambda m: fc.Transport(None, None, None, None), TypeError,
          "Transport: gather is None; wanted a function of (whole, parts, own, call)"),
    Wrong(lambda m: replace(PAIRS, offer=lambda data: ()), TypeError, "wanted a function of (data"),
    Wrong(lambda m: fc.Format(None, None, None), TypeError, "Format: suffix is None; wanted"),
    Wrong(lambda m: fc.Format(".pt", None, None), TypeError, "Format: write is None; wanted"),
    Wrong(lambda m: replace(SAFETENSORS, read=lambda: None), TypeError, "a function of (path"),
    *(Wrong(lambda m, v=v: fc.GatherCodec(*v), TypeError, "; wanted a function of (")
      for v in ((lambda: None, print), (lambda shard: shard, lambda encoded: None))),
]  # fmt: skip


def check(model: nn.Module, wrong: Wrong) -> None:
    with pytest.raises(Exception) as raised:
        wrong.call(model)
    found = f"{raised.type.__name__}: {raised.value}"
    assert raised.type is wrong.kind and wrong.text in found, (found, wrong.text)


def test_wrong_values_are_refused_at_once() -> None:
    """On every rank; gradients, hooks and switches are as before, and nothing was written."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = fc.fully_shard(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        unit = fc.get_state(model).unit
        fc.register_comm_hook(model, None, fc.default_hook)
        switches, before = vars(unit.switches).copy(), model.weight.grad.full_tensor()
        for wrong in WRONG:
            check(model, wrong)
        assert vars(unit.switches) == switches and not unit.post_reduce_hooks
        assert unit.expected.forward_list is None and not Path("never").exists()
        assert fc.get_state_dict_type(model).kind == "sharded"
        assert torch.equal(model.weight.grad.full_tensor(), before)

    simulate_ranks(ranks, 2)


def test_numbers_may_be_tensors() -> None:
    """As those that a schedule computes: 0-dim tensors, and integers."""
    model = fc.fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    norm = fc.grad_norm(model)
    fc.clip_grad_norm_(model, norm / 2, norm_type=2)
    assert torch.allclose(fc.grad_norm(model), norm / 2)
    fc.clip_grad_norm_(model, torch.inf)
    assert torch.allclose(fc.grad_norm(model), norm / 2)
    fc.clip_grad_norm_(model, 0)
    assert fc.grad_norm(model) == 0
    fc.set_gradient_divide_factor(model, torch.tensor(2.0))
    assert fc.get_state(model).unit.switches.divide_factor == 2.0


def test_arguments_of_simulations() -> None:
    """``simulate``, before a rank starts; the dimension of tensor parallelism, in one."""
    size: Any
    for size in ("2", 2.0, None, True):
        with pytest.raises(TypeError, match=r"simulate: world_size is .*; wanted the number of"):
            fc.simulate(int, size)
    wrong: Any = "x"
    with pytest.raises(TypeError, match="simulate: seed is 'x'; wanted an int"):
        fc.simulate(int, 2, seed=wrong)
    with pytest.raises(TypeError, match="simulate: seed is True; wanted an int"):
        fc.simulate(int, 2, seed=True)
    with pytest.raises(ValueError, match=f"simulate: seed is {2**70}; wanted an int from"):
        fc.simulate(int, 2, seed=2**70)
    with pytest.raises(TypeError, match="simulate: faults is 'x'; wanted a list of faults"):
        fc.simulate(int, 2, faults=wrong)
    with pytest.raises(TypeError, match="simulate: an item of faults is 'x'; wanted a fault"):
        fc.simulate(int, 2, faults=[wrong])
    with pytest.raises(TypeError, match="simulate: fn is 'x'; wanted the program of one rank"):
        fc.simulate(wrong, 2)

    def declare(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(TypeError, match="dim is 'x'; wanted the dimension that is split"):
            fc.declare_tensor_parallel(nn.Linear(2, 2).weight, mesh["tp"], dim=wrong)

    simulate_ranks(declare, 2)
