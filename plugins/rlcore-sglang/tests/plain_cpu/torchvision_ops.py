"""For tests only: make PyPI's torchvision, which is built for CUDA, importable with a CPU-only PyTorch.

SGLang imports torchvision for multimodal models. Its operator library does not load here, and its Python code fails at
undeclared operators, so this module declares two of them just before torchvision is imported.
"""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.rlcore_torchvision_ops = self  # a library's declarations live as long as its object


sys.meta_path.insert(0, _Declare())
