"""Threads, forked workers, tracing and sparse gradients: each works or is one clear error."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, Dataset

import fsdp_compose as fc
from fsdp_compose import fully_shard
from fsdp_compose.sharded import ShardedWeightError

from harness import run_ranks, single_process
from models import WIDTH, Tower, assert_at_rest, by_block, data, seeded, square


def test_a_second_thread_is_refused() -> None:
    """A second thread is refused and the first goes on."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        wanted = square(model, data(0, rank))
        errors: list[BaseException] = []

        def other() -> None:
            try:
                model(data(1, rank))
            except BaseException as error:
                errors.append(error)

        def interrupt(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            thread = threading.Thread(target=other)
            thread.start(), thread.join()

        handle = model.blocks[1].up.register_forward_pre_hook(interrupt)
        loss = square(model, data(0, rank))
        handle.remove()
        assert torch.equal(loss, wanted) and "second thread" in str(errors[0])
        loss.backward()
        assert_at_rest(model)
        thread = threading.Thread(target=other)
        thread.start(), thread.join()
        assert len(errors) == 1  # one after the other is fine

    run_ranks(check, 2)


def test_a_forward_beside_a_backward_is_refused() -> None:
    """Of another model too; the backward in the first thread goes on to the right gradients."""

    def check(rank: int) -> None:
        model, other = by_block(seeded(Tower)), by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        wanted = [param.grad.full_tensor() for param in model.parameters()]
        model.zero_grad()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                other(data(1, rank))
            except BaseException as error:
                errors.append(error)

        def interrupt(grad: Tensor) -> None:
            thread = threading.Thread(target=run)
            thread.start(), thread.join()

        x = data(0, rank).requires_grad_()
        middle = model.blocks[1].up.register_forward_hook(
            lambda module, args, output: output.register_hook(interrupt) and None
        )
        loss = square(model, x)
        middle.remove()
        loss.backward()
        assert "while a backward runs in another" in str(errors[0])
        for param, grad in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(param.grad.full_tensor(), grad)
        interrupt(x)
        assert len(errors) == 1  # one after the other is fine

    run_ranks(check, 2)


class Fitting(nn.Module):
    """Runs a backward in its forward, in a thread of its own as that of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, run: Callable[[Tensor], None]) -> Tensor:
        run(self.layer(x).square().sum())
        return self.layer(x)


def test_a_step_in_a_backward_on_what_a_forward_reads() -> None:
    """Hooks run in autograd's thread of a device, on whose stack the forward is not."""

    def check(rank: int) -> None:
        model, errors = fully_shard(seeded(Fitting)), list[BaseException]()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)

        def run(loss: Tensor) -> None:
            try:
                loss.backward()
            except BaseException as error:
                errors.append(error)

        def elsewhere(loss: Tensor) -> None:
            thread = threading.Thread(target=run, args=(loss,))
            thread.start(), thread.join()

        hook = fc.register_post_reduce_hook(model, lambda *args: optim.step())
        for way in (run, elsewhere):
            with contextlib.suppress(RuntimeError):  # of what the failed backward left
                model(data(0, rank), way)
            assert "inside the forward of unit 'Fitting'" in str(errors.pop())
        hook.remove()
        model.zero_grad()
        model(data(0, rank), elsewhere).sum().backward()
        optim.step()
        assert not errors
        assert_at_rest(model)

    run_ranks(check, 2)


class Samples(Dataset[Tensor]):
    """A data set that uses a sharded model in the worker."""

    def __init__(self, model: nn.Module, use: Callable[[nn.Module], Tensor]) -> None:
        self.model, self.use = model, use

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return self.use(self.model).detach()


USES: list[Callable[[nn.Module], Tensor]] = [
    lambda model: model(torch.ones(1, WIDTH).double()),
    lambda model: model.head.weight.norm(),
    lambda model: model.head.weight.full_tensor(),
    lambda model: fc.state_dict(model)["head.bias"],
]


