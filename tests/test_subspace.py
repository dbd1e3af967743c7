"""A known linear system is found again; its evidence is that of the joint Gaussian; gaps and many sequences are exact."""

import numpy as np
import pytest
from scipy.linalg import block_diag
from scipy.stats import multivariate_normal

from gpssm.linear import LinearStateSpace
from gpssm.subspace import Identification, identify

TRUTH = LinearStateSpace(
    transition=np.array([[0.9, 0.25, 0.0], [-0.25, 0.9, 0.0], [0.0, 0.0, 0.6]]),
    control=np.array([[0.3], [0.1], [0.5]]),
    offset=np.array([0.0, 0.1, 0.0]),
    emission=np.array([[1.0, 0.0, 0.5], [0.0, 1.0, -1.0]]),
    emission_offset=np.array([0.5, -0.5]),
    process_covariance=np.diag([0.02, 0.02, 0.01]),
    observation_covariance=np.diag([0.05, 0.02]),
    initial_mean=np.array([0.5, 0.0, -0.5]),
    initial_covariance=np.diag([0.5, 0.3, 0.2]),
)


def simulate(model: LinearStateSpace, num_steps: int, rng) -> tuple[np.ndarray, np.ndarray]:
    controls = rng.standard_normal((num_steps, model.control.shape[1]))
    state = rng.multivariate_normal(model.initial_mean, model.initial_covariance)
    outputs = []
    for control in controls:
        mean = model.emission @ state + model.emission_offset
        outputs.append(rng.multivariate_normal(mean, model.observation_covariance))
        drift = model.transition @ state + model.control @ control + model.offset
        state = rng.multivariate_normal(drift, model.process_covariance)
    return np.array(outputs), controls


def joint(model: LinearStateSpace, controls: np.ndarray):
    """Means and covariances of all states and of all outputs together, written out: x = G (first, noises) + drift."""
    num_steps, n = len(controls), model.state_dim
    power = [np.linalg.matrix_power(model.transition, k) for k in range(num_steps)]
    zero = np.zeros((n, n))
    gain = np.block([[power[t - s] if s <= t else zero for s in range(num_steps)] for t in range(num_steps)])
    drives = [model.initial_mean, *(controls[:-1] @ model.control.T + model.offset)]
    spread = block_diag(model.initial_covariance, *[model.process_covariance] * (num_steps - 1))
    mean, covariance = gain @ np.concatenate(drives), gain @ spread @ gain.T
    emission = np.kron(np.eye(num_steps), model.emission)
    noise = np.kron(np.eye(num_steps), model.observation_covariance)
    offset = np.tile(model.emission_offset, num_steps)
    return mean, covariance, emission, emission @ mean + offset, emission @ covariance @ emission.T + noise


def responses(model: LinearStateSpace, num: int = 15) -> np.ndarray:
    """Markov parameters: what outlives every change of basis."""
    return np.array([model.emission @ np.linalg.matrix_power(model.transition, k) @ model.control for k in range(num)])


def eigenvalues(model: LinearStateSpace) -> np.ndarray:
    return np.sort_complex(np.linalg.eigvals(model.transition))


@pytest.mark.parametrize("num_missing", [0, 12])
def test_evidence_and_moments_are_those_of_the_joint_gaussian(rng, num_missing):
    outputs, controls = simulate(TRUTH, 12, rng)
    outputs.ravel()[rng.choice(24, num_missing, replace=False)] = np.nan
    seen = ~np.isnan(outputs.ravel())
    mean, covariance, emission, output_mean, output_covariance = joint(TRUTH, controls)
    inner = output_covariance[np.ix_(seen, seen)]
    expected = multivariate_normal(output_mean[seen], inner).logpdf(outputs.ravel()[seen])
    assert TRUTH.kalman_filter(outputs, controls).log_evidence == pytest.approx(expected, rel=1e-10)
    gain = covariance @ emission.T[:, seen] @ np.linalg.inv(inner)
    after = mean + gain @ (outputs.ravel()[seen] - output_mean[seen])
    spread = covariance - gain @ emission[seen] @ covariance
    smoothed = TRUTH.smoother(outputs, controls)
    assert smoothed.mean.ravel() == pytest.approx(after, abs=1e-10)
    for t in range(12):
        block = spread[3 * t : 3 * t + 3, 3 * t : 3 * t + 3]
        assert smoothed.covariance[t] == pytest.approx(block, abs=1e-10)
    filtered = TRUTH.kalman_filter(outputs, controls)
    assert filtered.mean[-1] == pytest.approx(smoothed.mean[-1], abs=1e-12)


