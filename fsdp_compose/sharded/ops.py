"""Which torch functions mean the same on a slice as on the whole, as tables of functions.

Every table is a list of names resolved once; a name this torch does not have is left out. What is
in no table is refused on sharded tensors, so a new torch function is never wrong, only missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Function = Callable[..., Any]


def functions(names: str, *spaces: Any) -> frozenset[Function]:
    """The functions called ``names`` (separated by spaces) in each of ``spaces``."""
    found = (getattr(space, name, None) for space in spaces for name in names.split())
    return frozenset(f for f in found if callable(f))


def getters(names: str) -> frozenset[Function]:
    """What ``__torch_function__`` is given when one of these Tensor attributes is read."""
    found = (getattr(torch.Tensor, name, None) for name in names.split())
    return frozenset(d.__get__ for d in found if d is not None)


def setters(names: str) -> frozenset[Function]:
    """What ``__torch_function__`` is given when one of these Tensor attributes is assigned."""
    found = (getattr(torch.Tensor, name, None) for name in names.split())
    return frozenset(d.__set__ for d in found if d is not None)


def _in_place(names: Iterable[str]) -> str:
    return " ".join(f"{name}_" for name in names)


_UNARY = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan
    atanh bitwise_not ceil clone conj conj_physical cos cosh deg2rad detach digamma erf erfc erfinv
    exp exp2 expm1 fix floor frac i0 isfinite isinf isnan isneginf isposinf isreal lgamma log log10
    log1p log2 logical_not logit nan_to_num neg negative positive polygamma rad2deg real imag
    reciprocal relu resolve_conj resolve_neg round rsqrt sgn sigmoid sign signbit sin sinc sinh
    sqrt square tan tanh threshold trunc
"""
_BINARY = """
    add arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
    copysign div divide eq float_power floor_divide fmax fmin fmod gcd ge greater greater_equal gt
    heaviside hypot isclose lcm ldexp le less less_equal logaddexp logaddexp2 logical_and
    logical_or logical_xor lt maximum minimum mul multiply ne nextafter not_equal pow remainder
    rsub sub subtract true_divide xlogy
"""
_TERNARY = "addcdiv addcmul clamp clamp_max clamp_min clip lerp masked_fill"
_DUNDERS = """
    __abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lshift__
    __lt__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__
    __rfloordiv__ __rlshift__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rshift__ __rsub__
    __rtruediv__ __rxor__ __sub__ __truediv__ __xor__
"""
_IN_PLACE_DUNDERS = """
    __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__
    __irshift__ __isub__ __itruediv__ __ixor__
"""
_SPECIAL = """
    digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 i0e i1 i1e log1p log_ndtr logit
    ndtr ndtri psi round sinc xlog1py xlogy zeta
"""
_POINTWISE = f"{_UNARY} {_BINARY} {_TERNARY}"
_POINTWISE_IN_PLACE = _in_place(_POINTWISE.split())

IN_PLACE = functions(
    f"{_POINTWISE_IN_PLACE} {_IN_PLACE_DUNDERS} copy_ fill_ zero_", torch, torch.Tensor
)
"""Elementwise functions that write their first operand."""

ALIASING = functions("detach", torch, torch.Tensor) | getters("real imag")
"""Elementwise functions whose result lies over the memory of their operand."""

ELEMENTWISE = (
    IN_PLACE
    | functions(f"{_POINTWISE} {_DUNDERS}", torch, torch.Tensor)
    | functions(_SPECIAL, torch.special)
    | functions("empty_like full_like ones_like zeros_like", torch)
    | getters("real imag")
)
"""Functions whose element k depends on the element k of each operand and on nothing else."""

VIEWS = functions(
    "chunk flatten narrow ravel reshape select split split_with_sizes squeeze tensor_split "
    "unflatten unsqueeze view",
    torch,
    torch.Tensor,
)
"""Functions whose results are views, at least of what is stored in the order of its elements."""

ACTIVATIONS = functions(
    """celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6
    selu silu softplus softshrink softsign tanhshrink""",
    torch.nn.functional,
)
"""Elementwise functions that write their operand where ``inplace`` is True."""

