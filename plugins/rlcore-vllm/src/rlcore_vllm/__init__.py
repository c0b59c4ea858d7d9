"""rlcore on vLLM: `rollout=vllm`.

Reading order: rollout.py (what the core calls), requests.py (requests and samples), inprocess.py (the engine in this
process), worker.py (what runs inside vLLM's workers), server.py (a running server).
"""

from rlcore_vllm.config import VLLMConfig
from rlcore_vllm.rollout import VLLMRollout

__all__ = ["VLLMConfig", "VLLMRollout"]
