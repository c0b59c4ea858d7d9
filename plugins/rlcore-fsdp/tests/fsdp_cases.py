"""The backend under test and its oracle: `local`, optionally with adapters."""

from rlcore_fsdp import FSDPBackend, FSDPConfig, lora

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.kits.backend.optimizer import make_optimizer
from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore.testing.training import GENTLE, whole_weights

PRELOAD = ("torch.distributed.fsdp", "rlcore_fsdp", "rlcore.testing.training")
"""Modules that the processes of all ranks import once."""


def make_fsdp(path, *, config=None, optimizer=GENTLE, context=None, **model):
    """Create an `fsdp` backend; the arguments are fields of FSDPConfig, BackendContext and ModelConfig."""
    return FSDPBackend(
        FSDPConfig(**(config or {})),
        model=ModelConfig(path=path, **model),
        optimizer=optimizer,
        context=BackendContext(**(context or {})),
    )


def make_local(path, *, config=None, optimizer=GENTLE, context=None, **model):
    """Create the oracle for the same arguments."""
    settings, about = FSDPConfig(**(config or {})), BackendContext(**(context or {}))
    backend = LocalBackend(LocalConfig(), model=ModelConfig(path=path, **model), optimizer=optimizer, context=about)
    if settings.lora_rank:
        lora.add_adapters(backend._model, settings)
        adapters = {name: p for name, p in backend._model.named_parameters() if lora.is_adapter(name)}
        lora.start_adapters(adapters, about.seed)
        backend._names = {parameter: name for name, parameter in adapters.items()}
        backend._optimizer = make_optimizer(list(backend._names), optimizer)
    return backend


def local_weights(backend):
    """Return name -> weight of the oracle, with adapters merged by peft."""
    import copy

    model = copy.deepcopy(backend._model)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.merge()
    named = {lora.plain_name(n): p.detach() for n, p in model.named_parameters() if not lora.is_adapter(n)}
    head = backend._value_head
    return named | ({"value_head.weight": head.weight.detach()} if head is not None else {})


def fsdp_weights(backend):
    """Return name -> full weight, including the value head. Collective."""
    named = whole_weights(backend)
    head = backend._packed.value_head
    return named | ({"value_head.weight": head.weight.detach().full_tensor()} if head is not None else {})
