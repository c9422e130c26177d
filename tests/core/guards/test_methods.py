"""Methods besides forward that gather their unit."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecision, fully_shard, refresh, register_forward_method, undo, wrap
from fsdp_compose.core.guards.methods import Method
from fsdp_compose.sharded import ShardedWeightError

from harness import rank_errors, run_ranks, simulate_ranks, single_process
from models import WIDTH, Block, Twin, assert_at_rest, data, seeded, units


class Coder(nn.Module):
    """A model with several ways in, whose root has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Scaled(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Encode."""
        x = self.first(x) * scale
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def generate(self, x: Tensor, steps: int = 3) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(self(x))
        return x

    def fail(self, x: Tensor) -> Tensor:
        raise KeyError("fail")

    def stream(self, x: Tensor) -> Any:
        yield self.head(x)

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return 2 * x


class Scaled(Block):
    def gain(self, x: Tensor) -> Tensor:
        return x * self.norm.weight


METHODS = ("forward", "encode", "generate", "gain", "fail")


def shard(model: nn.Module, **options: Any) -> nn.Module:
    options.setdefault("methods", METHODS)
    return fully_shard(model, units=wrap.by_class({Scaled}), **options)


def encoded(model: Any, x: Tensor) -> Tensor:
    return model.encode(x, scale=0.5).square().mean()


def both(model: Any, x: Tensor) -> Tensor:
    return encoded(model, x) + model(x).square().mean()


def generated(model: Any, x: Tensor) -> Tensor:
    return model.generate(x).square().mean()


def gained(model: Any, x: Tensor) -> Tensor:
    return model.blocks[1].gain(model.encode(x)).square().mean()


def checkpointed(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model.encode, x, use_reentrant=False).square().mean()


LOSSES = (encoded, both, generated, gained, checkpointed)


def trains(rank: int, world: int) -> None:
    for loss in LOSSES:
        Twin(rank, world, Coder, shard).train(loss)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_methods_train_as_in_one_process(world: int) -> None:
    if world == 1:
        with single_process():
            trains(0, 1)
    else:
        run_ranks(trains, world, world)


def casts(rank: int) -> None:
    policy = MixedPrecision(
        param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=True
    )
    model = shard(seeded(Coder), mp_policy=policy)
    out = model.encode(data(0, rank))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert_at_rest(model)
    assert model.head.weight.grad is None  # no rank used it
    assert_at_rest(model)


def test_inputs_and_outputs_are_cast() -> None:
    run_ranks(casts, 2)


def inference(rank: int) -> None:
    model, plain = shard(seeded(Coder)), seeded(Coder)
    x = data(0, 0)
    with torch.no_grad():
        for steps in (3, 1, 2):  # of different lengths, without a warning
            torch.testing.assert_close(model.generate(x, steps=steps), plain.generate(x, steps))
            assert_at_rest(model)
    with pytest.raises(KeyError):
        model.fail(x)
    assert_at_rest(model)
    torch.testing.assert_close(model(x), plain(x))


def test_inference_and_exceptions_leave_it_at_rest() -> None:
    run_ranks(inference, 2)


def test_nothing_of_the_module_changes() -> None:
    with single_process():
        plain, model = seeded(Coder), seeded(Coder)
        before, keys = str(model), set(vars(model))
        shard(model)
        assert type(model) is Coder and str(model) == before
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert "encode" not in vars(model.blocks[0]) and "gain" not in vars(model)
        assert isinstance(vars(model)["encode"], Method) and "forward" not in vars(model)
        assert model.encode.__doc__ == "Encode." and model.encode.__name__ == "encode"
        assert inspect.signature(model.encode) == inspect.signature(plain.encode)
        undo(model)
        assert set(vars(model)) == keys and "gain" not in vars(model.blocks[0])


def copies(rank: int) -> None:
    twin = Twin(rank, 2, Coder, shard)
    twin.model.encode = twin.model.encode  # as code that patches methods does
    copied = copy.deepcopy(twin.model)
    assert vars(copied)["encode"] is not vars(twin.model)["encode"]
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    assert not copied.encode(data(0, rank)).any()
    twin.train(encoded)
    ref = weakref.ref(copied)
    undo(copied)
    assert "encode" not in vars(copied)
    del copied
    gc.collect()
    assert ref() is None


def test_a_copy_drives_its_own_state() -> None:
    run_ranks(copies, 2)


def test_a_method_of_the_instance_is_given_back() -> None:
    with single_process():
        model = seeded(Coder)
        own = lambda x: model.head(x) + 1  # noqa: E731
        model.encode = own
        shard(model)
        x = data(0, 0)
        torch.testing.assert_close(model.encode(x), seeded(Coder).head(x) + 1)
        undo(model)
        assert vars(model)["encode"] is own


def unlisted(rank: int) -> str:
    model = shard(seeded(Coder), methods=("forward",))
    with pytest.raises(ShardedWeightError, match=r"methods=\('forward', 'encode'\)") as caught:
        model.encode(data(0, rank))
    assert "'first.weight'" in str(caught.value)
    assert_at_rest(model)
    model(data(0, rank)).sum().backward()  # forward calls it, where it is gathered
    return str(caught.value)


def test_a_method_that_is_not_listed_raises() -> None:
    """A method that is not listed raises and says so."""
    run_ranks(unlisted, 2)


@pytest.mark.parametrize(
    ("methods", "kind", "text"),
    [
        ("encode", TypeError, "wanted a sequence of names"),
        ((1,), TypeError, "wanted names"),
        (("decode",), ValueError, r"'decode', but no unit.*Coder has \[.*'encode'.*'generate'"),
        (("first",), ValueError, "no unit of this call has such a method"),
        (("state_dict",), ValueError, "nn.Module's or Python's own"),
        (("__call__",), ValueError, "nn.Module's or Python's own"),
        (("stream",), ValueError, "'stream', which is a generator"),
    ],
)
def test_wrong_methods(methods: Any, kind: type[Exception], text: str) -> None:
    with single_process():
        model = seeded(Coder)
        with pytest.raises(kind, match=text):
            shard(model, methods=methods)
        assert not units(model)


def differs(rank: int) -> None:
    shard(seeded(Coder), methods=("encode",) if rank else ())


def test_ranks_agree_on_methods() -> None:
    for error in rank_errors(differs, 2):
        assert "methods" in str(error)


def test_forward_unlisted_and_static_methods_listed() -> None:
    """Forward need not be listed and static methods may."""
    with single_process():
        model = shard(seeded(Coder), methods=("twice",))
        assert torch.equal(model.twice(torch.ones(2)), torch.full((2,), 2.0))
        model(data(0, 0)).sum().backward()
        assert_at_rest(model)


def register(model: nn.Module) -> nn.Module:
    """Sharded first, and told of its methods then."""
    fully_shard(model, units=wrap.by_class({Scaled}))
    register_forward_method(model, "encode", "generate", "forward")
    register_forward_method(model, "encode", "fail")
    for block in model.blocks:
        register_forward_method(block, "gain")
    return model


def test_methods_registered_after_sharding() -> None:
    """They train as those that fully_shard was told of, are copied, refreshed and taken back."""

    def ranks(rank: int) -> None:
        for loss in LOSSES:
            Twin(rank, 2, Coder, register).train(loss)
        model = register(seeded(Coder))
        method = vars(model)["encode"]
        register_forward_method(model, "encode")
        assert vars(model)["encode"] is method and method.__wrapped__.__func__ is Coder.encode
        assert units(model)[0].options.methods == ("encode", "generate", "fail")
        copied = copy.deepcopy(model)
        assert vars(copied)["encode"].__self__ is copied
        refresh(model)
        encoded(copied, data(0, rank)).backward()
        encoded(model, data(0, rank)).backward()
        assert_at_rest(model)
        undo(model)
        assert "encode" not in vars(model) and "gain" not in vars(model.blocks[0])
        for wrong, kind, text in (
            (
                (model, "encode"),
                ValueError,
                "Coder is not a unit.*needs the method that calls this",
            ),
            ((copied.first, "extra_repr"), ValueError, "Linear is not a unit"),
            ((copied, "encod"), ValueError, r"names 'encod'.*'encode'"),
            ((copied, "stream"), ValueError, "'stream', which is a generator"),
            ((copied, "parameters"), ValueError, "nn.Module's or Python's own"),
            ((copied, 5), TypeError, "register_forward_method: methods holds 5"),
            ((copied, ["encode"]), TypeError, "names of methods"),
        ):
            with pytest.raises(kind, match=text):
                register_forward_method(*wrong)

    run_ranks(ranks)


class Cached(nn.Linear):
    """Computes what its users call, or a number, when it is first asked for it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    @functools.cached_property
    def doubled(self) -> Callable[[Tensor], Tensor]:
        return lambda x: 2 * self(x)

    @functools.cached_property
    def size(self) -> int:
        return self.weight.numel()


def test_cached_properties_as_methods() -> None:
    """One that gives a function gathers as a method does; one that gives a number is refused."""

    def ranks(rank: int) -> None:
        plain = seeded(Cached)
        model = fully_shard(copy.deepcopy(plain), methods=("doubled",))
        x = data(0, rank)
        torch.testing.assert_close(model.doubled(x), plain.doubled(x))
        with pytest.raises(ValueError, match="no unit of this call has such a method"):
            fully_shard(seeded(Cached), methods=("size",))

    simulate_ranks(ranks)


def test_a_method_of_a_deleted_module_says_so() -> None:
    """The error names the method and what to keep."""
    with single_process():
        encode = shard(seeded(Coder)).encode
        gc.collect()
        with pytest.raises(ReferenceError, match=r"'encode' was taken from .* is gone"):
            encode(data(0, 0))


def test_a_method_taken_before_undo_works_after_it() -> None:
    """It is then the module's own method, with the same keyword arguments."""
    with single_process():
        model = shard(seeded(Coder))
        taken = model.encode
        undo(model)
        x = data(0, 0)
        torch.testing.assert_close(taken(x, scale=0.5), seeded(Coder).encode(x, scale=0.5))


def test_a_method_of_the_instance_is_copied() -> None:
    """A copy calls the copied method, on its own weights, and ``undo`` gives it that one back."""
    with single_process():
        model = seeded(Coder)
        model.encode = MethodType(lambda self, x: self.head(x), model)
        copied = copy.deepcopy(shard(model, methods=("encode",)))
        with torch.no_grad():
            for param in copied.parameters():
                param.zero_()
        assert not copied.encode(data(0, 0)).any() and model.encode(data(0, 0)).any()
        undo(copied)
        assert vars(copied)["encode"].__self__ is copied


@pytest.mark.parametrize(
    ("name", "kind"), [("wait", "a coroutine"), ("arrive", "an asynchronous generator")]
)
def test_methods_that_run_later_are_refused(name: str, kind: str) -> None:
    """Their bodies run after the call has returned, when the unit is released."""

    class Later(nn.Linear):
        async def wait(self, x: Tensor) -> Tensor:
            return self(x)

        async def arrive(self, x: Tensor) -> Any:
            yield self(x)

    with single_process(), pytest.raises(ValueError, match=f"'{name}', which is {kind}: its body"):
        fully_shard(Later(2, 2), methods=(name,))


def test_forward_itself_is_not_wrapped() -> None:
    """Modules call it with their hooks; of each unit, what else it has gathers."""

    def wrapped(model: nn.Module) -> list[list[str]]:
        found = [vars(unit.modules[0]()) for unit in units(model)]
        return [[k for k, value in values.items() if isinstance(value, Method)] for values in found]

    policy = wrap.by_class({Scaled}, methods=("forward", "gain"))
    for methods in (("forward",), ("forward", "encode", "fail")):
        model = fully_shard(Coder(), units=policy, methods=methods)
        assert wrapped(model) == [[*methods[1:]], ["gain"], ["gain"]]
    assert wrapped(fully_shard(Coder(), units=wrap.by_class({Scaled}))) == [[], [], []]