def test_workers_of_a_data_loader_are_refused() -> None:
    """Forked: no use that needs other ranks reaches them. Spawned: it does not pickle."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        for use in USES:
            loader = DataLoader(Samples(model, use), num_workers=1, multiprocessing_context="fork")
            with pytest.raises(RuntimeError, match=r"process that was forked off.*plain model"):
                list(loader)
        loader = DataLoader(Samples(model, len), num_workers=1, multiprocessing_context="spawn")
        with (
            pytest.raises(ShardedWeightError, match=r"spawned worker.*state_dict"),
            pytest.warns(UserWarning, match="pickle error"),
        ):
            list(loader)
        square(model, data(0, rank)).backward()
        assert model.head.weight.norm() > 0

    run_ranks(check, 2)


def test_script_and_export_take_a_plain_model() -> None:
    """Also with a plain module around the units, and in ``gathered``, where compiling works."""

    def check(rank: int) -> None:
        x, plain = data(0, rank), seeded(Tower)
        model = by_block(copy.deepcopy(plain))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.15
            for around in (model, nn.Sequential(model), copy.deepcopy(model)):
                with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot.*undo"):
                    torch.jit.script(around)
            for part in (model, model.head):
                with pytest.raises(ShardedWeightError, match=r"torch\.export needs.*undo"):
                    torch.export.export(part, (x,))
            with fc.gathered(model):
                for part in (model, model.head):
                    with pytest.raises(ShardedWeightError, match=r"torch\.export needs.*undo"):
                        torch.export.export(part, (x,))
                compiled = torch.compile(model.head, backend="eager")(x)
            assert torch.equal(compiled, plain.head(x))
            outside = nn.Module()
            outside.forward = lambda x: model(x)
            with pytest.raises(RuntimeError, match=r"'Tower': torch\.export cannot.*undo"):
                torch.export.export(outside, (x,))
            square(model, x).backward()
            assert_at_rest(model)
            alone = fc.undo(copy.deepcopy(model))
            assert torch.equal(torch.jit.script(alone.head)(x), plain.head(x))
            assert torch.equal(torch.export.export(alone, (x,)).module()(x), plain(x))

    run_ranks(check, 2)


def test_tensors_that_cannot_be_cut_are_refused() -> None:
    """As torchao's: state of its optimizers, and weights that it quantized in a scope."""

    def check(rank: int) -> None:
        class Quantized(Tensor):
            @staticmethod
            def __new__(cls, shape: Any) -> Any:
                return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float64)

            @classmethod
            def __torch_dispatch__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                assert func is torch.ops.aten.detach.default, "its data was read"
                return args[0]

        class AdamW8bit(torch.optim.SGD):
            __module__ = "torchao.optim.adam"

        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        weight = model.head.weight
        with torch.no_grad():
            for call in (lambda state: weight.lerp(state, 0.5), weight.mul, weight.clone().add_):
                with pytest.raises(ShardedWeightError, match="a Quantized, which cannot be cut"):
                    call(Quantized(weight.shape))
        with pytest.raises(RuntimeError, match=r"AdamW8bit.*'first\.weight'.*local_parameters"):
            AdamW8bit(model.parameters(), lr=0.1).step()
        AdamW8bit(fc.local_parameters(model), lr=0.1).step()
        with (
            pytest.raises(RuntimeError, match=r"'head\.weight'.*replaced by a Quantized"),
            fc.gathered(model, writeback=True),
        ):
            model.head.weight = nn.Parameter(Quantized(weight.shape), False)
        square(model, data(0, rank)).backward()

    run_ranks(check, 2)


def test_a_forked_process_and_a_trace_are_refused() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        child = os.fork()
        if child == 0:
            try:
                model(data(0, rank))
            except RuntimeError as error:
                os._exit(7 if "forked off" in str(error) and "worker" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.15
            with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot record"):
                torch.jit.trace(model, data(0, rank))
        square(model, data(0, rank)).backward()
        table = nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 2))
        with pytest.raises(ValueError, match=r"'0' with sparse=True.*ignored="):
            fully_shard(table)
        with pytest.raises(ValueError, match=r"unit '0' is an embedding with sparse=True"):
            fully_shard(table, units=fc.wrap.by_class(nn.Embedding))

    run_ranks(check, 2)


