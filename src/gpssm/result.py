"""What a fit gives back: the model, what was learnt, how the bound went, and why it stopped."""

import enum
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from gpssm.data import Dataset, Scaling
from gpssm.elbo import Elbo
from gpssm.model import GPSSM
from gpssm.posteriors.base import AbstractPosterior


class Status(enum.Enum):
    """Why a fit ended."""

    CONVERGED = "the smoothed bound stopped improving"
    MAX_STEPS = "all steps were done"
    NONFINITE = "the bound or its gradient was not finite; the last good parameters are kept"
    INTERRUPTED = "it was interrupted; the last good parameters are kept"


@dataclass(frozen=True)
class History:
    """One row a block of steps: the bound and its four terms, averaged over the block, the process noise, and seconds."""

    steps: np.ndarray
    bound: Float[np.ndarray, " block"]
    emission: Float[np.ndarray, " block"]
    kl_transition: Float[np.ndarray, " block"]
    kl_inducing: Float[np.ndarray, " block"]
    kl_initial: Float[np.ndarray, " block"]
    process_scale: Float[np.ndarray, "block state"]
    seconds: Float[np.ndarray, " block"]

    @classmethod
    def empty(cls, num_states: int) -> "History":
        nothing = np.zeros(0)
        return cls(np.zeros(0, int), nothing, nothing, nothing, nothing, nothing, np.zeros((0, num_states)), nothing)

    def with_block(self, step: int, terms: Elbo, process_scale: Float[np.ndarray, " state"], seconds: float) -> "History":
        """This history and one more block."""
        return replace(
            self,
            steps=np.append(self.steps, step),
            bound=np.append(self.bound, float(terms.total)),
            emission=np.append(self.emission, float(terms.emission)),
            kl_transition=np.append(self.kl_transition, float(terms.kl_transition)),
            kl_inducing=np.append(self.kl_inducing, float(terms.kl_inducing)),
            kl_initial=np.append(self.kl_initial, float(terms.kl_initial)),
            process_scale=np.concatenate([self.process_scale, np.asarray(process_scale, float)[None]]),
            seconds=np.append(self.seconds, seconds),
        )


@dataclass(frozen=True)
class FitResult:
    """A fitted model. It lives in the standard units of `scaling`; everything asked of it comes back in the user's.

    `data` is what it was fitted to, so that a forecast can go on from the end of it.
    """

    model: GPSSM
    posterior: AbstractPosterior
    scaling: Scaling
    data: Dataset
    history: History
    status: Status
    settings: dict[str, Any]
    num_skipped: int  # steps whose gradient was not finite
    chain: str = "plain"  # along which the trajectories were walked

    @property
    def bound(self) -> float:
        """The bound in the last block of steps."""
        return float(self.history.bound[-1]) if len(self.history.bound) else float("nan")
