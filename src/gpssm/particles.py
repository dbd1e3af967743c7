"""A particle filter for the GPSSM in which f is learnt in closed form along every particle's path.

Given a path x_1 ... x_t and v's prior q(v) = N(mean, C Cᵀ), what the path says of v is a Bayesian linear regression: with
v = mean + C w, b = Cᵀ a(x) and the residual of f integrated out of each step as in VCDT,

    x_{t+1} | path ~ N(m(x) + a . mean + b . E w,  Q + r(x) + b . P b),    P = (I + sum_t b bᵀ / (Q + r))^{-1}.

So a particle does not carry one draw of v, of which a few would be left after some hundred steps, but the whole Gaussian of v
given its path (Rao-Blackwell; marginalised particle filters: Schön, Gustafsson and Nordlund 2005; for GPSSMs: Berntorp 2021).
The mean is each particle's own and is resampled with it. The covariance depends on a path only through where it led, which the
particles nearly agree on: one is kept for all, from the mean of the particles' information. That is the one approximation besides
the number of particles; a step costs O(N D M² + D M³), and there are no N D M² numbers to be copied.

For linear-Gaussian emissions the proposal is p(x_{t+1} | path, y_{t+1}), the paper's 'natural choice' with f's variance added to
Q. The weight p(y_{t+1} | path) is then known before x_{t+1} is drawn, so particles are resampled before they move (fully adapted:
Pitt and Shephard 1999). Other emissions get the bootstrap proposal. Resampling is systematic, when fewer than half of the
particles are effective.

A few hundred particles can lose a state that the outputs show only through its successors: each step looks likely, and the error
grows. So with linear-Gaussian emissions an extended Kalman filter runs beside them, which keeps a whole covariance. Where either
finds the next output less likely than the other does by more than `LOST` nats, it starts again from the other's Gaussian.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from gpssm._precision import jit
from gpssm._types import PRNGKey
from gpssm.draws import num_features, pathwise_draw, pathwise_features
from gpssm.emissions import AbstractEmission, LinearGaussian, realise
from gpssm.gp import InducingBasis, InducingPosterior, marginal_moments
from gpssm.linalg import LOG_TWO_PI, covariance
from gpssm.model import GPSSM, walk
from gpssm.params import unwrap
from gpssm.posteriors.base import given_values

RESAMPLE_BELOW = 0.5  # of the particles effective
LOST = 10.0  # nats of one output
SMALL = 1e-10  # of the mean variance, added to a covariance that is to be factorised
# folded into the key; rows are numbered from 0
KEY_EMISSION, KEY_FEATURES, KEY_ORIGINS, KEY_BACKWARD = (2**31 - 1 - i for i in range(4))


class Particles(eqx.Module):
    """What is known of the state and of f after some rows. Without `learnt`, v is known: the mean of q(v)."""

    states: Float[Array, "particle state"]
    log_weights: Float[Array, " particle"]  # normalised
    learnt: Float[Array, "particle state inducing"] | None  # E w given the particle's path
    precision: Float[Array, "state inducing inducing"] | None  # of w, the particles' mean
    tracked_mean: Float[Array, " state"]  # of the extended Kalman filter
    tracked_covariance: Float[Array, "state state"]


class Rows(NamedTuple):
    """Rows to be filtered, in standard units; an axis may come before `time`."""

    outputs: Float[Array, "*origin time output"]
    is_observed: Bool[Array, "*origin time output"]
    controls: Float[Array, "*origin time control"]  # that of the row before, which acts up to this one
    is_real: Bool[Array, "*origin time"]
    is_new: Bool[Array, "*origin time"]  # to q(f): f is learnt from the step to this row
    index: Int[Array, "*origin time"]  # from the first row of the sequence; the randomness depends on it


class Passed(NamedTuple):
    """What one row of the filter tells, in standard units."""

    states: Float[Array, "*time particle state"]
    log_weights: Float[Array, "*time particle"]
    mean: Float[Array, "*time state"]  # of the state, this row's output included
    covariance: Float[Array, "*time state state"]
    predicted_mean: Float[Array, "*time output"]  # of the output, from the rows before
    predicted_covariance: Float[Array, "*time output output"]
    log_density: Float[Array, "*time"]
    effective_size: Float[Array, "*time"]
    forward_mean: Float[Array, "*time particle state"]  # of this state, given each particle of the row before
    forward_variance: Float[Array, "*time particle state"]


class _Forward(NamedTuple):
    """Each particle's next state before its output is seen, and what that will say of f."""

    mean: Array  # [particle, state]
    chol: Array  # [particle, state, state]
    noise_variance: Array  # [particle, state], Q + r
    variance: Array  # with f's own
    direction: Array | None  # [particle, state, inducing], b
    gain: Array | None  # P b


