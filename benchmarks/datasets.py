"""The cases that are timed: problems of any size whose numbers are random, and the family that is fitted to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpssm.data import Dataset
from gpssm.emissions import LinearGaussian
from gpssm.gp import InducingPosterior, SparseGP
from gpssm.kernels import SquaredExponential
from gpssm.means import IdentityMean
from gpssm.model import GPSSM
from gpssm.posteriors import (
    PRSSM,
    VCDT,
    AbstractPosterior,
    FactorisedLinear,
    FactorisedNonlinear,
    FreeSteps,
    FunctionDependent,
    FunctionDependentPathwise,
    Parametric,
    PriorSteps,
    PRSSMCorrected,
)

FAMILIES: dict[str, Callable[[InducingPosterior, Any], AbstractPosterior]] = {
    "vcdt": VCDT,
    "factorised-nonlinear": FactorisedNonlinear,
    "factorised-linear": FactorisedLinear,
    "f-dependent-pathwise": FunctionDependentPathwise,
    "f-dependent": FunctionDependent,
    "parametric": Parametric,
    "pr-ssm": PRSSM,
    "pr-ssm-corrected": PRSSMCorrected,
}
PRIOR_ONLY = ("pr-ssm", "pr-ssm-corrected")


@dataclass(frozen=True)
class Case:
    """The size of a problem; the defaults are the paper's scale."""

    family: str = "vcdt"
    steps: int = 500
    states: int = 4
    controls: int = 1
    outputs: int = 1
    inducing: int = 100
    samples: int = 100
    sequences: int = 1
    models: int = 1  # side by side in one program
    is_shared: bool = False  # one kernel and one set of inducing inputs for all states
    is_full: bool = False  # A and S are matrices

    @property
    def groups(self) -> int:
        return 1 if self.is_shared else self.states

    @property
    def num_features(self) -> int:
        """Sines and cosines of a pathwise draw."""
        posterior = self.build(seed=0)[2]
        return 2 * posterior.num_frequencies if isinstance(posterior, FunctionDependentPathwise) else 0

    def build(self, seed: int) -> tuple[Dataset, GPSSM, AbstractPosterior]:
        """Random data, and a model and a posterior whose trajectories stay where the inducing inputs are."""
        rng = np.random.default_rng(seed)
        states, inputs, steps = self.states, self.states + self.controls, self.steps - 1
        kernels = [SquaredExponential(np.full(inputs, np.sqrt(inputs)), 0.5) for _ in range(self.groups)]
        where = rng.normal(size=(self.groups, self.inducing, inputs))
        transition = SparseGP(kernels, IdentityMean(states), where, states, jitter=1e-4)
        emission = LinearGaussian(np.eye(self.outputs, states), np.zeros(self.outputs), np.full(self.outputs, 0.5))
        model = GPSSM(transition, emission, np.full(states, 0.3), np.zeros(states), np.eye(states))
        mean = 0.3 * rng.normal(size=(states, self.inducing))
        inducing = InducingPosterior(mean, np.broadcast_to(0.1 * np.eye(self.inducing), (states, self.inducing, self.inducing)))
        table = (self.sequences, steps, states)
        first = np.zeros((self.sequences, states)), np.broadcast_to(0.5 * np.eye(states), (self.sequences, states, states))
        if self.family in PRIOR_ONLY:
            local: Any = PriorSteps(*first)
        elif self.is_full:
            square = np.broadcast_to(np.eye(states), (*table, states))
            local = FreeSteps(*first, 0.7 * square, 0.1 * rng.normal(size=table), 0.3 * square, is_full=True)
        else:
            local = FreeSteps(*first, np.full(table, 0.7), 0.1 * rng.normal(size=table), np.full(table, 0.3))
        outputs = list(rng.normal(size=(self.sequences, self.steps, self.outputs)))
        controls = list(rng.normal(size=(self.sequences, self.steps, self.controls)))
        return Dataset.from_arrays(outputs, controls), model, FAMILIES[self.family](inducing, local)
