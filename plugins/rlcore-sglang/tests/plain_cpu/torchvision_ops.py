"""For tests only: lets the torchvision of PyPI, which is built for CUDA, be imported beside a PyTorch without it.

SGLang imports torchvision for models with pictures. Its library of operators does not load here, and its Python code
stops at an operator that is not declared; so two are declared just before torchvision is imported.
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
