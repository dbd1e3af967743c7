"""q(X) q(f) with states that pass through the mean of the GP (paper, Table 1, row 2)."""

from typing import Any, ClassVar

from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.draws import AbstractDraw, MarginalDraw
from gpssm.gp import InducingPosterior
from gpssm.model import GPSSM
from gpssm.posteriors.base import AbstractPosterior, fresh_function
from gpssm.posteriors.chain import Chain, Noise, Rollout, through_mean
from gpssm.posteriors.local import AbstractLocal


class FactorisedNonlinear(AbstractPosterior):
    """States proposed from the GP's mean, as uncertain as the GP is there, independent of the draw of f.

    A lower bound: q(X) is a Markov chain in its own right, with f integrated out of every step, so it is sampled exactly and
    independently of q(f); the terms are averaged under q(X) q(f).
    """

    inducing: InducingPosterior
    local: AbstractLocal
    is_lower_bound: ClassVar[bool] = True

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        draw = MarginalDraw(model.transition.basis(), model.transition.mean, self.inducing)
        return chain(draw, through_mean, self.local.steps(model, window), model, window, noise)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return num_steps

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        return fresh_function(model, self.inducing, num_steps, num_frequencies, key=key)
