"""What every posterior family answers: a trajectory from q(X | f) q(f), and the draw of f that a forecast goes on with."""

from abc import abstractmethod
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.draws import AbstractDraw
from gpssm.gp import InducingPosterior
from gpssm.model import GPSSM, draw_function
from gpssm.noise import Scheme, standard_normals
from gpssm.posteriors.chain import Chain, Noise, Rollout


class AbstractPosterior(eqx.Module):
    """A family of q(X, f) = q(X | f) p(f | u) q(u) (paper, section 4).

    `is_lower_bound` says whether the objective is a lower bound on log p(Y); the class docstring argues it.
    """

    inducing: eqx.AbstractVar[InducingPosterior]
    is_lower_bound: ClassVar[bool]

    @abstractmethod
    def rollout(self, model: GPSSM, window: Window, noise: Noise, chain: Chain) -> Rollout:
        """One sample of a trajectory through `window`, walked by `chain`; model and self are unwrapped."""

    @abstractmethod
    def num_function_noises(self, model: GPSSM, num_steps: int) -> int:
        """How many standard normals a state needs for f itself, beyond those of v."""

    @abstractmethod
    def onward(
        self, model: GPSSM, rollout: Rollout, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
    ) -> tuple[AbstractDraw, Any]:
        """The draw of f, and its memory, with which `rollout` goes on for `num_steps` more.

        What the draw has left open is drawn exactly when `num_frequencies` is None, else from random features.
        """


def draw_noise(
    posterior: AbstractPosterior,
    model: GPSSM,
    num_steps: int,
    *,
    key: PRNGKey,
    scheme: Scheme,
    num_samples: int,
) -> Noise:
    """The randomness of `num_samples` trajectories, with a leading sample axis everywhere but on the shared key."""
    key_normals, key_shared = jr.split(key)
    states, inducing = model.num_states, model.transition.num_inducing
    shapes = ((states, inducing), (num_steps, states), (posterior.num_function_noises(model, num_steps), states))
    sizes = [rows * columns for rows, columns in shapes]
    normals = standard_normals(key_normals, scheme, num_samples, sum(sizes))
    pieces = jnp.split(normals, [sizes[0], sizes[0] + sizes[1]], axis=1)
    arrays = [piece.reshape(num_samples, *shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return Noise(*arrays, key=key_shared)


def fresh_function(
    model: GPSSM, inducing: InducingPosterior, num_steps: int, num_frequencies: int | None, *, key: PRNGKey
) -> tuple[AbstractDraw, Any]:
    """A draw of f from q(f), which has not been asked anything yet."""
    draw = draw_function(model.transition, inducing, num_steps, num_frequencies, key=key)
    return draw, draw.memory()


def given_values(values: jax.Array) -> InducingPosterior:
    """The q(v) that has drawn v already."""
    inducing = values.shape[-1]
    nothing = jnp.zeros((*values.shape, inducing), values.dtype)
    return eqx.tree_at(lambda q: (q.mean, q.chol), InducingPosterior.prior(values.shape[0], inducing), (values, nothing))
