"""rlcore on vLLM: `rollout=vllm`.

Reading order: rollout.py (called by the core), requests.py (conversion of requests and samples), inprocess.py (the engine
in this process), worker.py (code that runs in vLLM's workers), server.py (client of a running server).
"""

from rlcore_vllm.config import VLLMConfig
from rlcore_vllm.rollout import VLLMRollout

__all__ = ["VLLMConfig", "VLLMRollout"]
