"""The probabilistic recurrent state-space model of Doerr et al. (2018), as published and with its sampling corrected."""

from typing import Any, ClassVar

from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.draws import AbstractDraw, DrawGivenInducing, FreshDraw, MarginalDraw
from gpssm.gp import InducingPosterior
from gpssm.model import GPSSM
from gpssm.posteriors.base import AbstractPosterior
from gpssm.posteriors.chain import Chain, Noise, Rollout, through_fresh_value
from gpssm.posteriors.local import PriorSteps


class PRSSM(AbstractPosterior):
    """Prior transitions (A = I, b = 0, S = Q), with f drawn afresh at every step, as published.

    Not a lower bound: once u is integrated out the values of f along a trajectory are correlated, but they are sampled
    independently, so the states are not samples of the posterior whose bound is written down (paper, 'Comparison to PR-SSM').
    """

    inducing: InducingPosterior
    local: PriorSteps
    is_lower_bound: ClassVar[bool] = False

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        draw = MarginalDraw(model.transition.basis(), model.transition.mean, self.inducing)
        return chain(draw, through_fresh_value, self.local.steps(model, window), model, window, noise)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return num_steps

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        """f afresh at every step of the forecast too, as published."""
        assert isinstance(rollout.draw, MarginalDraw)
        return FreshDraw(rollout.draw), None


class PRSSMCorrected(AbstractPosterior):
    """Prior transitions with one v a trajectory: the dynamics stay the same along it.

    Not a lower bound on the GPSSM's evidence, since p(f | u) is still the product of its marginals; it is one on the evidence of
    that model. `VCDT` with `PriorSteps` is the bound with the full prior.
    """

    inducing: InducingPosterior
    local: PriorSteps
    is_lower_bound: ClassVar[bool] = False

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        values = self.inducing.sample(noise.inducing)
        draw = DrawGivenInducing(model.transition.basis(), model.transition.mean, values)
        return chain(draw, through_fresh_value, self.local.steps(model, window), model, window, noise)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return num_steps

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        assert isinstance(rollout.draw, DrawGivenInducing)
        return FreshDraw(rollout.draw), None