LOSSES = functions("huber_loss l1_loss mse_loss smooth_l1_loss", torch.nn.functional)
"""Functions that compare two tensors element by element and take the mean."""

DRAWING = functions(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_", torch.Tensor
)
"""Functions that overwrite a tensor with random numbers."""

INITIAL = functions("kaiming_uniform_ normal_ uniform_", torch.nn.init)
"""Those of ``torch.nn.init`` that ask a tensor's class; the others call the methods of one."""

DRAWING_LIKE = functions("rand_like randint_like randn_like", torch)
"""Functions that return random numbers in the shape of their first argument."""

COMPARING = functions(
    """
    __eq__ __ge__ __gt__ __le__ __lt__ __ne__ eq ge greater greater_equal gt isclose le less
    less_equal logical_and logical_or logical_xor lt ne not_equal
    """,
    torch,
    torch.Tensor,
)
"""Elementwise functions of several operands that have no derivative by any of them."""

CASTS = functions(
    "bfloat16 bool byte cdouble cfloat chalf char cpu cuda double float half int long "
    "pin_memory short to type type_as xpu",
    torch.Tensor,
)
"""Functions that change dtype or device; what they return follows their first operand alone."""

CLEARING = frozenset((*functions("zero_", torch.Tensor), *functions("_foreach_zero_", torch)))
"""What ``zero_grad(set_to_none=False)`` clears gradients with."""

HARMLESS = frozenset(
    (
        *functions("detach_ requires_grad_", torch.Tensor),
        *functions("_has_compatible_shallow_copy_type", torch),
        *getters("grad_fn"),
    )
)
"""What ``zero_grad`` and ``module.to()`` call on a gradient without reading its elements."""

_FOREACH_UNARY = """
    abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg
    reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
"""
_FOREACH_MORE = """
    add addcdiv addcmul clamp_max clamp_min div lerp maximum minimum mul pow sub
"""
_FOREACH_NAMES = [f"_foreach_{name}" for name in f"{_FOREACH_UNARY} {_FOREACH_MORE}".split()]
FUSED = functions(
    "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_ "
    "_amp_foreach_non_finite_check_and_unscale_",
    torch,
)
"""Foreach functions that write more lists than the first."""

FOREACH_IN_PLACE = FUSED | functions(
    f"{_in_place(_FOREACH_NAMES)} _foreach_copy_ _foreach_zero_", torch
)
FOREACH = FOREACH_IN_PLACE | functions(f"{' '.join(_FOREACH_NAMES)} _foreach_clone", torch)
"""Elementwise functions over lists of tensors."""

_SHARED_GETTERS = """
    _backward_hooks _base _cdata _grad_fn _post_accumulate_grad_hooks _version
    device dtype grad_dtype grad_fn is_cpu is_cuda is_ipu is_leaf is_maia is_meta is_mkldnn is_mps
    is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout
    name output_nr requires_grad retains_grad volatile
"""
_SHARED_METHODS = """
    __dir__ _is_view _is_zerotensor element_size get_device is_coalesced is_conj
    is_distributed is_inference is_neg is_pinned is_shared is_signed qscheme record_stream
    requires_grad_ retain_grad share_memory_ sparse_dim storage_type
"""
SHARED = (
    getters(_SHARED_GETTERS)
    | functions(_SHARED_METHODS, torch.Tensor)
    | functions(
        "_has_compatible_shallow_copy_type get_device is_complex is_conj is_distributed "
        "is_floating_point is_inference is_neg is_signed",
        torch,
    )
    | setters("_backward_hooks _post_accumulate_grad_hooks grad_dtype names requires_grad")
)
"""Facts that the slice and the whole have in common."""

MEMORY = functions(
    """__array__ __dlpack__ __dlpack_device__ _storage _typed_storage as_subclass const_data_ptr
    data_ptr is_set_to numpy storage storage_offset untyped_storage""",
    torch.Tensor,
) | getters("__cuda_array_interface__")
"""Functions that give out memory, of which a slice has less than its shape says: all refused."""
