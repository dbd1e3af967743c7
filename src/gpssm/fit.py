"""Maximise the bound: Adam on everything, or natural gradients on q(u) and Adam on the rest.

The work is done in blocks of compiled steps; between blocks the program looks at the bound, reports, saves and decides whether to
go on. The randomness of a step depends on the key and the number of the step alone, so a fit that is resumed from a checkpoint
continues bit for bit.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from gpssm._precision import jit
from gpssm._types import PRNGKey
from gpssm.agreement import check_fits_together, check_is_dataset, check_something_moves
from gpssm.atomic import present_folder
from gpssm.data import Dataset, Scaling, Window
from gpssm.devices import everywhere, here
from gpssm.elbo import Elbo, elbo, pieces
from gpssm.free_run import has_free_run, posterior_after, stretches
from gpssm.gp import InducingPosterior
from gpssm.initialise import Start, StartSettings, initialise
from gpssm.model import GPSSM
from gpssm.noise import Scheme, check_scheme
from gpssm.params import AbstractParameter, LowerTriangular, trainable, unwrap
from gpssm.posteriors.base import AbstractPosterior
from gpssm.posteriors.chains import ChainName, chain_named, chain_of
from gpssm.posteriors.local import FreeSteps
from gpssm.progress import Report, reporter
from gpssm.result import FitResult, History, Status
from gpssm.save import load, save

INITIALISATION = 2**31 - 1  # folded into the key; the steps are numbered from 0
FREE_RUN = 2**31 - 3
STRETCHES_AT_ONCE = 48  # of a free run, in one step
SKIPS_BEFORE_FAILURE = 20  # consecutive steps without a finite gradient


@dataclass(frozen=True)
class FitSettings:
    """How to optimise. The defaults suit a few hundred to a few thousand rows."""

    num_steps: int = 800
    num_samples: int = 8
    scheme: Scheme = "antithetic"
    learning_rate: float = 0.01
    warmup_steps: int = 20
    final_fraction: float = 0.1  # of the learning rate, reached along a cosine over the last quarter of the steps
    natural_gradient: float | None = None  # the step size for q(u); None leaves q(u) to Adam
    batch_size: int | None = None  # sequences, or pieces of them where the posterior is cut
    by_pieces: bool = False
    block_steps: int = 50
    tolerance: float | None = 1e-4  # nats an observation that a stretch of `patience` blocks must gain; None never stops
    patience: int = 4
    max_gradient_norm: float = 100.0
    process_factor: float = 1.0  # of the standard deviation learnt for the process noise; `select` finds it by validation
    chain: ChainName = "auto"  # the fastest that applies; "plain" is the reference that serves every model

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("num_steps", "num_samples", "block_steps", "patience", "warmup_steps")}
        counts |= {} if self.batch_size is None else {"batch_size": self.batch_size}
        for name, count in counts.items():
            smallest = 0 if name == "warmup_steps" else 1
            if not isinstance(count, int | np.integer):
                raise ValueError(f"`{name}` must be a whole number, but got {count!r}.")
            if count < smallest:
                raise ValueError(f"`{name}` must be at least {smallest}, but got {count}.")
        for name in ("learning_rate", "max_gradient_norm", "process_factor"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"`{name}` must be positive, but got {getattr(self, name)}.")
        for name in ("natural_gradient", "final_fraction"):
            value = getattr(self, name)
            if (value is None and name != "natural_gradient") or (value is not None and not 0 < value <= 1):
                raise ValueError(f"`{name}` must lie in (0, 1], but got {value}.")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"`tolerance` must be a number from 0, or None to never stop early, but got {self.tolerance}.")
        check_scheme(self.scheme)
        chain_named(self.chain)


class TrainingState(NamedTuple):
    """Everything a step changes."""

    params: Any
    good: Any  # the parameters of the last finite evaluation
    optimiser: Any
    step: Int[Array, ""]
    num_bad: Int[Array, ""]  # consecutive steps without a finite gradient
    num_skipped: Int[Array, ""]


def fit(
    data: Dataset,
    model: GPSSM | None = None,
    posterior: AbstractPosterior | None = None,
    *,
    key: PRNGKey,
    scaling: Scaling | None = None,
    settings: FitSettings | None = None,
    start: StartSettings | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool | Report = False,
) -> FitResult:
    """Fit a GPSSM to `data` by maximising the bound.

    Without `model` and `posterior` they come from `initialise` and a `free_run`, as `start` says. The model lives in the units of
    `scaling`, which standardises `data` unless another is given. Numerical failure is told by the result's `status`, and the
    last good parameters are kept. With `checkpoint` the state is saved to that folder between blocks; `resume` goes on from
    there. `progress` shows a bar, or calls a function with the `History` after every block.
    """
    check_is_dataset(data)
    settings = settings or FitSettings()
    scaling = scaling or Scaling.of(data)
    if (model is None) != (posterior is None) or (model is not None and start is not None):
        raise ValueError(
            "Give both a model and a posterior to fit them, or neither and, if you like, `start` to have them built."
        )
    if model is None or posterior is None:
        built = initialise(data, key=jr.fold_in(key, INITIALISATION), scaling=scaling, settings=start)
        model, posterior = free_run(data, built, start, key=key, scaling=scaling)
    check_fits_together(data, scaling, model, posterior)
    check_something_moves(model, posterior)
    windows = _training_windows(data.windows(scaling), posterior, settings)
    if settings.natural_gradient is not None:
        posterior = _with_plain_inducing(posterior)
    chain = chain_of(unwrap(model), unwrap(posterior), jax.tree.map(lambda leaf: leaf[0], windows), settings.chain)
    params, static = eqx.partition((model, posterior), trainable((model, posterior)))
    state, history = _start(params, settings), History.empty(model.num_states)
    if resume:
        state, history = _resumed(checkpoint, state, data, settings, key)
    state, run = everywhere((state, _Blocks(static, windows, settings, key, _num_observed(windows))))
    status = _status(state, history, settings, run.num_observed) if resume else None
    with reporter(progress, settings.num_steps) as show:
        while status is None:
            began = time.perf_counter()
            try:
                state, terms = run.block(state)
            except KeyboardInterrupt:
                status = Status.INTERRUPTED
                break
            seconds = time.perf_counter() - began
            history = history.with_block(int(state.step), terms, _process_scale(state.good, static), seconds)
            status = _status(state, history, settings, run.num_observed)
            if checkpoint is not None:
                save(checkpoint, _Checkpoint(state, history, _fingerprint(data, settings, key)))
            show(history)
    fitted, approximation = eqx.combine(here(state.good), static)
    approximation = _with_constrained_inducing(approximation)
    num_skipped = int(state.num_skipped)
    fitted = with_process_factor(fitted, settings.process_factor)
    return FitResult(fitted, approximation, scaling, data, history, status, asdict(settings), num_skipped, chain)


def free_run(
    data: Dataset, start: Start, settings: StartSettings | None = None, *, key: PRNGKey, scaling: Scaling
) -> tuple[GPSSM, AbstractPosterior]:
    """Model and posterior of a start, after f has learnt to bridge stretches of `settings.free_run` rows alone.

    Where there is no free run (0 rows, or an emission without a closed form) they are those of the start.
    """
    settings = settings or StartSettings()
    if not has_free_run(start, settings):
        return start.model, start.posterior
    cut, model, posterior = stretches(data, start, settings.free_run)
    at_once = None if cut.num_sequences <= STRETCHES_AT_ONCE else STRETCHES_AT_ONCE
    chosen = FitSettings(num_steps=settings.free_run_steps, batch_size=at_once, tolerance=None, block_steps=200)
    done = fit(cut, model, posterior, key=jr.fold_in(key, FREE_RUN), scaling=scaling, settings=chosen)
    if done.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    inducing = done.posterior.inducing
    return done.model, posterior_after(start, settings, done.model, inducing, data.windows(scaling))


def with_process_factor(model: GPSSM, factor: float) -> GPSSM:
    """The model with the standard deviation of its process noise times `factor`."""
    if factor == 1:
        return model
    kind: Any = type(model.process_scale) if isinstance(model.process_scale, AbstractParameter) else jnp.asarray
    return eqx.tree_at(
        lambda m: m.process_scale,
        model,
        kind(factor * unwrap(model.process_scale)),
        is_leaf=lambda leaf: leaf is model.process_scale,
    )


class _Checkpoint(NamedTuple):
    state: TrainingState
    history: History
    fingerprint: dict


class _Blocks(eqx.Module):
    """The compiled block of steps, with what it needs."""

    static: Any
    windows: Window
    settings: FitSettings = eqx.field(static=True)
    key: PRNGKey
    num_observed: Float[Array, ""]

    def block(self, state: TrainingState) -> tuple[TrainingState, Elbo]:
        """Up to `block_steps` steps; the terms are means over the steps that were finite."""
        num_steps = min(self.settings.block_steps, self.settings.num_steps - int(state.step))
        state, (terms, is_finite) = _run_steps(self, state, everywhere(jnp.asarray(num_steps)))
        finite = np.asarray(is_finite)
        return jax.block_until_ready(state), jax.tree.map(
            lambda term: jnp.asarray(np.mean(np.asarray(term)[finite]) if finite.any() else np.nan), terms
        )

    def step(self, state: TrainingState) -> tuple[TrainingState, tuple[Elbo, Bool[Array, ""]]]:
        settings = self.settings
        key_batch, key_bound = jr.split(jr.fold_in(self.key, state.step))
        windows, weight = self.windows, 1.0
        if settings.batch_size is not None and settings.batch_size < len(windows.sequence):
            chosen = jr.choice(key_batch, len(windows.sequence), (settings.batch_size,), replace=False)
            windows = jax.tree.map(lambda leaf: leaf[chosen], windows)
            weight = len(self.windows.sequence) / settings.batch_size

        def loss(params: Any) -> tuple[Array, Elbo]:
            model, posterior = eqx.combine(params, self.static)
            terms = elbo(
                model,
                posterior,
                windows,
                key=key_bound,
                num_samples=settings.num_samples,
                scheme=settings.scheme,
                weight=weight,
                chain=settings.chain,
            )
            # natural gradients treat KL(q(u) || p(u)) in closed form; that of a GP in the emission stays
            in_closed_form = 0.0 if settings.natural_gradient is None else unwrap(posterior).inducing.kl()
            objective = terms.total + in_closed_form
            return -objective / self.num_observed, terms

        gradients, terms = jax.grad(loss, has_aux=True)(state.params)
        is_finite = jnp.isfinite(terms.total) & jnp.all(
            jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradients)])
        )
        return self._advance(state, gradients, is_finite), (terms, is_finite)

    def _advance(self, state: TrainingState, gradients: Any, is_finite: Bool[Array, ""]) -> TrainingState:
        """The next state; a step whose gradient is not finite goes back to the last good parameters."""
        settings = self.settings
        scale = learning_rate(settings, state.step)
        rest = _without_inducing(gradients) if settings.natural_gradient is not None else gradients
        updates, optimiser = _adam(settings).update(rest, state.optimiser)
        params = eqx.apply_updates(state.params, jax.tree.map(lambda u: scale * u, updates))
        if settings.natural_gradient is not None:
            rate = settings.natural_gradient * scale / settings.learning_rate
            inducing = natural_step(state.params[1].inducing, gradients[1].inducing, rate, self.num_observed)
            params = eqx.tree_at(lambda p: p[1].inducing, params, inducing)

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        return TrainingState(
            choose(params, state.good),
            choose(state.params, state.good),
            choose(optimiser, state.optimiser),
            state.step + 1,
            jnp.where(is_finite, jnp.zeros_like(state.num_bad), state.num_bad + 1),
            state.num_skipped + (~is_finite).astype(state.num_skipped.dtype),
        )


@jit
def _run_steps(blocks: _Blocks, state: TrainingState, num_steps: Int[Array, ""]) -> tuple[TrainingState, tuple]:
    """Some steps, and a row of what each told; the rows that a shorter block leaves empty count as not finite.

    A shorter block needs no program of its own.
    """
    shapes = jax.eval_shape(blocks.step, state)[1]
    told = jax.tree.map(lambda leaf: jnp.zeros((blocks.settings.block_steps, *leaf.shape), leaf.dtype), shapes)

    def one(row: Array, carry: tuple) -> tuple:
        state, told = carry
        state, values = blocks.step(state)
        return state, jax.tree.map(lambda rows, value: rows.at[row].set(value), told, values)

    return jax.lax.fori_loop(0, num_steps, one, (state, told))


def learning_rate(settings: FitSettings, step: Int[Array, ""]) -> Float[Array, ""]:
    """Warm-up, a plateau, and a cosine over the last quarter of the steps."""
    warm = jnp.minimum(1.0, (step + 1) / max(1, settings.warmup_steps))
    tail = max(1, settings.num_steps // 4)
    along = jnp.clip((step - (settings.num_steps - tail)) / tail, 0.0, 1.0)
    decay = settings.final_fraction + (1 - settings.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * along))
    return settings.learning_rate * warm * decay


def natural_step(
    q: InducingPosterior, gradients: InducingPosterior, rate: Float[Array, ""], num_observed: int | Float[Array, ""]
) -> InducingPosterior:
    """A natural-gradient step on q(v), in the precision, with the second-order term that keeps it positive definite.

    `gradients` are those of -(bound + KL) / num_observed with respect to the mean and the (full) factor. With G the gradient of
    the bound's other terms with respect to the covariance S, the precision moves along D = I - 2 G - S^{-1} by
    rate D + rate² D S D / 2, which stays positive definite for every rate; the KL needs no sampling.
    """

    def one_state(mean: Array, chol: Array, grad_mean: Array, grad_chol: Array) -> tuple[Array, Array]:
        identity = jnp.eye(len(mean), dtype=mean.dtype)
        inverse = jax.scipy.linalg.solve_triangular(chol, identity, lower=True)
        grad_covariance = -0.5 * num_observed * grad_chol @ inverse
        grad_covariance = 0.5 * (grad_covariance + grad_covariance.T)
        precision = inverse.T @ inverse
        direction = identity - 2 * grad_covariance - precision
        moved = direction @ chol
        new_precision = precision + rate * direction + 0.5 * rate**2 * moved @ moved.T
        # chol of the inverse, from the reversed factor of the precision
        reversed_factor = jnp.linalg.cholesky(new_precision[::-1, ::-1])[::-1, ::-1]
        new_chol = jax.scipy.linalg.solve_triangular(reversed_factor.T, identity, lower=True)
        step = new_chol @ (new_chol.T @ (-num_observed * grad_mean - mean))
        return mean + rate * step, new_chol

    mean, chol = jax.vmap(one_state)(q.mean, q.chol, gradients.mean, gradients.chol)
    return eqx.tree_at(lambda p: (p.mean, p.chol), q, (mean, chol))


def _adam(settings: FitSettings) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(settings.max_gradient_norm), optax.scale_by_adam(b1=0.9, b2=0.99), optax.scale(-1.0)
    )


def _start(params: Any, settings: FitSettings) -> TrainingState:
    rest = _without_inducing(params) if settings.natural_gradient is not None else params
    zero = jnp.zeros((), jnp.int32)
    state = TrainingState(params, params, _adam(settings).init(rest), zero, zero, zero)
    # a weakly typed leaf would make the second block another program
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), state)


def _training_windows(windows: Window, posterior: AbstractPosterior, settings: FitSettings) -> Window:
    local = getattr(posterior, "local", None)
    if not settings.by_pieces:
        return _at_least(settings.batch_size, windows)
    if not isinstance(local, FreeSteps) or local.cut_every is None:
        raise ValueError(
            "Only a posterior that is cut into independent pieces can be trained on sub-sequences: expected "
            f"FreeSteps(..., cut_every=tau), but got {type(local).__name__}. Leave out `by_pieces`, or set `cut_every`."
        )
    return _at_least(settings.batch_size, pieces(windows, local.cut_every))


def _at_least(batch_size: int | None, windows: Window) -> Window:
    if batch_size is not None and batch_size > len(windows.sequence):
        raise ValueError(
            f"`batch_size` {batch_size} asks for more than there is to choose from: there are {len(windows.sequence)} sequences, "
            "or pieces of them. Leave it out to use all of them at every step."
        )
    return windows


def _num_observed(windows: Window) -> Float[Array, ""]:
    return jnp.maximum(1, jnp.sum(windows.is_observed)).astype(windows.outputs.dtype)


def _status(state: TrainingState, history: History, settings: FitSettings, num_observed: Float[Array, ""]) -> Status | None:
    if int(state.num_bad) >= SKIPS_BEFORE_FAILURE or not np.isfinite(history.bound[-1]):
        return Status.NONFINITE
    if int(state.step) >= settings.num_steps:
        return Status.MAX_STEPS
    if settings.tolerance is not None and len(history.bound) >= 2 * settings.patience:
        late, early = history.bound[-settings.patience :], history.bound[-2 * settings.patience : -settings.patience]
        if np.mean(late) - np.mean(early) < settings.tolerance * float(num_observed):
            return Status.CONVERGED
    return None


def _process_scale(params: Any, static: Any) -> Float[np.ndarray, " state"]:
    model = eqx.combine(params, static)[0]
    return np.asarray(unwrap(model.process_scale))


def _with_plain_inducing(posterior: AbstractPosterior) -> AbstractPosterior:
    """q(v) as plain arrays, for natural gradients."""
    if not all(jax.tree.leaves(trainable(posterior.inducing))):
        raise ValueError("`natural_gradient` moves q(u), but q(u) is frozen: leave one of the two out.")
    return eqx.tree_at(lambda p: p.inducing, posterior, unwrap(posterior.inducing))


def _with_constrained_inducing(posterior: AbstractPosterior) -> AbstractPosterior:
    q = posterior.inducing
    if not eqx.is_array(q.chol):
        return posterior
    return eqx.tree_at(lambda p: p.inducing, posterior, InducingPosterior(q.mean, LowerTriangular(q.chol)))


def _without_inducing(tree: Any) -> Any:
    return eqx.tree_at(lambda t: (t[1].inducing.mean, t[1].inducing.chol), tree, (None, None))


def _fingerprint(data: Dataset, settings: FitSettings, key: PRNGKey) -> dict:
    total = float(sum(np.nansum(np.abs(a)) for a in (*data.outputs, *data.controls)))
    return {
        "settings": asdict(settings),
        "lengths": list(data.lengths),
        "sum": total,
        "key": np.asarray(jr.key_data(key)).tolist(),
    }


def _resumed(
    checkpoint: str | Path | None, start: TrainingState, data: Dataset, settings: FitSettings, key: PRNGKey
) -> tuple[TrainingState, History]:
    if checkpoint is None or not present_folder(checkpoint).is_dir():
        raise ValueError(f"To resume, give the folder of a checkpoint: expected an existing folder, but got {checkpoint}.")
    saved = load(checkpoint, dtype="saved")
    if not isinstance(saved, _Checkpoint) or saved.fingerprint != _fingerprint(data, settings, key):
        raise ValueError(
            f"The checkpoint {checkpoint} belongs to another fit: its data, settings or key differ. Repeat them exactly, or "
            "start afresh without `resume`."
        )
    leaves, structure = jax.tree.flatten(start)
    saved_leaves, saved_structure = jax.tree.flatten(saved.state)
    if structure != saved_structure or any(jnp.shape(a) != jnp.shape(b) for a, b in zip(leaves, saved_leaves, strict=True)):
        raise ValueError(f"The checkpoint {checkpoint} holds another model or posterior than the one to be fitted.")
    return saved.state, saved.history
