"""`backend=megatron`: tensor, pipeline and data parallel training on megatron-core.

Reading order: config.py, backend.py (the whole of a step), families.py (which models, as data), layout.py (how their
weights lie here and in Hugging Face files), then engine.py, model.py, head.py, optimizer.py, weights.py, checkpoint.py.
"""

from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.config import MegatronConfig

__all__ = ["MegatronBackend", "MegatronConfig"]
