"""For tests only: an SGLang platform of plain PyTorch, for machines that have no kernel package for their CPU.

SGLang loads it through its own extension points, from the entry points next to this file. Schedulers, caches, sampling and
control are SGLang's; attention is its `torch_native`, and two operations that exist only as GPU kernels are replaced.
`enable.py` installs it in a virtual environment.
"""


def platform():
    """Return the platform class; the entry point of `sglang.srt.platforms`."""
    return "sglang_plain_cpu:PlainCpu"


def hooks():
    """Register the replacements. SGLang calls this in each of its processes before it parses its arguments."""
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    replacements = {
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": _nothing,
        "sglang.srt.layers.sampler.multinomial_with_seed": sample_with_seed,
    }
    for name, replacement in replacements.items():
        HookRegistry.register(name, replacement, HookType.REPLACE)


def _nothing(*args, **kwargs):
    """Do nothing: batch-invariant products are Triton kernels, and PyTorch's are close enough for a test."""


def sample_with_seed(logprobs, seed, positions):
    """Return one sample per row [n, 1] by the Gumbel-max trick, with noise from seed, position and column only."""
    import torch

    from rlcore.rollouts.sampler import uniforms

    num_rows, num_columns = logprobs.shape
    rows = (seed.long() * 1000003 + positions.long())[:, None].expand(num_rows, num_columns)
    columns = torch.arange(num_columns, device=logprobs.device).expand(num_rows, num_columns)
    uniform = uniforms(rows, columns).clamp_(min=1e-300)
    return (logprobs.double() - (-uniform.log()).log()).argmax(dim=1, keepdim=True)


def __getattr__(name):
    """Create the class on first access, because SGLang requests it while SGLang itself is being imported."""
    if name != "PlainCpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum

    class PlainCpu(CpuSRTPlatform):
        _enum = PlatformEnum.OOT
        device_name = "plain_cpu"

        def get_default_attention_backend(self):
            return "torch_native"

        def get_mha_kv_pool_cls(self):
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self):
            return _allocator_class()

    globals()[name] = PlainCpu
    return PlainCpu


def _allocator_class():
    """Return an allocator of single tokens that accepts the page size which SGLang passes."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    class PlainAllocator(TokenToKVPoolAllocator):
        def __init__(self, *args, page_size, **kwargs):
            assert page_size == 1, f"got {page_size}"
            super().__init__(*args, **kwargs)

    return PlainAllocator