class _Look(NamedTuple):
    """One particle's next state and output, both Gaussian."""

    log_density: Array
    mean: Array  # of the state, the output seen
    covariance: Array
    gain: Array  # [state, output]
    output_mean: Array
    output_covariance: Array


class Filter(eqx.Module):
    """The model, prepared: everything unwrapped (hence of no declared type) and factorised."""

    model: Any  # GPSSM
    basis: InducingBasis
    inducing: Any  # InducingPosterior
    emission: Any  # AbstractEmission
    key: PRNGKey

    @classmethod
    def of(cls, model: GPSSM, inducing: InducingPosterior, key: PRNGKey) -> "Filter":
        model, inducing = unwrap((model, inducing))
        emission = realise(model.emission, jr.fold_in(key, KEY_EMISSION))
        return cls(model, model.transition.basis(), inducing, emission, key)

    def run(self, particles: Particles, rows: Rows) -> tuple[Particles, Passed]:
        """All rows in order; padding changes nothing."""
        shapes = jax.eval_shape(lambda p, r: self.advance(p, r), particles, jax.tree.map(lambda leaf: leaf[0], rows))[1]

        def step(particles: Particles, row: Rows) -> tuple[Particles, Passed]:
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return jax.lax.cond(row.is_real, lambda p, r: self.advance(p, r), lambda p, _: (p, nothing), particles, row)

        return jax.lax.scan(step, particles, rows)

    def advance(self, particles: Particles, row: Rows) -> tuple[Particles, Passed]:
        """To one row: look at its output, resample, move, learn."""
        key_resample, key_state, key_output, key_predicted = jr.split(jr.fold_in(self.key, row.index), 4)
        forward = self._forward(particles, row)
        is_optimal = isinstance(self.emission, LinearGaussian)
        before = particles.log_weights
        tracked_mean, tracked_covariance = particles.tracked_mean, particles.tracked_covariance
        if is_optimal:
            tracked = self._tracked(particles, row)
            look = jax.vmap(lambda m, c: _look(self.emission, m, c, row.outputs, row.is_observed))(forward.mean, forward.chol)
            seen, log_density = _weighted(before, look.log_density)
            mean, covariance = _moments(jnp.exp(seen), look.mean, look.covariance)
            predicted_mean, predicted_covariance = _moments(jnp.exp(before), look.output_mean, look.output_covariance)
            size = _effective_size(seen)
        else:
            look, seen, size = None, before, _effective_size(before)
        chosen, log_weights = _resampled(key_resample, seen, size)
        moved, learnt, look = jax.tree.map(lambda leaf: leaf[chosen], (forward, particles.learnt, look))
        states = self._sample(moved, look, row, key_state, key_output)
        if is_optimal:
            gap = tracked.log_density - log_density
            is_lost = jnp.isfinite(tracked.log_density) & ~(gap < LOST)

            def rescued(old: Array, new: Array) -> Array:
                return jnp.where(is_lost, jnp.broadcast_to(new, old.shape), old)

            noise = jr.normal(jr.fold_in(key_state, 1), states.shape, states.dtype)
            states = rescued(states, tracked.mean[None] + noise @ _root(tracked.covariance).T)
            log_weights = rescued(log_weights, -jnp.log(jnp.asarray(len(states), states.dtype)))
            learnt = None if learnt is None else rescued(learnt, jnp.mean(learnt, axis=0)[None])
            log_density, size = rescued(log_density, tracked.log_density), rescued(size, jnp.asarray(len(states), size.dtype))
            mean, covariance = rescued(mean, tracked.mean), rescued(covariance, tracked.covariance)
            predicted_mean = rescued(predicted_mean, tracked.output_mean)
            predicted_covariance = rescued(predicted_covariance, tracked.output_covariance)
            row = row._replace(is_new=row.is_new & ~is_lost)
            is_tracking = gap > -LOST
            tracked_mean = jnp.where(is_tracking, tracked.mean, mean)
            tracked_covariance = jnp.where(is_tracking, tracked.covariance, covariance)
        else:
            predicted_mean, predicted_covariance = self._predicted(key_predicted, states, log_weights)
            log_likelihood = jax.vmap(lambda x: self.emission.log_density(x, row.outputs, row.is_observed))(states)
            log_weights, log_density = _weighted(log_weights, log_likelihood)
            mean, covariance = _moments(jnp.exp(log_weights), states, None)
            size = _effective_size(log_weights)
        learnt, precision = _learn(learnt, particles.precision, moved, states, log_weights, row)
        passed = Passed(
            states=states,
            log_weights=log_weights,
            mean=mean,
            covariance=covariance,
            predicted_mean=predicted_mean,
            predicted_covariance=predicted_covariance,
            log_density=log_density,
            effective_size=size,
            forward_mean=forward.mean,
            forward_variance=forward.variance,
        )
        return Particles(states, log_weights, learnt, precision, tracked_mean, tracked_covariance), passed

    def _tracked(self, particles: Particles, row: Rows) -> _Look:
        """One step of the extended Kalman filter: f is linear about its mean, and as uncertain as q(f) has it there."""
        model, inducing = self.model, self.inducing

        def mean_and_variance(state: Array) -> tuple[Array, Array]:
            point = jnp.concatenate([state, row.controls])
            return marginal_moments(self.basis.project(point), model.transition.mean(point), inducing)

        mean, variance = mean_and_variance(particles.tracked_mean)
        slope = jax.jacfwd(lambda state: mean_and_variance(state)[0])(particles.tracked_mean)
        spread = slope @ particles.tracked_covariance @ slope.T + jnp.diag(variance + model.process_scale**2)
        is_first = row.index == 0
        mean = jnp.where(is_first, model.initial_mean, mean)
        chol = jnp.where(is_first, model.initial_chol, _root(spread))
        return _look(self.emission, mean, chol, row.outputs, row.is_observed)

    def _forward(self, particles: Particles, row: Rows) -> _Forward:
        """x_{t+1} given each particle's path; the first row's state is the model's initial one."""
        model = self.model
        count, size = particles.states.shape
        controls = jnp.broadcast_to(row.controls, (count, len(row.controls)))
        points = jnp.concatenate([particles.states, controls], axis=1)
        projection = jax.vmap(self.basis.project)(points)
        weights = jnp.broadcast_to(projection.weights, (count, *self.inducing.mean.shape))
        mean = jax.vmap(model.transition.mean)(points) + jnp.einsum("ndm,dm->nd", weights, self.inducing.mean)
        noise = jnp.broadcast_to(projection.residual_variance, (count, size)) + model.process_scale[None] ** 2
        variance, direction, gain = noise, None, None
        if particles.learnt is not None and particles.precision is not None:
            direction = jnp.einsum("dmk,ndm->ndk", self.inducing.chol, weights)
            gain = jnp.einsum("dkl,ndl->ndk", _inverse(particles.precision), direction)
            mean = mean + jnp.sum(direction * particles.learnt, axis=-1)
            variance = noise + jnp.maximum(jnp.sum(direction * gain, axis=-1), 0.0)
        is_first = row.index == 0
        mean = jnp.where(is_first, jnp.broadcast_to(model.initial_mean, mean.shape), mean)
        chol = jax.vmap(jnp.diag)(jnp.sqrt(variance))
        chol = jnp.where(is_first, jnp.broadcast_to(model.initial_chol, chol.shape), chol)
        return _Forward(mean, chol, noise, variance, direction, gain)

    def _sample(self, forward: _Forward, look: _Look | None, row: Rows, key_state: PRNGKey, key_output: PRNGKey) -> Array:
        """Draws of x_{t+1}; with a look, corrected to the output by Matheron's rule, which needs no further factor."""
        noise = jr.normal(key_state, forward.mean.shape, forward.mean.dtype)
        states = forward.mean + jnp.einsum("nij,nj->ni", forward.chol, noise)
        if look is None:
            return states
        outputs = jax.vmap(self.emission.sample)(jr.split(key_output, len(states)), states)
        gap = jnp.where(row.is_observed[None], row.outputs[None] - outputs, 0.0)
        return states + jnp.einsum("nip,np->ni", look.gain, gap)

    def _predicted(self, key: PRNGKey, states: Array, log_weights: Array) -> tuple[Array, Array]:
        """Mean and covariance of the output, from one draw of it a particle."""
        outputs = jax.vmap(self.emission.sample)(jr.split(key, len(states)), states)
        mean = jnp.exp(log_weights) @ jax.vmap(self.emission.mean)(states)
        return mean, _moments(jnp.exp(log_weights), outputs, None)[1]

    def start(self, num_particles: int) -> Particles:
        """Before the first row; the states are set by it."""
        states, inducing = self.inducing.mean.shape
        dtype = self.inducing.mean.dtype
        identity = jnp.broadcast_to(jnp.eye(inducing, dtype=dtype), (states, inducing, inducing))
        return _fresh(self.model, num_particles, jnp.zeros((num_particles, states, inducing), dtype), identity)

    def draws(self, particles: Particles, num_samples: int, *, key: PRNGKey) -> tuple[Array, Array]:
        """Samples of the state [sample, state] and of v [sample, state, inducing], jointly."""
        key_choice, key_values = jr.split(key)
        chosen = systematic(key_choice, particles.log_weights, num_samples)
        values = jnp.broadcast_to(self.inducing.mean, (num_samples, *self.inducing.mean.shape))
        if particles.learnt is not None and particles.precision is not None:
            noise = jr.normal(key_values, values.shape, values.dtype)
            whitened = particles.learnt[chosen] + jnp.einsum("dlk,ndl->ndk", _inverse_factor(particles.precision), noise)
            values = values + jnp.einsum("dmk,ndk->ndm", self.inducing.chol, whitened)
        return particles.states[chosen], values


