"""Muon for matrices, Adam for the rest, and which parameter gets which.

X = matrices of one shape, R = rows, C = columns (R <= C after a transposition)
"""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

_NS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz coefficients of Muon (Jordan et al., 2024)
_ADAM_LEAVES = ("embed.weight", "head.weight", "gate.weight", "ape", "weights_proj.weight")


def is_muon(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a matrix (or a stack of them) between hidden states."""
    return parameter.ndim >= 2 and not name.endswith(_ADAM_LEAVES) and ".hc_" not in f".{name}"


def orthogonalize(matrices_XRC: torch.Tensor) -> torch.Tensor:
    """Approximately the nearest semi-orthogonal matrices, five Newton-Schulz steps."""
    a, b, c = _NS
    x: torch.Tensor = matrices_XRC / (matrices_XRC.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x)
    return x


class DemoOptimizer:
    """One object for both; state is plain tensors by parameter name, so that it can be saved.

    lr and adam_lr are peaks, scaled by each step's `factor`; weight_decay is decoupled and for Muon's matrices only.
    Selection biases of the routers are not trained here.
    """

    def __init__(
        self, model: nn.Module, *, lr: float, adam_lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        self.lr, self.adam_lr, self.weight_decay, self.momentum = lr, adam_lr, weight_decay, momentum
        named = {n: p for n, p in model.named_parameters() if not n.endswith("gate.bias")}
        self._muon = {n: p for n, p in named.items() if is_muon(n, p)}
        self._adam = {n: p for n, p in named.items() if n not in self._muon}
        self.state: dict[str, torch.Tensor] = {f"m.{n}": torch.zeros_like(p) for n, p in named.items()}
        self.state |= {f"v.{n}": torch.zeros_like(p) for n, p in self._adam.items()}
        self._betas, self._eps = (0.9, 0.98), 1e-10

    def step(self, number: int, factor: float) -> None:
        """Update number `number` (from 0) from the parameters' gradients, and clear those."""
        with torch.no_grad():
            self._adam_step(number, factor)
            self._muon_step(factor)
        for parameter in (*self._muon.values(), *self._adam.values()):
            parameter.grad = None

    def _adam_step(self, number: int, factor: float) -> None:
        first, second = self._betas
        step_size = self.adam_lr * factor * math.sqrt(1 - second ** (number + 1)) / (1 - first ** (number + 1))
        for name, parameter in self._adam.items():
            if parameter.grad is None:
                continue
            mean, square = self.state[f"m.{name}"], self.state[f"v.{name}"]
            mean.lerp_(parameter.grad, 1 - first)
            square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
            parameter.addcdiv_(mean, square.sqrt().add_(self._eps), value=-step_size)

    def _muon_step(self, factor: float) -> None:
        by_shape: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        updates: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for name, parameter in self._muon.items():
            if parameter.grad is None:
                continue
            mean = self.state[f"m.{name}"]
            mean.lerp_(parameter.grad, 1 - self.momentum)
            update = parameter.grad.lerp(mean, self.momentum)
            for target, change in zip(_matrices(name, parameter), _matrices(name, update), strict=True):
                if target.shape[0] > target.shape[1]:
                    target, change = target.T, change.T
                shape = (target.shape[0], target.shape[1])
                by_shape[shape].append(target)
                updates[shape].append(change)
        for shape, targets in by_shape.items():
            for start in range(0, len(targets), 32):
                chunk = targets[start : start + 32]
                change_XRC = orthogonalize(torch.stack(updates[shape][start : start + 32]))
                size = self.lr * factor * 0.2 * math.sqrt(max(shape))
                for target, change in zip(chunk, change_XRC, strict=True):
                    target.mul_(1 - self.lr * factor * self.weight_decay).add_(change, alpha=-size)


def _matrices(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a parameter: experts apart, gate and up projections apart."""
    stacked = list(tensor) if tensor.ndim == 3 else [tensor]
    return [part for matrix in stacked for part in (matrix.chunk(2) if name.endswith("experts.w13") else (matrix,))]


def balance(biases: Mapping[str, torch.Tensor], loads: Mapping[str, torch.Tensor], rate: float) -> None:
    """Auxiliary-loss-free balancing: raise the selection bias of experts below the mean load, lower it above."""
    with torch.no_grad():
        for name, load_E in loads.items():
            load = load_E.float()
            biases[name].add_(rate * torch.sign(load.mean() - load))
