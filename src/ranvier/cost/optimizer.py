"""Optimizer spec: what an optimizer stores, computes and communicates, without tensors.

AdamW stores two moments of each weight, and SGD one. Muon stores one for hidden matrices, Jorge
two, and AdamW updates all other weights. The owners of matrices also have states with Jorge
(`MatrixRuleCost.owner_state_elements`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ranvier.config.run import RunConfig
from ranvier.config.sections import OptimConfig, OptimizerName
from ranvier.cost.matrix_optimizers import JorgeCost, MatrixRuleCost, MuonCost

MomentPrecision = Literal["master", "bf16", "int8"]
QUANT_BLOCK = 256
"""Elements of an 8-bit moment that share a scale."""


@dataclass(frozen=True)
class OptimizerSpec:
    """The update rule of a run, and the precision of its moments."""

    name: OptimizerName = "adamw"
    moments: MomentPrecision = "master"
    """Precision of the moments of matrices and embeddings."""
    matrix_rule: MatrixRuleCost | None = None
    """The rule of hidden matrices, if it needs them whole."""

    @classmethod
    def from_config(cls, optim: OptimConfig, itemsize: int, *, on_cpu: bool) -> OptimizerSpec:
        """Returns the spec of the optimizer of a run.

        Args:
            optim: Settings of the optimizer.
            itemsize: Bytes per element of working weights.
            on_cpu: Whether the model is on a CPU, where Muon iterates in the dtype of master
                weights by default.
        """
        master = max(itemsize, 4)
        rule: MatrixRuleCost | None = None
        if optim.name == "muon":
            auto = master if on_cpu or master == 8 else 2
            sizes = {"auto": auto, "bf16": 2, "fp32": 4, "master": master}
            rule = MuonCost(sizes[optim.muon_dtype], optim.muon_steps)
        elif optim.name == "jorge":
            rule = JorgeCost(
                master,
                optim.max_preconditioner_dim,
                optim.precondition_interval,
                optim.grafting,
            )
        return cls(optim.name, optim.state_dtype, rule)

    @classmethod
    def from_run(cls, run: RunConfig) -> OptimizerSpec:
        """Returns the spec of the optimizer of a run, on a GPU unless it is for a CPU."""
        itemsize = {"fp64": 8, "fp32": 4}.get(run.train.dtype, 2)
        return cls.from_config(run.optim, itemsize, on_cpu=run.train.device == "cpu")

    def num_moments(self, *, is_hidden_matrix: bool) -> int:
        """Returns the number of states of a weight, in addition to its master weight."""
        if self.name == "sgd" or (self.name == "muon" and is_hidden_matrix):
            return 1
        return 2

    def moment_bytes(self, count: int, wide: int, *, group: str, is_hidden_matrix: bool) -> int:
        """Returns the bytes of the moments of `count` elements.

        Args:
            count: Number of elements.
            wide: Bytes per element of master weights.
            group: Parameter group; vectors have moments in the dtype of master weights.
            is_hidden_matrix: Whether the rule of hidden matrices updates them.
        """
        number = self.num_moments(is_hidden_matrix=is_hidden_matrix)
        if group == "vector" or self.moments == "master":
            return number * count * wide
        if self.moments == "bf16":
            return number * count * 2
        # One byte per element and an fp32 scale per block, for each moment.
        return number * (count + 4 * -(-count // QUANT_BLOCK))

    def moment_bytes_per_element(self, wide: int) -> float:
        """Returns the bytes of the moments per element of hidden matrices, which are most weights.

        States that only owners of matrices have are not counted.
        """
        count = QUANT_BLOCK
        return self.moment_bytes(count, wide, group="matrix", is_hidden_matrix=True) / count

    @property
    def num_passes(self) -> int:
        """Number of passes over the states in a step; offloaded states are moved in each."""
        return 1 if self.matrix_rule is None else self.matrix_rule.num_passes


ADAMW = OptimizerSpec()
"""AdamW with moments in the dtype of master weights."""
