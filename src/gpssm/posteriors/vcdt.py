"""q(X | u) q(f): variationally coupled dynamics and trajectories (paper, Table 1, row 4)."""

from typing import Any, ClassVar

from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.draws import AbstractDraw, DrawGivenInducing
from gpssm.gp import InducingPosterior
from gpssm.model import GPSSM
from gpssm.posteriors.base import AbstractPosterior, fresh_function, given_values
from gpssm.posteriors.chain import Chain, Noise, Rollout, through_mean
from gpssm.posteriors.local import AbstractLocal


class VCDT(AbstractPosterior):
    """States coupled to the dynamics through the inducing outputs, at O(T) cost.

    One v is drawn for a whole trajectory, which then passes through the mean of f given v, as uncertain as v leaves f.

    A lower bound: q(X | u) p(f | u) q(u) is a distribution, its samples of (u, X) are exact, f given u is independent of X and is
    integrated out of every transition term in closed form. With `PriorSteps` it is the u-consistent prior transition.
    """

    inducing: InducingPosterior
    local: AbstractLocal
    is_lower_bound: ClassVar[bool] = True

    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        values = self.inducing.sample(noise.inducing)
        draw = DrawGivenInducing(model.transition.basis(), model.transition.mean, values)
        return chain(draw, through_mean, self.local.steps(model, window), model, window, noise)

    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        return num_steps

    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        """The same v; given it, f is independent of the trajectory, so the rest of f is drawn afresh, once."""
        assert isinstance(rollout.draw, DrawGivenInducing)
        return fresh_function(model, given_values(rollout.draw.values), num_steps, num_frequencies, key=key)