def _fresh(model: Any, num_particles: int, learnt: Array | None, precision: Array | None) -> Particles:
    states = jnp.broadcast_to(model.initial_mean, (num_particles, len(model.initial_mean)))
    log_weights = jnp.full((num_particles,), -jnp.log(num_particles), states.dtype)
    return Particles(states, log_weights, learnt, precision, model.initial_mean, model.initial_chol @ model.initial_chol.T)


def _root(covariance: Array) -> Array:
    """A Cholesky factor, of a covariance that rounding may have left singular."""
    symmetric = 0.5 * (covariance + covariance.T)
    return jnp.linalg.cholesky(
        symmetric + SMALL * jnp.trace(symmetric) / len(symmetric) * jnp.eye(len(symmetric), dtype=symmetric.dtype)
    )


def _look(emission: Any, mean: Array, chol: Array, output: Array, is_observed: Array) -> _Look:
    """Condition N(mean, L Lᵀ) on the observed channels of one output of a linear-Gaussian emission, exactly."""
    matrix = jnp.where(is_observed[:, None], emission.matrix, 0.0)
    noise = covariance(emission.chol_noise)
    noise = jnp.diag(noise) if noise.ndim == 1 else noise
    both = is_observed[:, None] & is_observed[None, :]
    before = chol @ chol.T
    factor = jnp.linalg.cholesky(matrix @ before @ matrix.T + jnp.where(both, noise, jnp.eye(len(noise), dtype=noise.dtype)))
    output_mean = emission.mean(mean)
    white = solve_triangular(factor, jnp.where(is_observed, output - output_mean, 0.0), lower=True)
    half_gain = solve_triangular(factor, matrix @ before, lower=True)
    log_scale = jnp.sum(jnp.log(jnp.diagonal(factor))) + 0.5 * LOG_TWO_PI * jnp.sum(is_observed)
    gain = solve_triangular(factor, half_gain, lower=True, trans=1).T
    output_covariance = emission.matrix @ before @ emission.matrix.T + noise
    log_density = -0.5 * jnp.sum(white**2) - log_scale
    return _Look(log_density, mean + half_gain.T @ white, before - half_gain.T @ half_gain, gain, output_mean, output_covariance)