def test_a_converged_covariance_changes_nothing(rng):
    outputs, controls = simulate(TRUTH, 400, rng)
    outputs[200:203] = np.nan
    passed = TRUTH.kalman_filter(outputs, controls)
    covariance, log_evidence, mean = TRUTH.initial_covariance, 0.0, TRUTH.initial_mean
    for t in range(400):
        if not np.isnan(outputs[t, 0]):
            inner = TRUTH.emission @ covariance @ TRUTH.emission.T + TRUTH.observation_covariance
            centre = TRUTH.emission @ mean + TRUTH.emission_offset
            log_evidence += multivariate_normal(centre, inner).logpdf(outputs[t])
            gain = covariance @ TRUTH.emission.T @ np.linalg.inv(inner)
            mean = mean + gain @ (outputs[t] - centre)
            covariance = covariance - gain @ TRUTH.emission @ covariance
        assert passed.mean[t] == pytest.approx(mean, abs=1e-9)
        mean = TRUTH.transition @ mean + TRUTH.control @ controls[t] + TRUTH.offset
        covariance = TRUTH.transition @ covariance @ TRUTH.transition.T + TRUTH.process_covariance
    assert passed.log_evidence == pytest.approx(log_evidence, rel=1e-10)


def test_a_forecast_is_the_filter_without_data(rng):
    outputs, controls = simulate(TRUTH, 30, rng)
    now = TRUTH.kalman_filter(outputs[:20], controls[:20])
    means, covariances = TRUTH.forecast_moments(now.mean[-1], now.covariance[-1], controls[19:29], 10)
    gap = np.concatenate([outputs[:20], np.full((10, 2), np.nan)])
    later = TRUTH.smoother(gap, controls)
    assert means == pytest.approx(later.mean[20:] @ TRUTH.emission.T + TRUTH.emission_offset, abs=1e-10)
    spread = TRUTH.emission @ later.covariance[20:] @ TRUTH.emission.T + TRUTH.observation_covariance
    assert covariances == pytest.approx(spread, abs=1e-10)
    with pytest.raises(ValueError, match=r"10 steps needs controls of shape \[10, 1\]"):
        TRUTH.forecast_moments(now.mean[-1], now.covariance[-1], controls[:5], 10)


def test_a_change_of_basis_leaves_the_evidence(rng):
    outputs, controls = simulate(TRUTH, 40, rng)
    turned = TRUTH.change_basis(rng.standard_normal((3, 3)))
    expected = TRUTH.kalman_filter(outputs, controls).log_evidence
    assert turned.kalman_filter(outputs, controls).log_evidence == pytest.approx(expected, rel=1e-9)


def check_found(found: Identification, tolerance: float = 0.05) -> None:
    assert eigenvalues(found.model) == pytest.approx(eigenvalues(TRUTH), abs=tolerance)
    assert responses(found.model) == pytest.approx(responses(TRUTH), abs=tolerance)


def test_identification_finds_the_system_and_beats_its_truth_in_evidence(rng):
    outputs, controls = simulate(TRUTH, 1000, rng)
    found = identify([outputs], [controls], 3)
    check_found(found)
    assert found.log_evidence > TRUTH.kalman_filter(outputs, controls).log_evidence
    assert found.log_evidence == pytest.approx(found.model.kalman_filter(outputs, controls).log_evidence, rel=1e-9)
    assert found.singular_values[2] > 2 * found.singular_values[3]
    states = found.states[0]
    assert states.shape == (1000, 3)
    assert states.mean(0) == pytest.approx(np.zeros(3), abs=1e-6)
    assert np.cov(states.T, bias=True) == pytest.approx(np.eye(3), abs=1e-6)
    assert states == pytest.approx(found.model.smoother(outputs, controls).mean, abs=1e-9)


