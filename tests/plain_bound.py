"""The bound of every method of `reference/README.md`, in plain NumPy loops; imports nothing of ours.

`terms` follows the definitions there word by word, for any numbers of states, controls, outputs, steps and inducing inputs;
`random_case` draws a case of given sizes, and `write_reference` a whole file like `elbo.npz` (gradients by finite differences).
"""

from collections.abc import Iterable

import numpy as np

CHAINS = ("VCDT", "FactorizedNonLinear", "Parametric", "Cubic", "PRSSM", "PPT", "VPT", "CPT")
METHODS = (*CHAINS, "FactorizedLinear")
WITH_FULL_STEPS = ("VCDT", "FactorizedNonLinear", "Parametric", "Cubic")
PRIOR_TRANSITION = ("PRSSM", "PPT", "VPT", "CPT")
JITTER = 1e-6

Case = dict[str, np.ndarray]


def random_case(
    rng: np.random.Generator, states: int, controls: int, outputs: int, steps: int, inducing: int, samples: int = 6
) -> Case:
    """Numbers of the size that a fit has, under the reference's names."""

    def covariance(size: int, scale: float, *batch: int) -> np.ndarray:
        root = rng.normal(size=(*batch, size, size))
        return scale * (np.eye(size) + 0.2 * root @ np.swapaxes(root, -1, -2) / size)

    inputs = states + controls
    sizes = {"dim_D": states, "dim_du": controls, "dim_obs": outputs, "dim_T": steps, "dim_M": inducing}
    case = {
        "Y": rng.normal(size=(steps, outputs)),
        "C": rng.normal(size=(outputs, states)),
        "bias": 0.3 * rng.normal(size=outputs),
        "R": covariance(outputs, 0.4),
        "px1_mu": 0.2 * rng.normal(size=states),
        "px1_cov": covariance(states, 1.1),
        "kern_variance": 0.5 + rng.uniform(size=states),
        "kern_lengthscales": 0.8 + rng.uniform(size=(states, inputs)),
        "Z": 1.5 * rng.normal(size=(states, inducing, inputs)),
        "Q_diag": 0.05 + 0.1 * rng.uniform(size=states),
        "Umu": 0.7 * rng.normal(size=(states, inducing)),
        "Ucov_chol": 0.3 * np.linalg.cholesky(covariance(inducing, 1.0, states)),
        "qx1_mu": 0.5 * rng.normal(size=states),
        "qx1_cov": covariance(states, 0.3),
        "As": 0.6 + 0.2 * rng.normal(size=(steps - 1, states)),
        "bs": 0.3 * rng.normal(size=(steps - 1, states)),
        "Ss": 0.05 + 0.1 * rng.uniform(size=(steps - 1, states)),
        "As_full": 0.6 * np.eye(states) + 0.1 * rng.normal(size=(steps - 1, states, states)),
        "Ss_full": covariance(states, 0.1, steps - 1),
        "Xmu": rng.normal(size=(steps, states)),
        "Xchol": 0.3 * np.linalg.cholesky(covariance(steps * states, 1.0)),
        "Xstar": rng.normal(size=(5, inputs)),
        "eps_U": rng.normal(size=(states, inducing, samples)),
        "eps_X": rng.normal(size=(steps, samples, states)),
        "eps_F": rng.normal(size=(steps - 1, samples, states)),
        "eps_XFL": rng.normal(size=(samples, steps * states)),
    }
    if controls:
        case["inputs"] = rng.normal(size=(steps - 1, controls))
    return case | {name: np.array(size) for name, size in sizes.items()}


def parameters(case: Case, is_full: bool) -> dict[str, np.ndarray]:
    """The constrained values that gradients are taken of."""
    chosen = {name: case[name] for name in ("Umu", "Ucov_chol", "C", "bias", "qx1_mu", "bs", "Xmu", "Xchol")}
    chosen |= {"Q_sqrt": np.sqrt(case["Q_diag"]), "Rchol": np.linalg.cholesky(case["R"])}
    chosen["qx1_cov_chol"] = np.linalg.cholesky(case["qx1_cov"])
    chosen["As"] = case["As_full"] if is_full else case["As"]
    chosen["S_chols"] = np.linalg.cholesky(case["Ss_full"]) if is_full else np.sqrt(case["Ss"])
    for d in range(int(case["dim_D"])):
        chosen |= {f"Z_{d}": case["Z"][d], f"kern_variance_{d}": case["kern_variance"][d]}
        chosen[f"kern_lengthscales_{d}"] = case["kern_lengthscales"][d]
    return chosen


