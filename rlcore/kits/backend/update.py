"""Weights that another model streams into this one: the parts of `Backend.load_weights` that all backends share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from rlcore.errors import ModelError


class WeightUpdate:
    """Update of a model's parameters from a stream; a model with an incomplete update must not be used."""

    def __init__(self) -> None:
        self.failure = ""
        """Reason why the parameters are incomplete; empty if they are complete."""

    def check_complete(self) -> None:
        """Raise ModelError if the last update failed."""
        if self.failure:
            raise ModelError(
                f"the model has incomplete weights: {self.failure}\n"
                "Send all weights again with mix=1, or load a checkpoint."
            )

    def checked(
        self, weights: Iterator[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], mix: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a stream; the update is complete when the last of `shapes` has been yielded.

        Args:
            shapes: name of each parameter -> its full shape.

        Raises:
            ModelError: a name is unknown, missing or repeated, or a shape differs; or `mix` is below 1 and the present
                weights are incomplete.
        """
        if not 0 < mix <= 1:
            raise ValueError(f"mix={mix} must be more than 0 and at most 1\nUse mix=1 to copy the weights.")
        if mix < 1:
            self.check_complete()
        self.failure = "a weight update did not finish"
        try:
            missing = dict.fromkeys(shapes)
            for name, tensor in weights:
                if name not in missing:
                    raise _unfit(f"'{name}' was sent twice" if name in shapes else f"it has no parameter '{name}'")
                if tuple(tensor.shape) != shapes[name]:
                    raise _unfit(f"'{name}' has shape {shapes[name]} in the model, but {tuple(tensor.shape)} was sent")
                del missing[name]
                yield name, tensor.detach()
            if missing:
                raise _unfit(f"{len(missing)} parameters were not sent, the first is '{next(iter(missing))}'")
        except Exception as error:
            self.failure = str(error).partition("\n")[0]
            raise
        self.failure = ""


def blend(parameter: Tensor, new: Tensor, mix: float) -> None:
    """Set a tensor to (1 - mix) · itself + mix · `new` in place, in its own dtype; mix=1 copies."""
    if mix == 1:
        parameter.copy_(new)
    else:
        parameter.lerp_(new.to(parameter), mix)


def _unfit(reason: str) -> ModelError:
    return ModelError(
        f"the weights do not fit the model that receives them: {reason}\n"
        "Give both roles the same model.path, and send all weights, with adapters merged."
    )
