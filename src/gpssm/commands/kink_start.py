"""Where the demo's fits start: at the outputs, because the kink's states are the outputs but for noise.

Subspace identification sees next to nothing in a map that folds its states; a fit from there takes the motion for noise.
A configuration names this start as `builder = "gpssm.commands.kink_start:start"`, as a user would name one of their own.
"""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from gpssm._types import PRNGKey
from gpssm.data import Dataset, Scaling
from gpssm.emissions import LinearGaussian
from gpssm.gp import SparseGP
from gpssm.initialise import FAMILIES, StartSettings, inducing_given_states
from gpssm.kernels import SquaredExponential
from gpssm.means import IdentityMean
from gpssm.model import GPSSM
from gpssm.posteriors import AbstractPosterior, FreeSteps, PriorSteps

PROCESS_SCALE, OBSERVATION_SCALE = 0.2, 0.3  # in standard units
FEW = ("pr-ssm", "pr-ssm-corrected")  # families whose states are steered by nothing but f


def start(data: Dataset, settings: StartSettings, *, key: PRNGKey) -> tuple[GPSSM, AbstractPosterior]:
    """A model of one state and a posterior around the observed outputs."""
    outputs = [np.asarray(Scaling.of(data).outputs(y)) for y in data.outputs]
    all_rows = np.concatenate(outputs)
    inducing = np.linspace(all_rows.min(), all_rows.max(), settings.num_inducing)[:, None]
    transition = SparseGP(SquaredExponential(np.array([0.7]), 1.0), IdentityMean(1), inducing, 1)
    emission = LinearGaussian(np.eye(1), np.zeros(1), np.array([OBSERVATION_SCALE]))
    model = GPSSM(transition, emission, np.array([PROCESS_SCALE]))
    q = inducing_given_states(model, outputs, [np.zeros((len(y), 0)) for y in outputs])
    family: Any = FAMILIES[settings.posterior]
    first, chol = np.stack([y[0] for y in outputs]), np.full((len(outputs), 1, 1), OBSERVATION_SCALE)
    if settings.posterior in FEW:
        return model, family(q, PriorSteps(first, chol))
    steps = data.max_length - 1
    offset = np.zeros((len(outputs), steps, 1))
    for i, y in enumerate(outputs):
        offset[i, : len(y) - 1] = y[1:]
    gain = 1e-3 * np.asarray(jr.normal(key, (*offset.shape, 1)))
    width = np.full((*offset.shape, 1), OBSERVATION_SCALE)
    local = FreeSteps(first, chol, jnp.asarray(gain), jnp.asarray(offset), jnp.asarray(width), True)
    return model, family(q, local)
