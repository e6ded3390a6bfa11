"""All that nwise uses of torch beside its public interface, and the versions of torch for which it was checked.

No other file has a private name of torch (`tests/test_house.py`), so a new version of torch is checked here:

    name here            private name of torch                      public way
    -------------------  -----------------------------------------  ------------------------------------------------
    run_backward         autograd.graph._engine_run_backward        autograd.backward, slower by 15 microseconds
    has_custom           names of nodes that C++ makes              none
    version, counter     Tensor._version                            none
    gradient_hooks,      Tensor._backward_hooks and                 none: hooks can be registered, not listed
      with_hooks         ._post_accumulate_grad_hooks
    post_hooks           Optimizer._optimizer_step_post_hooks       none: hooks can be registered, not listed
    has_hooks, ...       Module._forward_hooks and others           none: hooks can be registered, not listed
    BatchNorm, Norm      bases of batch and instance norms          a list of classes, without those of users
    is_compiled, ...     Module._compiled_call_impl, _call_impl     Module.compile, without effect on containers
    uncompiled, ...      _orig_mod, _torchdynamo_orig_callable      none
    MODULE_CALLS         Module._call_impl, _wrapped_call_impl      none
    caches_...           nn.utils.parametrize._cache_enabled        none
    compiler_settings    _functorch.config                          none
    tracer_settings      _dynamo.config                             options of `torch.compile`, since torch 2.13
    TorchDispatchMode    utils._python_dispatch                     none
    pytree               utils._pytree                              none, and transformers registers its outputs there
    hide_buffers         Module._non_persistent_buffers_set         none for a buffer that is registered already

`Module._modules`, `_parameters`, `_buffers` and `_apply` are used by many projects and may stand in other files.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operator of a body

pytree = _pytree  # nests of tuples, lists, dictionaries, and what others register

# The whole test suite was run with both, and with 2.13; `pyproject.toml` has the same bounds.
OLDEST = (2, 11)
NEWEST = (2, 15)


def unchecked(version: str) -> str | None:
    """Return a warning about a version of torch outside the range whose ends were checked; None for one inside.

    >>> unchecked("2.13.0+cpu")
    """
    major, minor, *_ = version.split(".")
    if OLDEST <= (int(major), int(minor)) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    return (
        f"nwise should run with torch {oldest} to {newest}, the range for which it was checked. Found {version}; install one "
        "of those, or run the tests of nwise with yours."
    )


if _warning := unchecked(torch.__version__):
    warnings.warn(_warning, stacklevel=2)

try:
    # The engine behind `torch.autograd.backward`, which checks its arguments for 15 microseconds, as long as a small layer takes.
    run_backward = torch.autograd.graph._engine_run_backward
    # The bases of torch's batch norms, and of its batch and instance norms. Those of users and lazy ones derive from them, too.
    BatchNorm = nn.modules.batchnorm._BatchNorm
    Norm = nn.modules.batchnorm._NormBase
except AttributeError as error:
    raise ImportError(_warning or str(error)) from error

# Names of the methods that run a module: a loss may be one of them.
MODULE_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
COMPILED = "_orig_mod"  # name of the module inside a compiled one

_module_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NODE_OF_MODULE_HOOKS = "BackwardHookFunctionBackward"  # an autograd.Function of torch itself
_NODE_OF_EXTENSIONS = "CppFunction"


def has_custom(nodes: Iterable[Node]) -> bool:
    """Return whether any node runs code outside torch: a `torch.autograd.Function`, or one of a C++ extension.

    >>> has_custom([torch.ones(1, requires_grad=True).exp().grad_fn])
    False
    """
    kinds: set[type] = set(map(type, nodes))
    # Without a call for each kind, because passes that keep cotangents ask every time.
    names = [k.__name__ for k in kinds if BackwardCFunction in k.__mro__ or k.__name__ == _NODE_OF_EXTENSIONS]
    return names not in ([], [_NODE_OF_MODULE_HOOKS])


def caches_parametrizations() -> bool:
    """Return whether `torch.nn.utils.parametrize.cached` is on: all forwards then share one graph of a parametrized weight."""
    return bool(parametrize._cache_enabled)


def version(tensor: Tensor) -> int:
    """Return how often a tensor has been changed in place; 0 for one made in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Collection[Tensor | None]) -> list[int]:
    """Return `version` for each tensor, and 0 for each None.

    >>> x = torch.zeros(2)
    >>> versions([x, None]), versions([x.add_(1), None])
    ([0, 0], [1, 0])
    """
    try:
        return list(map(counter, tensors))
    except (AttributeError, RuntimeError):  # of None, and of a tensor that does not count
        return [0 if x is None else version(x) for x in tensors]


counter = attrgetter("_version")  # `version` without a call in Python; an error for a tensor of inference mode


def post_hooks(optimizer: Optimizer) -> OrderedDict[int, Any]:
    """Return the hooks that run after each step of an optimizer, in order."""
    return cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)


def with_hooks(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have hooks on their gradients."""
    return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


def gradient_hooks(parameter: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a parameter's own dictionaries of hooks: on its gradient, and after the gradient is added to ``.grad``."""
    before = parameter._backward_hooks
    after = parameter._post_accumulate_grad_hooks
    return {} if before is None else before, {} if after is None else after


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks on its forward or backward."""
    return any(_module_hooks(module))


def hooks_of(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return the dictionaries that hold the hooks on the forwards and backwards of modules.

    >>> hooks_of([nn.ReLU()])
    [OrderedDict(), OrderedDict(), OrderedDict(), OrderedDict()]
    """
    return [hooks for module in modules for hooks in _module_hooks(module)]


def share_hooks(module: nn.Module, other: nn.Module) -> None:
    """Let another module have a module's hooks."""
    vars(other).update({name: value for name, value in vars(module).items() if "hook" in name})


def hide_buffers(module: nn.Module) -> None:
    """Leave the buffers of a module, and of those inside it, out of its state dict."""
    for part in module.modules():
        part._non_persistent_buffers_set.update(part._buffers)


def is_compiled(module: nn.Module) -> bool:
    """Return whether this module itself was compiled: `compile_call`, ``module.compile()`` or ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def compiled_calls(modules: Iterable[nn.Module]) -> list[Any]:
    """Return for each module its compiled call, None for one that is not compiled itself.

    >>> compiled_calls([nn.ReLU()])
    [None]
    """
    return list(map(attrgetter("_compiled_call_impl"), modules))


def compile_call(module: nn.Module, **options: Any) -> None:
    """Compile the call of a module in place, even of a container of torch's, on which ``module.compile()`` has no effect.

    Args:
        module: the module.
        options: those of `torch.compile`.
    """

    # The compiler does not trace calls that begin in torch's files. So the call begins here.
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call, **options)


def uncompiled(compiled: Any) -> Any:
    """Return the module or function inside a result of `torch.compile`; anything else as it is."""
    for name in (COMPILED, "_torchdynamo_orig_callable"):
        if (inner := getattr(compiled, name, None)) is not None:
            return inner
    return compiled


def plain_name(name: str) -> str:
    """Return the name that a parameter, buffer or module has without `torch.compile`.

    >>> plain_name("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return name.replace(f"{COMPILED}.", "")


def compiler_settings() -> Any:
    """Return the settings of compiled backward passes, such as ``donated_buffer``."""
    import torch._functorch.config as settings

    return settings


def tracer_settings() -> Any:
    """Return the settings of the part of the compiler that reads Python, such as ``recompile_limit``."""
    return torch._dynamo.config