def test_noises_are_found_as_far_as_the_outputs_tell_them(rng):
    outputs, controls = simulate(TRUTH, 2000, rng)
    found = identify([outputs], [controls], 3, num_ascent_steps=30).model
    assert np.diag(found.observation_covariance) == pytest.approx([0.05, 0.02], rel=0.25)


def test_identification_bridges_gaps(rng):
    outputs, controls = simulate(TRUTH, 600, rng)
    outputs[rng.random(outputs.shape) < 0.15] = np.nan
    outputs[300:340, 0] = np.nan
    outputs[500:520] = np.nan
    check_found(identify([outputs], [controls], 3, num_ascent_steps=20), 0.08)


def test_identification_takes_sequences_of_all_lengths(rng):
    pairs = [simulate(TRUTH, length, rng) for length in (*[40] * 12, 60, 120, 25, 200, 7)]
    outputs, controls = zip(*pairs, strict=True)
    found = identify(list(outputs), list(controls), 3)
    check_found(found, 0.07)
    assert [len(states) for states in found.states] == [len(y) for y in outputs]
    each = sum(found.model.kalman_filter(y, c).log_evidence for y, c in pairs)
    assert found.log_evidence == pytest.approx(each, rel=1e-9)


def test_auto_finds_the_number_of_states(rng):
    outputs, controls = simulate(TRUTH, 600, rng)
    found = identify([outputs], [controls], "auto", max_state_dim=5, num_ascent_steps=20)
    assert found.model.state_dim == 3
    assert min(found.criterion, key=found.criterion.get) == 3


def test_outputs_alone_can_be_identified(rng):
    outputs, _ = simulate(TRUTH, 800, rng)
    found = identify([outputs], None, 2)
    assert found.model.control.shape == (2, 0)
    assert np.isfinite(found.log_evidence)


def test_a_growing_series_gets_a_stable_model(rng):
    steps = np.arange(150)[:, None]
    outputs = 0.01 * 1.03**steps + 0.01 * rng.standard_normal((150, 1))
    free = identify([outputs], None, 1, max_radius=1.2, num_ascent_steps=30)
    held = identify([outputs], None, 1, num_ascent_steps=30)
    assert np.abs(np.linalg.eigvals(free.model.transition)).max() > 1.01
    assert np.abs(np.linalg.eigvals(held.model.transition)).max() <= 0.999 + 1e-9


def test_the_same_data_give_the_same_model(rng):
    outputs, controls = simulate(TRUTH, 200, rng)
    first, second = (identify([outputs], [controls], 2, num_ascent_steps=20) for _ in range(2))
    assert np.array_equal(first.model.transition, second.model.transition)


def test_bad_data_are_refused_with_what_to_do(rng):
    outputs, controls = simulate(TRUTH, 100, rng)
    with pytest.raises(ValueError, match="need more data"):
        identify([outputs[:8]], [controls[:8]], 3)
    with pytest.raises(ValueError, match="need more data"):
        identify([outputs], [controls], 40)
    with pytest.raises(ValueError, match="as many rows"):
        identify([outputs], [controls[:50]], 2)
    with pytest.raises(ValueError, match="controls must be finite"):
        identify([outputs], [np.where(controls > 2, np.nan, controls) * np.nan], 2)
    with pytest.raises(ValueError, match=r"output \[1\] has no observed value"):
        identify([np.stack([outputs[:, 0], np.full(100, np.nan)], axis=1)], [controls], 2)
    with pytest.raises(ValueError, match="past must be"):
        identify([outputs], [controls], 2, past=80)