def test_threads_may_overlap_in_a_scope() -> None:
    """Forwards inside ``gathered`` send nothing: each ends as it began, in whichever order."""

    def check(rank: int) -> None:
        plain = seeded(Tower)
        model = by_block(copy.deepcopy(plain))
        begun, ended = threading.Event(), threading.Event()
        outputs: list[Tensor] = []

        def other() -> None:
            with torch.no_grad():
                outputs.append(model(data(1, rank)))

        def wait(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if threading.current_thread() is thread:
                begun.set()
                assert ended.wait(10)

        thread = threading.Thread(target=other)
        with fc.gathered(model):
            handle = model.blocks[1].up.register_forward_pre_hook(wait)
            thread.start()
            assert begun.wait(10)
            wanted = plain(data(0, rank))
            assert torch.equal(model(data(0, rank)), wanted)
            ended.set()
            thread.join()
            handle.remove()
        assert torch.equal(outputs[0], plain(data(1, rank)))
        square(model, data(0, rank)).backward()
        assert_at_rest(model)

    run_ranks(check, 2)


def run_fake(model: nn.Module, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))


def record(model: nn.Module, x: Tensor) -> None:
    make_fx(lambda x: model(x))(x)


@pytest.mark.parametrize("kept", [False, True], ids=["released", "kept"])
@pytest.mark.parametrize("run", [run_fake, record])
def test_modes_that_record_are_refused(
    run: Callable[[nn.Module, Tensor], None], kept: bool
) -> None:
    """Weights that were gathered ahead would be fakes, and a graph would keep released memory."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()  # the order is known, to gather ahead
        model.zero_grad()
        if kept:
            model(data(0, rank))  # without a backward
        with pytest.raises(RuntimeError, match=r"'Tower': forward was called under (Fake|make_fx)"):
            run(model, data(0, rank))
        wanted, plain = square(model, data(0, rank)), seeded(Tower)
        torch.testing.assert_close(wanted, square(plain, data(0, rank)))
        tensors = dict(plain.named_parameters())
        call = make_fx(lambda x: functional_call(model, tensors, (x,)))(data(0, rank))
        torch.testing.assert_close(call(data(1, rank)), plain(data(1, rank)))

    run_ranks(check, 2)


def write_all(model: nn.Module, saved: dict[str, Tensor]) -> None:
    with torch.no_grad(), fc.gathered(model, writeback=True):
        model.first.weight.zero_()


CALLS: dict[str, Callable[[nn.Module, dict[str, Tensor]], object]] = {
    "unshard": lambda m, _: fc.unshard(m.blocks[0]),
    "gathered": write_all,
    "copy_": lambda m, saved: m.first.weight.data.copy_(torch.zeros_like(saved["first.weight"])),
    "full_tensor": lambda m, _: m.first.weight.full_tensor(),
    "state_dict": lambda m, _: fc.state_dict(m, kind="full"),
    "load_state_dict": fc.load_state_dict,
    "iter_full": lambda m, _: list(fc.iter_full(m)),
    "undo": lambda m, _: fc.undo(m),
    "refresh": lambda m, _: fc.refresh(m),
    "norm": lambda m, _: fc.grad_norm(m),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_sent_where_tensors_are_faked(name: str) -> None:
    """A rank would wait for what was never sent, or take memory that nobody filled for weights."""

    def check(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        square(model, data(0, rank)).backward()
        saved = plain.state_dict()
        with FakeTensorMode(allow_non_fake_inputs=True):
            with pytest.raises(RuntimeError, match="under FakeTensorMode"):
                CALLS[name](model, saved)
        assert_at_rest(model)
        model.zero_grad()
        wanted = square(plain, data(0, rank))
        torch.testing.assert_close(square(model, data(0, rank)), wanted)

    run_ranks(check, 2, timeout=20.0)


@pytest.mark.parametrize("name", ["unshard", "gathered"])
def test_one_rank_gathers_nothing_faked(name: str) -> None:
    """It sends nothing either: what it copies into a buffer would not be there."""
    with single_process():
        low = fc.MixedPrecision(param_dtype=torch.bfloat16)
        model = by_block(seeded(Tower), mp_policy=low)
        wanted = square(model, data(0, 0))
        wanted.backward()
        with FakeTensorMode(allow_non_fake_inputs=True):
            with pytest.raises(RuntimeError, match="under FakeTensorMode"):
                CALLS[name](model, {})
        assert_at_rest(model)
        assert torch.equal(square(model, data(0, 0)), wanted)