def _learn(
    learnt: Array | None, precision: Array | None, forward: _Forward, states: Array, log_weights: Array, row: Rows
) -> tuple[Array | None, Array | None]:
    """The regression's update with the step to `states`, unless q(f) rests on it already."""
    if learnt is None or precision is None or forward.direction is None or forward.gain is None:
        return None, None
    counts = (row.is_new & (row.index > 0)).astype(states.dtype)
    innovation = (states - forward.mean) / forward.variance
    share = jnp.exp(log_weights)[:, None] / forward.noise_variance
    information = jnp.einsum("ndk,ndl->dkl", share[..., None] * forward.direction, forward.direction)
    return learnt + counts * forward.gain * innovation[..., None], precision + counts * information


def _inverse(precision: Array) -> Array:
    factor = _inverse_factor(precision)
    return jnp.einsum("dmk,dml->dkl", factor, factor)


def _inverse_factor(precision: Array) -> Array:
    """The inverses of the Cholesky factors of a stack of precisions.

    Forward substitution row by row for all of them at once: at every step of a filter a BLAS with threads of its own, called
    for one small triangle after another, waits longer for the threads than it computes.
    """
    factor = jnp.linalg.cholesky(precision)
    identity = jnp.eye(precision.shape[-1], dtype=precision.dtype)

    def substitute(i: Array, inverse: Array) -> Array:
        rest = identity[i][None] - jnp.einsum("dk,dkl->dl", factor[:, i], inverse)
        return inverse.at[:, i].set(rest / factor[:, i, i][:, None])

    return jax.lax.fori_loop(0, len(identity), substitute, jnp.zeros_like(factor))


