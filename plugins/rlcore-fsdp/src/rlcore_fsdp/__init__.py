"""`backend=fsdp`: training on many devices with PyTorch FSDP2.

Reading order: config.py, mesh.py, backend.py (a complete step), model.py (how a model is built and sharded), then the
modules they use: load.py, head.py, attention.py, tensor_parallel.py, context_parallel.py, lora.py, optimizer.py,
checkpoint.py.
"""

from rlcore_fsdp.backend import FSDPBackend
from rlcore_fsdp.config import FSDPConfig

__all__ = ["FSDPBackend", "FSDPConfig"]
