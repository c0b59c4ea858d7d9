"""For tests only: an SGLang platform of plain PyTorch, for machines that have no kernel package for their CPU.

SGLang finds it by the entry points beside this file, through its own extension points. Schedulers, caches, sampling and
control are SGLang's; attention is its `torch_native`, and two operations that exist as GPU kernels only are replaced.
`enable.py` puts it into an environment.
"""


def platform():
    """What SGLang asks an entry point of `sglang.srt.platforms` for."""
    return "sglang_plain_cpu:PlainCpu"


def hooks():
    """Called by SGLang in each of its processes before it reads its arguments."""
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    replacements = {
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": _nothing,
        "sglang.srt.layers.sampler.multinomial_with_seed": draw_with_seed,
    }
    for name, replacement in replacements.items():
        HookRegistry.register(name, replacement, HookType.REPLACE)


def _nothing(*args, **kwargs):
    """Products that do not depend on the batch's size are Triton kernels; PyTorch's are close enough for a test."""


def draw_with_seed(logprobs, seed, positions):
    """[n, 1] one draw a row by the Gumbel-max trick; the noise is a function of seed, position and column alone."""
    import torch

    from rlcore.rollouts.sampler import uniforms

    num_rows, num_columns = logprobs.shape
    rows = (seed.long() * 1000003 + positions.long())[:, None].expand(num_rows, num_columns)
    columns = torch.arange(num_columns, device=logprobs.device).expand(num_rows, num_columns)
    uniform = uniforms(rows, columns).clamp_(min=1e-300)
    return (logprobs.double() - (-uniform.log()).log()).argmax(dim=1, keepdim=True)


def __getattr__(name):
    """The class is asked for while SGLang is being imported, so that its methods import what they need."""
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
    """SGLang hands a page size to every allocator; this one knows single tokens only."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    class PlainAllocator(TokenToKVPoolAllocator):
        def __init__(self, *args, page_size, **kwargs):
            assert page_size == 1, f"got {page_size}"
            super().__init__(*args, **kwargs)

    return PlainAllocator