def _weighted(log_weights: Array, log_likelihood: Array) -> tuple[Array, Array]:
    """Normalised weights and the log of the average likelihood; a particle that is not finite is dead.

    Where all are dead the density says so, and the weights stay as they were.
    """
    joint = log_weights + jnp.where(jnp.isnan(log_likelihood), -jnp.inf, log_likelihood)
    total = logsumexp(joint)
    return jnp.where(jnp.isfinite(total), joint - total, log_weights), total


def _resampled(key: PRNGKey, log_weights: Array, effective_size: Array) -> tuple[Array, Array]:
    """Which particles go on, and with what weights."""
    count = len(log_weights)
    is_poor = effective_size < RESAMPLE_BELOW * count
    chosen = jnp.where(is_poor, systematic(key, log_weights, count), jnp.arange(count))
    return chosen, jnp.where(is_poor, jnp.full_like(log_weights, -jnp.log(count)), log_weights)


def systematic(key: PRNGKey, log_weights: Float[Array, " particle"], num: int) -> Int[Array, " sample"]:
    """Indices of `num` equally weighted samples of the particles, as even as they can be."""
    edges = jnp.cumsum(jnp.exp(log_weights))
    positions = (jnp.arange(num) + jr.uniform(key, dtype=edges.dtype)) / num * edges[-1]
    return jnp.clip(jnp.searchsorted(edges, positions, side="right"), 0, len(edges) - 1)


def _effective_size(log_weights: Array) -> Array:
    return jnp.exp(-logsumexp(2 * log_weights))


def _moments(weights: Array, means: Array, covariances: Array | None) -> tuple[Array, Array]:
    """Mean and covariance of a mixture."""
    mean = weights @ means
    spread = means - mean[None]
    total = jnp.einsum("n,ni,nj->ij", weights, spread, spread)
    return mean, total if covariances is None else total + jnp.einsum("n,nij->ij", weights, covariances)


@jit
def start_filter(model: GPSSM, inducing: InducingPosterior, num_particles: int, key: PRNGKey) -> Particles:
    """The particles before the first row."""
    return Filter.of(model, inducing, key).start(num_particles)


@jit
def run_filter(
    model: GPSSM, inducing: InducingPosterior, particles: Particles, rows: Rows, key: PRNGKey
) -> tuple[Particles, Passed]:
    """`Filter.run`, compiled."""
    return Filter.of(model, inducing, key).run(particles, rows)


@jit
def function_draws(
    model: GPSSM, inducing: InducingPosterior, particles: Particles, num_samples: int, key: PRNGKey
) -> tuple[Float[Array, "sample state"], Float[Array, "sample state inducing"]]:
    """`Filter.draws`, compiled."""
    return Filter.of(model, inducing, key).draws(particles, num_samples, key=key)


