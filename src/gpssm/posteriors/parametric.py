"""q(X | f) with p(f | u) reduced to independent values given u: a parametric model of the dynamics."""

from typing import Any, ClassVar

from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.draws import AbstractDraw, DrawGivenInducing, FreshDraw
from gpssm.gp import InducingPosterior
from gpssm.model import GPSSM
from gpssm.posteriors.base import AbstractPosterior
from gpssm.posteriors.chain import Chain, Noise, Rollout, through_fresh_value
from gpssm.posteriors.local import AbstractLocal


class Parametric(AbstractPosterior):
    """States proposed from values of f that are tied to u alone, drawn independently of each other given u.

    Not a lower bound on the GPSSM's evidence: p(f | u) is replaced by the product of its marginals (the paper's equation after
    'even assuming, as they did'), in the model as in the posterior. It is one on the evidence of that parametric model.
    """

    inducing: InducingPosterior
    local: AbstractLocal
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
        """The same v, and values tied to it alone, as in the fit."""
        assert isinstance(rollout.draw, DrawGivenInducing)
        return FreshDraw(rollout.draw), None
