"""q(X | f) q(f) with states proposed from the actual values of f (paper, Table 1, row 3), exactly and in linear time."""

from typing import Any, ClassVar

import equinox as eqx

from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.draws import (
    AbstractDraw,
    ExactDraw,
    PathwiseDraw,
    extend,
    num_features,
    pathwise_draw,
    pathwise_features,
)
from gpssm.gp import InducingPosterior
from gpssm.model import GPSSM
from gpssm.posteriors.base import AbstractPosterior
from gpssm.posteriors.chain import Chain, Noise, Rollout, through_value
from gpssm.posteriors.local import AbstractLocal, FreeSteps


class FunctionDependent(AbstractPosterior):
    """States proposed from values of f that are drawn exactly, each given all before it: O(T³) a trajectory.

    With `FreeSteps(..., cut_every=tau)` the trajectory is cut into independent pieces, and costs O(T tau²).

    A lower bound: q(X | f) q(f) is a distribution and is sampled exactly. Cutting changes q(X | f), not the argument. With
    A = I, b = 0, S = Q (`PriorSteps`) the divergence of the transitions is zero.
    """

    inducing: InducingPosterior
    local: AbstractLocal
    is_lower_bound: ClassVar[bool] = True

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        num_slots = len(window.outputs) - 1
        if isinstance(self.local, FreeSteps) and self.local.cut_every is not None:
            num_slots = min(num_slots, self.local.cut_every)
        draw = ExactDraw(model.transition.basis(), model.transition.mean, self.inducing, num_slots)
        return chain(draw, through_value, self.local.steps(model, window), model, window, noise)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return num_steps

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        """The same f: later values are drawn given those of the trajectory."""
        assert isinstance(rollout.draw, ExactDraw)
        return extend(rollout.draw, rollout.memory, num_steps)


class FunctionDependentPathwise(AbstractPosterior):
    """States proposed from the values of f drawn once, as a function, by pathwise sampling: O(T) a trajectory.

    f is v's contribution, exact, plus a residual made of random features whose variance is exact at every input and whose
    correlation between inputs is approximate, with an error of order 1 / sqrt(num_frequencies) at most (`PathwiseDraw` says how).
    The residual is small wherever the inducing inputs already determine f. It is exact for linear and constant kernels.

    A lower bound on the evidence of the model whose residual prior is that of the features: for given frequencies f = a . v +
    residual is a Gaussian process, and (X, f) is sampled exactly; averaging over the frequencies keeps the inequality by Jensen.
    The frequencies are drawn anew at every evaluation and shared by its samples.
    """

    inducing: InducingPosterior
    local: AbstractLocal
    num_frequencies: int = eqx.field(static=True, default=32)
    is_lower_bound: ClassVar[bool] = True

    def __check_init__(self):
        if self.num_frequencies < 1:
            raise ValueError(f"`num_frequencies` must be at least 1, but got {self.num_frequencies}.")

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        basis, mean = model.transition.basis(), model.transition.mean
        features = pathwise_features(noise.key, basis, self.num_frequencies)
        draw = pathwise_draw(basis, mean, features, self.inducing.sample(noise.inducing), noise.function.T)
        # a function needs no further noise: the chain is handed zeros
        quiet = noise._replace(function=0 * noise.states)
        return chain(draw, through_value, self.local.steps(model, window), model, window, quiet)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return num_features(model.transition, self.num_frequencies)

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        """The same function."""
        assert isinstance(rollout.draw, PathwiseDraw)
        return rollout.draw, None
