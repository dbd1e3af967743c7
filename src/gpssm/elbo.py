"""The bound and its four terms.

    L = sum_t E log p(y_t | x_t) - KL(q(u) || p(u)) - KL(q(x_1) || p(x_1))
        - sum_t E KL(q(x_{t+1} | f, x_t) || p(x_{t+1} | f, x_t)),

summed over sequences, with the expectations estimated from sampled trajectories (paper, section 4).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from gpssm._precision import exact
from gpssm._types import PRNGKey
from gpssm.data import Window
from gpssm.devices import over_trajectories
from gpssm.model import GPSSM
from gpssm.noise import Scheme
from gpssm.params import unwrap
from gpssm.posteriors.base import AbstractPosterior, draw_noise
from gpssm.posteriors.chain import Chain, Noise, chain, emission_term
from gpssm.posteriors.chains import ChainName, chain_named


class Elbo(eqx.Module):
    """The four terms of the bound; `total` is emission - kl_transition - kl_inducing - kl_initial."""

    emission: Float[Array, "..."]
    kl_transition: Float[Array, "..."]
    kl_inducing: Float[Array, "..."]
    kl_initial: Float[Array, "..."]

    @property
    def total(self) -> Float[Array, "..."]:
        return self.emission - self.kl_transition - self.kl_inducing - self.kl_initial


@exact
def elbo(
    model: GPSSM,
    posterior: AbstractPosterior,
    windows: Window,
    *,
    key: PRNGKey,
    num_samples: int,
    scheme: Scheme = "plain",
    weight: float | Float[Array, ""] = 1.0,
    chain: ChainName = "auto",
) -> Elbo:
    """An unbiased estimate of the bound over `windows` [sequence, ...], from `num_samples` trajectories a window.

    `weight` multiplies all terms but KL(q(u) || p(u)): the number of windows there are over the number given, for mini-batches
    drawn uniformly. `chain` says how the trajectories are walked; all ways agree to rounding.
    """
    if num_samples < 1:
        raise ValueError(f"The bound needs at least one sample, but got num_samples={num_samples}.")
    if windows.outputs.ndim != 3:
        raise ValueError(
            "The bound is over windows [sequence, time, output], as Dataset.windows gives them, but these have the shape "
            f"{windows.outputs.shape}."
        )
    model, posterior = unwrap((model, posterior))
    num_windows, num_steps = windows.outputs.shape[:2]
    walk = chain_named(chain)

    def noise_of(key: PRNGKey) -> Noise:
        return draw_noise(posterior, model, num_steps, key=key, scheme=scheme, num_samples=num_samples)

    def terms(fitted: tuple[GPSSM, AbstractPosterior], windows: Window, noise: Noise) -> tuple[Array, Array, Array]:
        model, posterior = fitted
        return jax.vmap(lambda window, noise: terms_of_samples(model, posterior, window, noise, walk))(windows, noise)

    noise = jax.vmap(noise_of)(jr.split(key, num_windows))
    of_samples = over_trajectories(terms, (model, posterior), windows, noise)
    emission, kl_transition, kl_initial = (jnp.mean(term, axis=1) for term in of_samples)
    kl_inducing = posterior.inducing.kl() + model.emission.kl()
    return Elbo(weight * jnp.sum(emission), weight * jnp.sum(kl_transition), kl_inducing, weight * jnp.sum(kl_initial))


def terms_of_samples(
    model: GPSSM, posterior: AbstractPosterior, window: Window, noise: Noise, walk: Chain = chain
) -> tuple[Float[Array, " sample"], Float[Array, " sample"], Float[Array, " sample"]]:
    """Emission, transition and initial divergence of every trajectory that `walk` samples; model and posterior unwrapped."""

    def one_sample(*arrays: Array) -> tuple[Array, Array, Array]:
        rollout = posterior.rollout(model, window, Noise(*arrays, key=noise.key), walk)
        emission = emission_term(model, rollout.states, window)
        return emission, rollout.kl_transition, rollout.kl_initial

    return jax.vmap(one_sample)(noise.inducing, noise.states, noise.function)


def pieces(windows: Window, length: int) -> Window:
    """Cut sequences into windows [piece, ...] of `length` steps, whose bounds add up to that of the whole.

    Right for a posterior that is itself cut there (`FreeSteps(..., cut_every=length)`): a piece ends with the state after it,
    which it proposes and pays for, but whose output belongs to the next piece. Pieces that would lie wholly in the padding are
    left out.
    """
    if length < 1:
        raise ValueError(f"A piece needs at least one step, but got length={length}.")
    lengths = [int(n) for n in jnp.sum(windows.is_real, axis=1)]
    starts = [(i, start) for i, n in enumerate(lengths) for start in range(0, n, length)]

    def piece(index: int, start: int) -> Window:
        one = jax.tree.map(lambda leaf: leaf[index], windows)
        padding = max(0, start + length + 1 - len(one.outputs))

        def cut(array: Array) -> Array:
            return jnp.pad(array, ((0, padding), *[(0, 0)] * (array.ndim - 1)))[start : start + length + 1]

        is_observed = cut(one.is_observed).at[length:].set(False)
        start_index = jnp.asarray(start, one.start.dtype)
        return Window(cut(one.outputs), is_observed, cut(one.controls), cut(one.is_real), one.sequence, start_index)

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[piece(i, s) for i, s in starts])
