"""Linear-Gaussian state-space models from data: subspace identification, refined by maximum likelihood.

    x[1] ~ N(m, P),    x[t+1] = A x[t] + B c[t] + b + N(0, Q),    y[t] = C x[t] + d + N(0, R)

Row t of the controls acts between rows t and t+1 and there is no direct feedthrough: the form of a GPSSM. Such a model is
the rival that a GPSSM has to beat and the source of its first states. NumPy and SciPy in float64 only. Decided here: the
subspace method (SSARX), how orders are chosen, and what becomes of missing outputs (NaN), several sequences and unstable
fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize

from gpssm.linear import Batch, LinearStateSpace, batch_of, run_filter, run_smoother, symmetric

_VARIANCE_FLOOR = 1e-7  # of the fitted noise variances, in standard units


@dataclass(frozen=True)
class Identification:
    """A fitted linear model with the states it saw in the data and what its orders were chosen by.

    The states are smoothed means, in a basis in which they have about zero mean and unit covariance over the data.
    """

    model: LinearStateSpace
    singular_values: Float[np.ndarray, " singular"]  # canonical correlations between past and future, largest first
    states: tuple[Float[np.ndarray, "_ state"], ...]  # one [time, state] array a sequence
    state_covariances: tuple[Float[np.ndarray, "_ state state"], ...]
    past: int  # rows of the past that the subspace step saw
    log_evidence: float
    criterion: dict[int, float]  # BIC by state dimension; more than one entry only for `auto`


def identify(
    outputs: Sequence[Float[np.ndarray, "_ output"]],
    controls: Sequence[Float[np.ndarray, "_ control"]] | None = None,
    state_dim: int | Literal["auto"] = "auto",
    *,
    past: int | Literal["auto"] = "auto",
    max_state_dim: int = 8,
    max_radius: float = 0.999,
    num_em_steps: int = 30,
    num_ascent_steps: int = 150,
) -> Identification:
    """Fit a linear-Gaussian state-space model to standardised sequences.

    1. A long ARX model (twice the order with the smallest AIC) removes from the stacked future what future controls and
       innovations did to it; canonical correlations between the rest and the past give the states (SSARX: Jansson 2003;
       the weights of CVA: Larimore 1990).
    2. A, B, b, C, d, Q, R by regression on those states; eigenvalues of A are drawn inside `max_radius`.
    3. The likelihood is climbed: EM first (Shumway and Stoffer 1982; Q full, R diagonal), then L-BFGS with Fisher's
       identity for the gradient, which does not slow down when R is small as EM does. A penalty keeps the eigenvalues
       inside `max_radius`; a plant that is itself unstable (ballbeam) is forecast better with a limit above 1, such as
       1.05, if nobody lets the model run freely for long.

    `auto` repeats this roughly for 1, 2, ... states, keeps the smallest BIC, counting the 2 n p + n k + 2 p free parameters
    of n states, p outputs and k controls, and finishes that one. With `past="auto"` the likelihood also chooses between
    two lengths of the past. Missing outputs are interpolated for steps 1 and 2 only, then replaced by smoothed values and
    these steps repeated; step 3 is exact about them.
    """
    batch = _checked_batch(outputs, controls)
    is_complete, filled = bool(batch.is_observed.all()), _interpolate(batch)
    wanted = max_state_dim if state_dim == "auto" else state_dim
    if not is_complete:
        rough = _canonical_states(filled, batch, past, wanted, state_dim == "auto")[:1]
        num_states = min(rough[0].states.shape[2], 4) if state_dim == "auto" else wanted
        filled = _smoothed_fill(_start(rough, batch, num_states, max_radius, 10), batch, filled)
    variates = _canonical_states(filled, batch, past, wanted, state_dim == "auto")
    visible = min(wanted, *(len(v.singular_values) for v in variates))
    starts, criterion = {}, {}
    for dim in range(1, visible + 1) if state_dim == "auto" else [wanted]:
        starts[dim] = _start(variates, batch, dim, max_radius, num_em_steps)
        if state_dim == "auto":
            starts[dim] = _ascend(starts[dim], batch, min(40, num_ascent_steps), max_radius)
        criterion[dim] = _bic(starts[dim], batch)
        if dim > min(criterion, key=criterion.__getitem__) + 2:
            break  # three larger models in a row were worse
    chosen = min(criterion, key=criterion.__getitem__)
    model = _ascend(starts[chosen], batch, num_ascent_steps, max_radius)
    criterion[chosen] = _bic(model, batch)
    model = _standardise_states(model, batch)
    passed = run_filter(model, batch)
    mean, covariance, _ = run_smoother(model, batch, passed)
    lengths = batch.is_real.sum(1)
    return Identification(
        model,
        variates[0].singular_values,
        tuple(m[:n] for m, n in zip(mean, lengths, strict=True)),
        tuple(c[:n] for c, n in zip(covariance, lengths, strict=True)),
        variates[0].past,
        float(passed.log_evidence.sum()),
        criterion,
    )


def _bic(model: LinearStateSpace, batch: Batch) -> float:
    num_states, num_controls = model.control.shape
    num_outputs = len(model.emission_offset)
    num_free = 2 * num_states * num_outputs + num_states * num_controls + 2 * num_outputs
    num_rows = (batch.is_observed.any(2) & batch.is_real).sum()
    return float(num_free * np.log(num_rows) - 2 * run_filter(model, batch).log_evidence.sum())


def _checked_batch(outputs, controls) -> Batch:
    outputs = [np.asarray(y, float) for y in outputs]
    controls = [np.zeros((len(y), 0)) for y in outputs] if controls is None else list(controls)
    shapes = [(np.shape(y), np.shape(c)) for y, c in zip(outputs, controls, strict=True)]
    if not shapes or any(len(y) != 2 or len(c) != 2 or y[0] != c[0] for y, c in shapes):
        raise ValueError(
            "identify needs one [time, output] and one [time, control] array a sequence with as many rows, got shapes "
            f"{shapes}; give a list of two-dimensional arrays"
        )
    if not all(np.isfinite(c).all() for c in controls) or any(np.isinf(y).any() for y in outputs):
        raise ValueError("controls must be finite and outputs finite or NaN (missing); fill or cut the other rows")
    silent = np.flatnonzero(~np.any([np.isfinite(y).any(0) for y in outputs], axis=0))
    if len(silent):
        raise ValueError(f"output {silent.tolist()} has no observed value in any sequence; leave it out")
    return batch_of(outputs, controls)


def _interpolate(batch: Batch) -> np.ndarray:
    filled = batch.outputs.copy()
    averages = batch.outputs.sum((0, 1)) / (batch.is_observed & batch.is_real[:, :, None]).sum((0, 1))
    for s, _, j in np.argwhere(~batch.is_observed.all(1, keepdims=True)):
        seen = np.flatnonzero(batch.is_observed[s, :, j] & batch.is_real[s])
        rows = np.arange(filled.shape[1])
        filled[s, :, j] = np.interp(rows, seen, filled[s, seen, j]) if len(seen) else averages[j]
    return np.where(batch.is_observed, batch.outputs, filled)


def _smoothed_fill(model: LinearStateSpace, batch: Batch, filled: np.ndarray) -> np.ndarray:
    mean, _, _ = run_smoother(model, batch, run_filter(model, batch))
    return np.where(batch.is_observed, filled, mean @ model.emission.T + model.emission_offset)


# Maximum likelihood: the same expected statistics serve EM and the gradient.


class _Statistics(NamedTuple):
    zz: np.ndarray  # of z = (x[t], c[t], 1)
    nz: np.ndarray  # x[t+1] z'
    nn: np.ndarray
    num_pairs: int
    hh: np.ndarray  # [output, ...] of h = (x, 1) at the rows where that output is observed
    yh: np.ndarray
    yy: np.ndarray
    counts: np.ndarray
    first_mean: np.ndarray  # [sequence, state]
    first_covariance: np.ndarray
    log_evidence: float


def _statistics(model: LinearStateSpace, batch: Batch) -> _Statistics:
    passed = run_filter(model, batch)
    mean, covariance, cross = run_smoother(model, batch, passed)
    n, pair = model.state_dim, batch.is_real[:, 1:]
    x, ones = mean, np.ones((*mean.shape[:2], 1))
    z = np.concatenate([x, batch.controls, ones], axis=2)[:, :-1][pair]
    following = x[:, 1:][pair]
    zz, nz = z.T @ z, following.T @ z
    zz[:n, :n] += covariance[:, :-1][pair].sum(0)
    nz[:, :n] += cross[pair].sum(0)
    nn = following.T @ following + covariance[:, 1:][pair].sum(0)
    seen = (batch.is_observed & batch.is_real[:, :, None]).astype(float)
    h = np.concatenate([x, ones], axis=2)
    hh = np.einsum("stj,sta,stb->jab", seen, h, h, optimize=True)
    hh[:, :n, :n] += np.einsum("stj,stab->jab", seen, covariance, optimize=True)
    yh = np.einsum("stj,stj,sta->ja", seen, batch.outputs, h, optimize=True)
    yy = (seen * batch.outputs**2).sum((0, 1))
    evidence = float(passed.log_evidence.sum())
    counts = seen.sum((0, 1))
    return _Statistics(zz, nz, nn, int(pair.sum()), hh, yh, yy, counts, x[:, 0], covariance[:, 0], evidence)


def _residuals(stats: _Statistics, dynamics, emission):
    """Expected residual sums of squares of the states (matrix) and of every output."""
    cross = stats.nz @ dynamics.T
    states = stats.nn - cross - cross.T + dynamics @ stats.zz @ dynamics.T
    outputs = stats.yy - 2 * (emission * stats.yh).sum(1) + np.einsum("ja,jab,jb->j", emission, stats.hh, emission)
    return symmetric(states), outputs


def _assemble(model: LinearStateSpace, dynamics, emission, process, observation) -> LinearStateSpace:
    n, k = model.control.shape
    return replace(
        model,
        transition=dynamics[:, :n],
        control=dynamics[:, n : n + k],
        offset=dynamics[:, -1],
        emission=emission[:, :n],
        emission_offset=emission[:, -1],
        process_covariance=process,
        observation_covariance=np.diag(observation),
    )


def _ridge_solve(gram, moment):
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-12))
    return np.linalg.solve(gram / np.outer(scale, scale) + 1e-10 * np.eye(len(gram)), (moment / scale).T).T / scale


def _em_step(model: LinearStateSpace, stats: _Statistics) -> LinearStateSpace:
    dynamics = _ridge_solve(stats.zz, stats.nz)
    emission = np.concatenate([_ridge_solve(hh, yh[None]) for hh, yh in zip(stats.hh, stats.yh, strict=True)])
    states, outputs = _residuals(stats, dynamics, emission)
    process = states / stats.num_pairs + _VARIANCE_FLOOR * np.eye(model.state_dim)
    model = _assemble(model, dynamics, emission, process, outputs / stats.counts + _VARIANCE_FLOOR)
    # One or few first states say little of their distribution: a standard normal counts as one more sequence.
    count = len(stats.first_mean) + 1
    mean = stats.first_mean.sum(0) / count
    spread = np.eye(model.state_dim) + np.outer(mean, mean) + stats.first_covariance.sum(0)
    spread += (stats.first_mean - mean).T @ (stats.first_mean - mean)
    return replace(model, initial_mean=mean, initial_covariance=symmetric(spread / count))


def _ascend(model: LinearStateSpace, batch: Batch, num_steps, max_radius) -> LinearStateSpace:
    """L-BFGS on (A B b), (C d), a factor of Q and log R, measured from `model` in units of its noise."""
    if num_steps == 0:
        return _stabilised(model, max_radius)
    model = _stabilised(model, max_radius)
    n, k = model.control.shape
    p = len(model.emission_offset)
    lower = np.tril_indices(n)
    diagonal = np.diag_indices(n)
    root = np.linalg.cholesky(model.process_covariance)
    dynamics0 = np.concatenate([model.transition, model.control, model.offset[:, None]], axis=1)
    emission0 = np.concatenate([model.emission, model.emission_offset[:, None]], axis=1)
    noise0 = np.log(np.diag(model.observation_covariance))
    sizes = np.cumsum([dynamics0.size, emission0.size, len(lower[0])])
    best = (-np.inf, model)

    def unpack(vector):
        a, c, q, r = np.split(vector, sizes)
        factor = np.zeros((n, n))
        factor[lower] = q
        factor[diagonal] = np.exp(np.clip(factor[diagonal], -20, 20))
        emission = emission0 + c.reshape(p, n + 1) * np.exp(noise0 / 2)[:, None]
        return dynamics0 + root @ a.reshape(n, n + k + 1), emission, factor, np.exp(noise0 + np.clip(r, -20, 20))

    def objective(vector):
        nonlocal best
        dynamics, emission, factor, noise = unpack(vector)
        chol = root @ factor
        floored = noise + _VARIANCE_FLOOR
        process = chol @ chol.T + _VARIANCE_FLOOR * np.eye(n)
        candidate = _assemble(model, dynamics, emission, process, floored)
        penalty, to_transition = _excess_radius(candidate.transition, max_radius - 1e-4)
        stats = _statistics(candidate, batch)
        if not np.isfinite(stats.log_evidence):
            return np.inf, np.zeros_like(vector)
        if stats.log_evidence - penalty > best[0]:
            best = (stats.log_evidence - penalty, candidate)
        states, outputs = _residuals(stats, dynamics, emission)
        precision = np.linalg.inv(process)
        to_dynamics = root.T @ precision @ (stats.nz - dynamics @ stats.zz)
        to_dynamics[:, :n] -= root.T @ to_transition
        to_process = 0.5 * (precision @ states @ precision - stats.num_pairs * precision)
        to_factor = 2 * root.T @ to_process @ chol
        to_factor[diagonal] *= factor[diagonal]
        misfit = stats.yh - np.einsum("jab,jb->ja", stats.hh, emission)
        to_emission = misfit / floored[:, None] * np.exp(noise0 / 2)[:, None]
        to_noise = 0.5 * (outputs / floored - stats.counts) * noise / floored
        gradient = np.concatenate([to_dynamics.ravel(), to_emission.ravel(), to_factor[lower], to_noise])
        return penalty - stats.log_evidence, -gradient

    minimize(
        objective,
        np.zeros(sizes[-1] + p),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": num_steps, "maxfun": 2 * num_steps, "maxcor": 30, "ftol": 1e-10},
    )
    return _stabilised(best[1], max_radius)


def _excess_radius(transition, limit, weight=1e5):
    """weight * sum of (|eigenvalue| - limit)^2 over the eigenvalues beyond the limit, and its gradient."""
    values, vectors = np.linalg.eig(transition)
    excess = np.maximum(np.abs(values) - limit, 0.0)
    if not excess.any():
        return 0.0, np.zeros_like(transition)
    slope = 2 * weight * excess * values.conj() / np.abs(values)
    gradient = ((vectors * slope) @ np.linalg.pinv(vectors)).real.T
    return weight * float(excess @ excess), gradient


def _stabilised(model: LinearStateSpace, max_radius: float) -> LinearStateSpace:
    """Eigenvalues of A outside the circle are moved onto it along their radius; the eigenvectors stay."""
    values, vectors = np.linalg.eig(model.transition)
    if np.abs(values).max() <= max_radius:
        return model
    if np.linalg.cond(vectors) > 1e8:
        return replace(model, transition=model.transition * (max_radius / np.abs(values).max()))
    shrunk = values * np.minimum(1.0, max_radius / np.maximum(np.abs(values), 1e-12))
    return replace(model, transition=(vectors * shrunk @ np.linalg.inv(vectors)).real)


def _standardise_states(model: LinearStateSpace, batch: Batch) -> LinearStateSpace:
    """States with zero mean and unit covariance over the data, in the axes nearest to the ones they had."""
    mean, _, _ = run_smoother(model, batch, run_filter(model, batch))
    seen = mean[batch.is_real]
    centre = seen.mean(0)
    values, vectors = np.linalg.eigh(np.cov(seen.T, bias=True).reshape(model.state_dim, model.state_dim))
    basis = vectors / np.sqrt(np.maximum(values, 1e-8 * values.max())) @ vectors.T
    shifted = replace(
        model,
        offset=model.offset + model.transition @ centre - centre,
        emission_offset=model.emission_offset + model.emission @ centre,
        initial_mean=model.initial_mean - centre,
    )
    return shifted.change_basis(basis)


# The subspace step.


class _Variates(NamedTuple):
    states: np.ndarray  # [sequence, time, variate], unit variance, by falling correlation
    is_known: np.ndarray  # [sequence, time], where a whole past was at hand
    singular_values: np.ndarray
    past: int


def _lagged(values, num_lags):
    """[sequence, time, lag * channel]: the rows before time t, nearest first; zero before the start."""
    num_sequences, num_steps, num_channels = values.shape
    lags = np.zeros((num_sequences, num_steps, num_lags, num_channels))
    for lag in range(1, min(num_lags, num_steps - 1) + 1):
        lags[:, lag:, lag - 1] = values[:, :-lag]
    return lags.reshape(num_sequences, num_steps, -1)


def _least_squares(inputs, targets):
    gram = inputs.T @ inputs
    gram[np.diag_indices(len(gram))] += 1e-9 * np.trace(gram) / len(gram)
    return np.linalg.solve(gram, inputs.T @ targets)


def _canonical_states(filled, batch: Batch, past, wanted: int, is_auto: bool) -> list[_Variates]:
    """What the past tells of the future, for the given length of the past or for two that suit the data."""
    num_outputs = filled.shape[2]
    joint = np.concatenate([filled, batch.controls], axis=2)
    width, lengths = joint.shape[2], batch.is_real.sum(1)
    rows = np.arange(filled.shape[1])

    def has_room(num_past, num_future):  # rows with a whole past and a whole future within their sequence
        return (rows >= num_past) & (rows[None] + num_future <= lengths[:, None])

    longest = 0
    while longest < 30 and has_room(longest + 1, longest + 1).sum() >= 4 * width * (longest + 1) + num_outputs:
        longest += 1
    least = 1 if is_auto else -(-wanted // num_outputs)  # a future that short can't show so many states
    if longest < least:
        raise ValueError(
            f"{1 if is_auto else wanted} states from {num_outputs} outputs and {width - num_outputs} controls need more "
            f"data than sequences of lengths {lengths[:10].tolist()}; ask for fewer states or give more rows"
        )
    if past != "auto":
        if not least <= past <= longest:
            raise ValueError(f"past must be {least} to {longest} rows for these data and states, got {past}")
        pasts = [past]
    else:
        long = min(max(2 * _arx_order(joint, filled, rows, lengths, longest), least + 1, 4), longest)
        pasts = sorted({long, min(max(long // 2, least + 1, 4), long)}, reverse=True)
    return [_correlate(filled, joint, num, has_room(num, 1), has_room(num, num), wanted) for num in pasts]


def _correlate(filled, joint, past: int, is_known, is_usable, wanted: int) -> _Variates:
    lags = _lagged(joint, past)
    design = np.concatenate([lags, np.ones((*lags.shape[:2], 1))], axis=2)[is_known]
    weights = _least_squares(design, filled[is_known])[:-1].reshape(past, joint.shape[2], -1)
    inputs, future = lags[is_usable], []
    for ahead in range(past):
        rest = np.roll(filled, -ahead, axis=1)[is_usable]
        for lag in range(1, ahead + 1):  # what rows t ... t+ahead-1 did to row t+ahead
            rest = rest - np.roll(joint, lag - ahead, axis=1)[is_usable] @ weights[lag - 1]
        future.append(rest)
    future, centre = np.concatenate(future, axis=1), inputs.mean(0)
    past_root, future_root = _inverse_root(np.cov(inputs.T)), _inverse_root(np.cov(future.T))
    cross = (inputs - centre).T @ (future - future.mean(0)) / (len(inputs) - 1)
    left, singular, _ = np.linalg.svd(past_root @ cross @ future_root.T)
    return _Variates((lags - centre) @ (past_root.T @ left[:, :wanted]), is_known, singular, past)


def _inverse_root(covariance):
    values, vectors = np.linalg.eigh(np.atleast_2d(covariance))
    return vectors.T / np.sqrt(np.maximum(values, 1e-9 * values.max()))[:, None]


def _arx_order(joint, filled, rows, lengths, longest):
    """The number of lags with the smallest AIC, all judged on the same rows."""
    usable = (rows >= longest) & (rows[None] < lengths[:, None])
    lags, targets = _lagged(joint, longest)[usable], filled[usable]
    num_rows, scores = len(targets), []
    for order in range(1, longest + 1):
        inputs = np.concatenate([lags[:, : order * joint.shape[2]], np.ones((num_rows, 1))], axis=1)
        residual = targets - inputs @ _least_squares(inputs, targets)
        log_det = np.linalg.slogdet(residual.T @ residual / num_rows + 1e-12 * np.eye(targets.shape[1]))[1]
        scores.append(num_rows * log_det + 2 * inputs.shape[1] * targets.shape[1])
    return int(np.argmin(scores)) + 1


def _start(variates: list[_Variates], batch: Batch, num_states: int, max_radius, num_em_steps) -> LinearStateSpace:
    """The best after EM, judged by the likelihood, of one start for each length of the past."""
    starts = [_regress(v, batch, num_states, max_radius) for v in variates]
    for _ in range(num_em_steps):
        starts = [_em_step(start, _statistics(start, batch)) for start in starts]
    return max(starts, key=lambda start: float(run_filter(start, batch).log_evidence.sum()))


def _regress(variates: _Variates, batch: Batch, num_states: int, max_radius: float) -> LinearStateSpace:
    """A, B, b, C, d, Q, R from the canonical variates, with the split of noise that the likelihood likes best."""
    x, known = variates.states[..., :num_states], variates.is_known
    pair = known[:, :-1] & known[:, 1:]
    h = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
    z = np.concatenate([x, batch.controls, h[..., -1:]], axis=2)[:, :-1][pair]
    dynamics = _least_squares(z, x[:, 1:][pair]).T
    process = np.cov((x[:, 1:][pair] - z @ dynamics.T).T, bias=True).reshape(num_states, num_states)
    emission, noise = [], []
    for j in range(batch.outputs.shape[2]):
        rows = known & batch.is_observed[:, :, j]
        emission.append(_least_squares(h[rows], batch.outputs[rows][:, j]))
        noise.append(np.var(batch.outputs[rows][:, j] - h[rows] @ emission[-1]))
    emission, noise, eye = np.array(emission), np.array(noise), np.eye(num_states)
    zero = np.zeros(num_states)
    blank = LinearStateSpace(eye, dynamics[:, num_states:-1], zero, emission[:, :-1], noise, eye, np.diag(noise), zero, eye)
    starts = []
    # The residuals of the two equations are correlated, so which noise is whose is open: try several shares.
    for share in (1.0, 0.5, 0.05):
        noises = share * process + 1e-6 * eye, (1.05 - share) * noise + 1e-6
        start = _stabilised(_assemble(blank, dynamics, emission, *noises), max_radius)
        for _ in range(3):
            start = _em_step(start, _statistics(start, batch))
        starts.append(start)
    return max(starts, key=lambda start: float(run_filter(start, batch).log_evidence.sum()))