@jit
def run_and_forecast(
    model: GPSSM,
    inducing: InducingPosterior,
    particles: Particles,
    segments: Rows,
    origins: Int[Array, " origin"],
    controls: Float[Array, "origin steps control"],
    num_samples: int,
    num_frequencies: int,
    key: PRNGKey,
) -> tuple[Particles, Float[Array, "origin sample steps state"], Float[Array, "origin sample steps output"], AbstractEmission]:
    """Filter segment after segment [origin, time], and forecast from the end of each.

    Every sample goes on with its own f through the horizon: v from its particle's Gaussian, the residual from random features.
    The randomness of an origin depends on its row and not on which others are asked for.
    """
    filtering = Filter.of(model, inducing, key)
    basis, plain = filtering.basis, filtering.model
    features = pathwise_features(jr.fold_in(key, KEY_FEATURES), basis, num_frequencies)
    width = num_features(plain.transition, num_frequencies)
    keys = jax.vmap(lambda origin: jr.split(jr.fold_in(jr.fold_in(key, KEY_ORIGINS), origin)))(origins)

    def to_origin(particles: Particles, inputs: tuple) -> tuple[Particles, tuple]:
        rows, key = inputs
        particles = filtering.run(particles, rows)[0]
        return particles, filtering.draws(particles, num_samples, key=key)

    def onward(state: Array, values: Array, controls: Array, key: PRNGKey) -> tuple[Array, Array]:
        key_weights, key_walk, key_outputs = jr.split(key, 3)
        weights = jr.normal(key_weights, (len(values), width), values.dtype)
        draw = pathwise_draw(basis, plain.transition.mean, features, values, weights)
        states = walk(draw, None, state, controls, plain.process_scale, key=key_walk)[1:]
        if isinstance(filtering.emission, LinearGaussian):  # its noise is added in closed form
            return states, jax.vmap(filtering.emission.mean)(states)
        return states, jax.vmap(filtering.emission.sample)(jr.split(key_outputs, len(states)), states)

    particles, (states, values) = jax.lax.scan(to_origin, particles, (segments, keys[:, 0]))
    sample_keys = jax.vmap(lambda key: jr.split(key, num_samples))(keys[:, 1])
    horizons = jax.vmap(jax.vmap(onward, in_axes=(0, 0, None, 0)))(states, values, controls, sample_keys)
    return particles, *horizons, filtering.emission


@jit
def sample_paths(
    model: GPSSM, values: Float[Array, "sample state inducing"], rows: Rows, num_particles: int, batch_size: int, key: PRNGKey
) -> tuple[Float[Array, "sample time state"], Float[Array, "sample time output"]]:
    """A path of states for each v, given all outputs, and the outputs with their gaps filled.

    Given v the states are Markov, so each v gets a filter of its own and one backward simulation through it (Godsill, Doucet and
    West 2004).
    """

    def one_path(inputs: tuple) -> tuple[Array, Array]:
        values, key = inputs
        key_filter, key_path, key_outputs = jr.split(key, 3)
        filtering = Filter.of(model, given_values(values), key_filter)
        _, passed = filtering.run(_fresh(filtering.model, num_particles, None, None), rows)
        states = _backward(passed, rows.is_real, key_path)
        draw_outputs = jax.vmap(lambda k, x, y, seen: _filled(filtering.emission, k, x, y, seen))
        return states, draw_outputs(jr.split(key_outputs, len(states)), states, rows.outputs, rows.is_observed)

    return jax.lax.map(one_path, (values, jr.split(key, len(values))), batch_size=batch_size)


def _backward(passed: Passed, is_real: Array, key: PRNGKey) -> Array:
    """A path from the smoothing distribution, drawn from the last row to the first."""

    def step(carry: tuple, inputs: tuple) -> tuple:
        following, has_following, mean, variance = carry
        states, log_weights, is_real, key, forward_mean, forward_variance = inputs
        gap = following[None] - mean
        transition = -0.5 * jnp.sum(gap**2 / variance + jnp.log(variance), axis=1)
        chosen = jr.categorical(key, log_weights + jnp.where(has_following, transition, 0.0))
        state = jnp.where(is_real, states[chosen], following)
        return (state, has_following | is_real, forward_mean, jnp.where(is_real, forward_variance, 1.0)), state

    keys = jr.split(key, len(is_real))
    last = (passed.states[-1, 0], jnp.zeros((), bool), passed.states[-1], jnp.ones_like(passed.states[-1]))
    inputs = (passed.states, passed.log_weights, is_real, keys, passed.forward_mean, passed.forward_variance)
    return jax.lax.scan(step, last, inputs, reverse=True)[1]


def _filled(emission: Any, key: PRNGKey, state: Array, output: Array, is_observed: Array) -> Array:
    """The output, what is missing drawn given the state and, for Gaussian noise, the channels that are there."""
    drawn = emission.sample(key, state)
    chol: Any = emission.chol_noise if isinstance(emission, LinearGaussian) else jnp.zeros(0)
    if chol.ndim == 2:
        noise = covariance(chol)
        both = is_observed[:, None] & is_observed[None, :]
        masked = jnp.where(both, noise, jnp.eye(len(noise), dtype=noise.dtype))
        drawn = drawn + noise @ jnp.linalg.solve(masked, jnp.where(is_observed, output - drawn, 0.0))
    return jnp.where(is_observed, output, drawn)
