"""The rivals that any model must beat: constant, last value, ARX, linear state space, GP-NARX.

They are honest opponents. Each standardises by the training data, chooses its orders there and nowhere else, carries
missing outputs exactly where it is linear, and gives a full predictive distribution in the user's units. They are used
as any forecaster is (see `evaluate.Forecaster`). Row t of the controls acts on the outputs from row t+1 on.
"""

from gpssm.baselines.arx import ARX, LagOrder
from gpssm.baselines.base import AbstractBaseline
from gpssm.baselines.gp_narx import GPNARX
from gpssm.baselines.linear import LinearStateSpaceBaseline
from gpssm.baselines.naive import Constant, LastValue
from gpssm.data import Dataset

KINDS = {"constant": Constant, "last": LastValue, "arx": ARX, "linear": LinearStateSpaceBaseline, "gp_narx": GPNARX}


def fit_all(train: Dataset, *, seed: int = 0) -> dict[str, AbstractBaseline]:
    """Every rival, fitted to the same training data."""
    return {name: kind.fit(train, seed=seed) for name, kind in KINDS.items()}


__all__ = [
    "ARX",
    "GPNARX",
    "KINDS",
    "AbstractBaseline",
    "Constant",
    "LagOrder",
    "LastValue",
    "LinearStateSpaceBaseline",
    "fit_all",
]
