"""Update rules other than AdamW: what each stores per weight, and how it updates.

`Sgd` is elementwise and updates all weights. `Muon` and `Jorge` update hidden matrices
(`sharding.matrix_dims`), and AdamW updates the rest in the same step. Their functions of flat
tensors see optimizer shards, and their functions of matrices see whole matrices or tiles on the
rank that owns them (`optim.matrix_exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ranvier.cost.matrix_optimizers import JorgeCost, MatrixRuleCost, MuonCost
from ranvier.optim import muon
from ranvier.optim.muon import COEFFICIENTS, STEPS, Coefficients, LrRule


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum, as `torch.optim.SGD`: weight decay is added to the gradient."""

    momentum: float = 0.9

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """States of each weight, in addition to its master weight."""
        return ("momentum",)


@dataclass(frozen=True)
class Muon:
    """Muon: momentum of matrices, orthogonalized by a Newton-Schulz iteration."""

    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr: LrRule = "match_rms_adamw"
    """Factor of the learning rate of a matrix, which depends on its shape."""
    coefficients: Coefficients = COEFFICIENTS
    steps: int = STEPS
    """Coefficients and number of steps of the iteration."""
    dtype: Literal["auto", "bf16", "fp32", "master"] = "auto"
    """Dtype of the iteration. auto: bf16 on CUDA, and the dtype of master weights on a CPU."""

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """States of each weight, in addition to its master weight."""
        return ("mean",)

    def message_dtype(self, master: torch.dtype, device: torch.device) -> torch.dtype:
        """Returns the dtype in which updates travel and are orthogonalized."""
        # The meta device of a dry run stands for a GPU.
        wants_bf16 = self.dtype == "auto" and device.type != "cpu" and master != torch.float64
        if wants_bf16 or self.dtype == "bf16":
            return torch.bfloat16
        return torch.float32 if self.dtype == "fp32" else master

    def cost(self, message: torch.dtype) -> MatrixRuleCost:
        """Returns its cost if updates travel in dtype `message`."""
        return MuonCost(message.itemsize, self.steps)

    def orthogonalize(self, matrices: Tensor) -> Tensor:
        """Returns the orthogonalized matrices, `[n, rows, cols]`."""
        return muon.orthogonalize(matrices, steps=self.steps, coefficients=self.coefficients)


@dataclass(frozen=True)
class Jorge:
    """Jorge: gradients preconditioned by tiles, with the step size of SGD (grafting)."""

    momentum: float = 0.9
    symmetric: bool = True
    """Whether preconditioners are kept symmetric; False is the published form."""
    max_preconditioner_dim: int = 1024
    """Maximum side of a tile."""
    precondition_interval: int = 1
    """Updates from one change of the preconditioners to the next."""
    grafting: bool = True
    """Whether an update has the norm of the update of SGD."""
    eps: float = 1e-6
    """The preconditioners begin with eps^(-1/4) I."""

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """States of each weight, in addition to its master weight."""
        return ("momentum", "preconditioned")

    def message_dtype(self, master: torch.dtype, device: torch.device) -> torch.dtype:
        """Returns the dtype in which gradients travel and are preconditioned."""
        return master

    def cost(self, message: torch.dtype) -> MatrixRuleCost:
        """Returns its cost if gradients travel in dtype `message`."""
        return JorgeCost(
            message.itemsize,
            self.max_preconditioner_dim,
            self.precondition_interval,
            self.grafting,
        )


MatrixRule = Muon | Jorge
Rule = Sgd | Muon | Jorge