class Process:
    """q(f): the projections of one input, from the definitions."""

    def __init__(self, values: dict[str, np.ndarray], kernel: str, mean: str, states: int):
        self.values, self.kernel, self.mean, self.states = values, kernel, mean, states
        self.chols = []
        for d in range(states):
            inputs = values[f"Z_{d}"]
            gram = np.array([[self.covariance(d, x, y) for y in inputs] for x in inputs])
            self.chols.append(np.linalg.cholesky(gram + JITTER * np.eye(len(inputs))))

    def covariance(self, d: int, left: np.ndarray, right: np.ndarray) -> float:
        variance = self.values[f"kern_variance_{d}"]
        squared = float(np.sum(((left - right) / self.values[f"kern_lengthscales_{d}"]) ** 2))
        if self.kernel == "rbf":
            return variance * np.exp(-0.5 * squared)
        distance = np.sqrt(3 * max(squared, 1e-40))
        return variance * (1 + distance) * np.exp(-distance)

    def prior_mean(self, point: np.ndarray) -> np.ndarray:
        return point[: self.states] if self.mean == "identity" else np.zeros(self.states)

    def projections(self, point: np.ndarray) -> list[np.ndarray]:
        cross = [np.array([self.covariance(d, z, point) for z in self.values[f"Z_{d}"]]) for d in range(self.states)]
        return [np.linalg.solve(chol, k) for chol, k in zip(self.chols, cross, strict=True)]

    def given(self, point: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of f given v."""
        a = self.projections(point)
        mean = self.prior_mean(point) + [a[d] @ v[d] for d in range(self.states)]
        return mean, np.abs([self.covariance(d, point, point) - a[d] @ a[d] for d in range(self.states)])

    def marginal(self, point: np.ndarray, is_absolute: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of f, v integrated out."""
        a, chol = self.projections(point), self.values["Ucov_chol"]
        mean = self.prior_mean(point) + [a[d] @ self.values["Umu"][d] for d in range(self.states)]
        prior = [self.covariance(d, point, point) - a[d] @ a[d] for d in range(self.states)]
        variance = np.array([prior[d] + np.sum((chol[d].T @ a[d]) ** 2) for d in range(self.states)])
        return mean, np.abs(variance) if is_absolute else variance

    def joint(self, d: int, left: np.ndarray, right: np.ndarray) -> float:
        """Covariance of f_d at two inputs under q(f)."""
        a, b = self.projections(left)[d], self.projections(right)[d]
        chol = self.values["Ucov_chol"][d]
        return self.covariance(d, left, right) - a @ b + (chol.T @ a) @ (chol.T @ b)


class Conditional:
    """f drawn along a trajectory, each value given all before it: one growing Cholesky factor a state."""

    def __init__(self, process: Process):
        self.process = process
        self.points: list[np.ndarray] = []
        self.noises: list[np.ndarray] = []
        self.rows: list[list[np.ndarray]] = [[] for _ in range(process.states)]

    def draw(self, point: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean, variance and value at one more input."""
        mean, variance = self.process.marginal(point, is_absolute=False)
        t = len(self.points)
        for d in range(self.process.states):
            row = np.zeros(t + 1)
            for s in range(t):  # forward substitution
                covariance = self.process.joint(d, self.points[s], point)
                row[s] = (covariance - self.rows[d][s][:s] @ row[:s]) / self.rows[d][s][s]
            mean[d] += sum(row[s] * self.noises[s][d] for s in range(t))
            variance[d] = abs(variance[d] - row @ row)
            row[t] = np.sqrt(variance[d] + JITTER)
            self.rows[d].append(row)
        self.points.append(point)
        self.noises.append(noise)
        return mean, variance, mean + np.sqrt(variance) * noise


def terms(case: Case, kernel: str, mean: str, method: str, values: dict[str, np.ndarray]) -> dict[str, float]:
    """The bound and its terms at the stored noise, averaged over its samples."""
    process = Process(values, kernel, mean, int(case["dim_D"]))
    whitened = zip(values["Umu"], values["Ucov_chol"], strict=True)
    kl_inducing = sum(_kl(m, c @ c.T, np.zeros(len(m)), np.eye(len(m))) for m, c in whitened)
    if method == "FactorizedLinear":
        return _factorised_linear(case, process, values, kl_inducing)
    samples = [_trajectory(case, process, method, values, n) for n in range(case["eps_X"].shape[1])]
    emission, kl_states = np.mean(samples, axis=0)
    first = values["qx1_cov_chol"] @ values["qx1_cov_chol"].T
    kl_first = _kl(values["qx1_mu"], first, case["px1_mu"], case["px1_cov"])
    total = emission - kl_states - kl_inducing - kl_first
    return {"elbo": total, "emission": emission, "KL_X": kl_states, "KL_U": kl_inducing, "KL_x1": kl_first}


def _trajectory(case: Case, process: Process, method: str, values: dict[str, np.ndarray], n: int) -> tuple[float, float]:
    """Emission and KL_X of sample n."""
    states, steps = process.states, int(case["dim_T"])
    noise_variance = values["Q_sqrt"] ** 2
    v = values["Umu"] + np.einsum("dmn,dn->dm", values["Ucov_chol"], case["eps_U"][:, :, n])
    conditional = Conditional(process)
    x = values["qx1_mu"] + values["qx1_cov_chol"] @ case["eps_X"][0, n]
    emission, kl = _log_output(case, values, 0, x), 0.0
    for t in range(steps - 1):
        point = np.concatenate([x, case["inputs"][t]]) if int(case["dim_du"]) else x
        A, b, S = _step(values, method, t, noise_variance)
        noise = case["eps_X"][t + 1, n]
        if method in ("Cubic", "CPT"):
            mu, var, value = conditional.draw(point, case["eps_F"][t, n])
            x, proposal = b + A @ value + _root(S) @ noise, S
        else:
            is_marginal = method in ("FactorizedNonLinear", "PRSSM")
            mu, var = process.marginal(point) if is_marginal else process.given(point, v)
            proposal = S + A @ np.diag(var) @ A.T
            x = b + A @ mu + _root(proposal) @ noise
        shift = A - np.eye(states)
        difference = shift @ mu + b
        if method in ("VCDT", "FactorizedNonLinear", "VPT"):
            spread = var + np.diag(proposal)
        elif method in ("Parametric", "Cubic"):
            spread, proposal = np.diag(S) + np.diag(shift @ np.diag(var) @ shift.T), S
        else:
            spread = None
        if spread is not None:
            ratio = np.sum((difference**2 + spread) / noise_variance) - states
            kl += 0.5 * (ratio + np.sum(np.log(noise_variance)) - np.linalg.slogdet(proposal)[1])
        emission += _log_output(case, values, t + 1, x)
    return emission, kl


def _step(values: dict, method: str, t: int, noise_variance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, b and S in full."""
    states = len(noise_variance)
    if method in PRIOR_TRANSITION:
        return np.eye(states), np.zeros(states), np.diag(noise_variance)
    A, scale = values["As"][t], values["S_chols"][t]
    return (A, values["bs"][t], scale @ scale.T) if A.ndim == 2 else (np.diag(A), values["bs"][t], np.diag(scale**2))


def _root(covariance: np.ndarray) -> np.ndarray:
    return np.linalg.cholesky(covariance)


def _factorised_linear(case: Case, process: Process, values: dict, kl_inducing: float) -> dict[str, float]:
    states, steps = process.states, int(case["dim_T"])
    noise_variance = values["Q_sqrt"] ** 2
    emissions, transitions = [], []
    for noise in case["eps_XFL"]:
        path = values["Xmu"] + (values["Xchol"] @ noise).reshape(steps, states)
        emissions.append(sum(_log_output(case, values, t, path[t]) for t in range(steps)))
        transition = 0.0
        for t in range(steps - 1):
            point = np.concatenate([path[t], case["inputs"][t]]) if int(case["dim_du"]) else path[t]
            mu, var = process.marginal(point, is_absolute=False)
            transition += _log_density(path[t + 1], mu, np.diag(noise_variance)) - 0.5 * np.sum(var / noise_variance)
        transitions.append(transition)
    first = values["Xchol"][:states, :states]
    spread = np.trace(np.linalg.solve(case["px1_cov"], first @ first.T))
    cross = -_log_density(values["Xmu"][0], case["px1_mu"], case["px1_cov"]) + 0.5 * spread
    entropy = 0.5 * steps * states * (1 + np.log(2 * np.pi)) + np.sum(np.log(np.abs(np.diag(values["Xchol"]))))
    emission, transition = np.mean(emissions), np.mean(transitions)
    return {
        "elbo": emission + transition - kl_inducing + entropy - cross,
        "emission": emission,
        "transition_plus_KLU": transition,
        "KL_U": kl_inducing,
        "entropy": entropy,
        "x1_cross_entropy": cross,
    }


def _log_output(case: Case, values: dict, t: int, x: np.ndarray) -> float:
    return _log_density(case["Y"][t], values["C"] @ x + values["bias"], values["Rchol"] @ values["Rchol"].T)


def _log_density(point: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> float:
    gap = point - mean
    logs = np.linalg.slogdet(covariance)[1] + len(gap) * np.log(2 * np.pi)
    return float(-0.5 * (gap @ np.linalg.solve(covariance, gap) + logs))


def _kl(mean: np.ndarray, covariance: np.ndarray, to_mean: np.ndarray, to_covariance: np.ndarray) -> float:
    gap = to_mean - mean
    trace = np.trace(np.linalg.solve(to_covariance, covariance))
    logs = np.linalg.slogdet(to_covariance)[1] - np.linalg.slogdet(covariance)[1]
    return 0.5 * (trace + gap @ np.linalg.solve(to_covariance, gap) - len(gap) + logs)


def gradient(case: Case, kernel: str, mean: str, method: str, values: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Of the bound by one parameter: central differences, extrapolated once."""
    value = np.asarray(values[name], float)
    result = np.zeros(value.shape)
    for index in np.ndindex(value.shape):
        is_factor = name in ("Ucov_chol", "Rchol", "qx1_cov_chol", "Xchol") or (value.ndim == 3 and name != "As")
        if is_factor and index[-1] > index[-2]:
            continue

        def along(step: float, index: tuple = index) -> float:
            moved = value.copy()
            moved[index] += step
            return terms(case, kernel, mean, method, values | {name: moved})["elbo"]

        wide, narrow = ((along(h) - along(-h)) / (2 * h) for h in (2e-4, 1e-4))
        result[index] = (4 * narrow - wide) / 3
    return result


def reference(
    case: Case, name: str, configurations: Iterable[tuple[str, str, str, bool]], gradients_of: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """The contents of a file like `elbo.npz`, but for `mc`: one case, and (kernel, mean, method, is_full) of it."""
    contents = {f"case/{name}/{key}": value for key, value in case.items()}
    for kernel, mean, method, is_full in configurations:
        values = parameters(case, is_full)
        label = f"{name}_{kernel}_{mean}" + ("_fullAS" if is_full else "")
        for term, value in terms(case, kernel, mean, method, values).items():
            contents[f"cfg/{label}/{method}/det/{term}"] = np.array(value)
        for parameter in gradients_of:
            is_absent = parameter in ("Xmu", "Xchol") if method != "FactorizedLinear" else parameter in ("As", "bs", "S_chols")
            if (
                parameter in values
                and not is_absent
                and not (parameter in ("As", "bs", "S_chols") and method in PRIOR_TRANSITION)
            ):
                contents[f"cfg/{label}/{method}/grad/{parameter}"] = gradient(case, kernel, mean, method, values, parameter)
        process = Process(values, kernel, mean, int(case["dim_D"]))
        moments = [process.marginal(point, is_absolute=False) for point in case["Xstar"]]
        contents[f"cfg/{label}/predict_f_mean"] = np.array([m for m, _ in moments])
        contents[f"cfg/{label}/predict_f_var"] = np.array([v for _, v in moments])
    return contents
