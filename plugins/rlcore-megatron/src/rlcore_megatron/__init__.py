"""`backend=megatron`: tensor-, context-, pipeline- and data-parallel training on megatron-core.

Reading order: config.py, backend.py (a complete step), families.py (tables of the model families), layout.py (mapping of
weights to Hugging Face tensors), then engine.py, model.py, head.py, optimizer.py, weights.py, checkpoint.py.
"""

from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.config import MegatronConfig

__all__ = ["MegatronBackend", "MegatronConfig"]
