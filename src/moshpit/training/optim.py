"""LAMB and LARS: optimizers for large batches, whose steps are as long as a layer's norm allows.

Ordinary `torch.optim.Optimizer`s, for `moshpit.Optimizer` to wrap or to be used alone. Their
statistics have the parameters' shapes, so they can be averaged, transferred and saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch

from moshpit.errors import ConfigError

_FLOAT_MAX: Final = float("inf")


def _positive(name: str, value: float) -> float:
    if not 0 < value < _FLOAT_MAX:
        raise ConfigError(f"{name}: {value!r}; give a positive number")
    return value


def _at_least_zero(name: str, value: float) -> float:
    if not 0 <= value < _FLOAT_MAX:
        raise ConfigError(f"{name}: {value!r}; give 0 or more")
    return value


def _share(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"{name}: {value!r}; give 0 or more, below 1")
    return value


def _norm(tensor: torch.Tensor) -> float:
    return math.sqrt(tensor.square().sum().item())


Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class _LayerWise(torch.optim.Optimizer):
    """What both share: one update per parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; ``closure`` as for any optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ConfigError(f"{type(self).__name__} takes no sparse gradients")
                self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        raise NotImplementedError


@final
class LAMB(_LayerWise):
    r"""Layer-wise adaptive moments (LAMB).

    With :math:`m, v` the moving averages of the gradient and its square, and
    :math:`\hat m = m/(1-\beta_1^t)`, :math:`\hat v = v/(1-\beta_2^t)`, for each parameter tensor

    .. math:: u = \hat m / (\sqrt{\hat v} + \epsilon) + \lambda x, \qquad
              x \leftarrow x - \eta \, \frac{\lVert x \rVert}{\lVert u \rVert} \, u

    where the ratio is 1 if either norm is 0.

    Args:
        params: parameters or groups, as for any optimizer.
        lr: :math:`\eta`.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`; set it to 0 in the group of biases and norms, as usual.

    Raises:
        ConfigError: values that make no sense.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LAMB([x], lr=0.1, eps=1e-12)
        >>> (x * torch.tensor([1.0, -1.0])).sum().backward()
        >>> _ = optimizer.step()
        >>> x.data  # the norm 5, in the direction (1, -1)/sqrt(2), times 0.1
        tensor([2.6464, 4.3536])

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2, with the identity for phi.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": _positive("lr", lr),
            "betas": (_share("beta 1", betas[0]), _share("beta 2", betas[1])),
            "eps": _positive("eps", eps),
            "weight_decay": _at_least_zero("weight_decay", weight_decay),
        }
        super().__init__(params, defaults)

    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps = state["step"].item()
        first, second = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (square / (1 - second**steps)).sqrt_().add_(group["eps"])
        update = mean.div(1 - first**steps).div_(root)
        update.add_(parameter, alpha=group["weight_decay"])
        size, length = _norm(parameter), _norm(update)
        ratio = size / length if size > 0 and length > 0 else 1.0
        parameter.add_(update, alpha=-group["lr"] * ratio)


@final
class LARS(_LayerWise):
    r"""Layer-wise adaptive rates (LARS): SGD with momentum, its rate by layer.

    For each parameter tensor, with :math:`g` its gradient,

    .. math:: \gamma = \eta_0 \frac{\lVert x \rVert}{\lVert g \rVert + \lambda \lVert x \rVert},
              \qquad v \leftarrow \mu v + \eta \gamma (g + \lambda x), \qquad x \leftarrow x - v

    where :math:`\gamma` is 1 if either norm is 0.

    Args:
        params: parameters or groups, as for any optimizer.
        lr: :math:`\eta`.
        momentum: :math:`\mu`.
        weight_decay: :math:`\lambda`.
        trust: :math:`\eta_0`, the share of its norm by which a layer may move.

    Raises:
        ConfigError: values that make no sense.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LARS([x], lr=1.0, trust=0.1)
        >>> (x * torch.tensor([10.0, 0.0])).sum().backward()
        >>> _ = optimizer.step()
        >>> x.data  # however large the gradient: a tenth of the norm 5
        tensor([2.5000, 4.0000])

    Source: You et al. 2017, arXiv 1708.03888, algorithm 1.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        defaults = {
            "lr": _positive("lr", lr),
            "momentum": _share("momentum", momentum),
            "weight_decay": _at_least_zero("weight_decay", weight_decay),
            "trust": _positive("trust", trust),
        }
        super().__init__(params, defaults)

    def _update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        decay = group["weight_decay"]
        size, slope = _norm(parameter), _norm(gradient)
        local = group["trust"] * size / (slope + decay * size) if size > 0 and slope > 0 else 1.0
        moved = gradient.add(parameter, alpha=decay).mul_(group["lr"] * local)
        parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(moved))
