"""What `torch.amp.GradScaler` has left at an optimizer, and what is to be done about it."""

from __future__ import annotations

import torch

from moshpit.errors import ConfigError
from moshpit.training.strategies import Strategy


def unscale(optimizer: torch.optim.Optimizer, strategy: Strategy) -> bool:
    """Undo the scaling of `torch.amp.GradScaler`, which leaves its scale and what it found at the
    optimizer for the time of a step; return whether the gradients are finite.

    Raises:
        ConfigError: a strategy or a gradient that cannot be unscaled.
    """
    found: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    if found is None:
        return True
    if strategy.begins_itself:
        raise ConfigError(
            f"{strategy.name} takes the gradients in the backward pass, before a GradScaler could "
            "unscale them: use bfloat16, which needs no scaler, or GradientAveraging"
        )
    if found.item() > 0:
        return False
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None:  # unscaled by the user, to clip
        return True
    inverse = 1.0 / scale.item()
    for named in strategy.parameters():
        gradient = named.tensor.grad
        if gradient is None:
            continue
        if gradient.dtype == torch.float16:
            raise ConfigError(
                f"the gradient of {named.name} is float16, too coarse to be unscaled: keep the "
                "parameters in float32 and run the forward pass under torch.autocast"
            )
        gradient.mul_(inverse)
    return True
