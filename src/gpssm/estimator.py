"""A GPSSM behind scikit-learn's interface: what `fit`, `predict` and `score` mean where the rows are a time series.

scikit-learn itself is not needed; it looks for methods, not for a base class. Its exceptions and tags are taken from it where it
is installed. The constructor stores its arguments and checks nothing, as scikit-learn wants it: `fit` does.
"""

import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import jax.random as jr
import numpy as np
import pandas as pd
import scipy.sparse
from jaxtyping import Float

from gpssm.data import Dataset
from gpssm.fit import FitSettings, fit
from gpssm.forecasts import Forecast
from gpssm.initialise import StartSettings
from gpssm.predict import forecast
from gpssm.result import FitResult
from gpssm.tables import nearest

KEY_FIT, KEY_FORECAST = range(2)  # folded into the random state


class GPSSMForecaster:
    """A regressor for time series: X are the controls [time, control], y the outputs [time, output], row by row.

    Row t of X acts between rows t and t+1 of y, and a NaN in y is a missing output. A system without controls has X=None (or a
    table without columns). `predict` goes on from the last row that was fitted, and needs the controls of the rows to come.
    """

    result_: FitResult
    n_features_in_: int
    feature_names_in_: np.ndarray  # where X was a table

    def __init__(
        self,
        state_dim: Any = "auto",
        posterior: Any = "vcdt",
        num_inducing: Any = 40,
        kernel: Any = "se",
        mean: Any = "linear",
        free_run: Any = 24,
        num_steps: Any = 800,
        num_samples: Any = 8,
        learning_rate: Any = 0.01,
        num_forecast_samples: Any = 500,
        random_state: Any = 0,
    ):
        """The first six are of `StartSettings`, the next three of `FitSettings`; what may stand there is told by `fit`."""
        self.state_dim = state_dim
        self.posterior = posterior
        self.num_inducing = num_inducing
        self.kernel = kernel
        self.mean = mean
        self.free_run = free_run
        self.num_steps = num_steps
        self.num_samples = num_samples
        self.learning_rate = learning_rate
        self.num_forecast_samples = num_forecast_samples
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None) -> "GPSSMForecaster":
        """Fit to all rows; `groups` labels the sequence that each row belongs to, if there are several."""
        if not isinstance(self.random_state, int | np.integer) or self.random_state < 0:
            raise ValueError(f"`random_state` must be a whole number from 0, but got {self.random_state!r}.")
        start = StartSettings(
            state_dim=self.state_dim,
            posterior=self.posterior,
            num_inducing=self.num_inducing,
            kernel=self.kernel,
            mean=self.mean,
            free_run=self.free_run,
        )
        settings = FitSettings(num_steps=self.num_steps, num_samples=self.num_samples, learning_rate=self.learning_rate)
        outputs, is_flat = _outputs(y)
        controls = _controls(X, len(outputs))
        rows_of = _rows_of(groups, len(outputs))
        data = Dataset.from_arrays(
            [outputs[rows] for rows in rows_of.values()],
            [controls[rows] for rows in rows_of.values()],
            output_names=_names(y, outputs.shape[1], "y"),
            control_names=_names(X, controls.shape[1], "u"),
            sequence_names=[str(label) for label in rows_of],
        )
        self.result_ = fit(data, key=jr.fold_in(jr.key(self.random_state), KEY_FIT), settings=settings, start=start)
        self.n_features_in_ = data.num_controls
        self._is_flat, self._labels = is_flat, list(rows_of)
        vars(self).pop("feature_names_in_", None)
        if _is_named(X) and data.num_controls:
            self.feature_names_in_ = np.array(data.control_names, dtype=object)
        return self

    def forecast(self, X: Any = None, steps: int | None = None, label: Hashable | None = None) -> Forecast:
        """The distribution of the rows that follow the training data (of the sequence `label`), in the units of y.

        X are the controls of these rows, of which the last acts on nothing; without controls, `steps` says how many.
        """
        self._check_fitted()
        if self.n_features_in_ == 0 and X is None:
            if steps is None:
                raise ValueError("Without controls, say how many rows to forecast: expected `steps`, but got none.")
            controls = np.zeros((steps, 0))
        elif X is None:
            raise ValueError(f"The model has {self.n_features_in_} controls: expected X, their rows to come, but got None.")
        else:
            controls = _controls(X, None)
            self._check_features(X, controls)
        if steps is not None and steps != len(controls):
            raise ValueError(f"`steps` is {steps}, but X has {len(controls)} rows. Give one of them.")
        return forecast(
            self.result_,
            len(controls),
            controls=controls if self.n_features_in_ else None,
            sequence=self._sequence(label),
            num_samples=self.num_forecast_samples,
            key=jr.fold_in(jr.key(self.random_state), KEY_FORECAST),
        )

    def predict(self, X: Any = None, steps: int | None = None, groups: Any = None, return_std: bool = False) -> Any:
        """The mean of the rows that follow the training data, one for each row of X; with `return_std` also their deviation.

        `groups` labels the sequence that each row of X goes on with, if several were fitted.
        """
        made = self._forecasts(X, steps, groups)
        number = sum(len(rows) for rows, _ in made)
        mean, deviation = np.empty((2, number, self.result_.data.num_outputs))
        for rows, ahead in made:
            mean[rows], deviation[rows] = ahead.mean, ahead.standard_deviation
        if self._is_flat:
            mean, deviation = mean[:, 0], deviation[:, 0]
        return (mean, deviation) if return_std else mean

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """Mean log predictive density of the rows that follow the training data, in nats a row: higher is better.

        It is in the units of y, so that models fitted to different rows compare. Rows of which nothing is observed do not count.
        """
        outputs, _ = _outputs(y)
        made = self._forecasts(X, len(outputs), groups)
        if outputs.shape[1] != self.result_.data.num_outputs:
            raise ValueError(f"y must have {self.result_.data.num_outputs} outputs, as in fit, but has {outputs.shape[1]}.")
        if not np.isfinite(outputs).any():
            raise ValueError("y is missing throughout: there is nothing to score.")
        is_seen = np.asarray(np.isfinite(outputs).any(axis=1))
        total = sum(float(ahead.log_density(outputs[rows])[is_seen[rows]].sum()) for rows, ahead in made)
        return total / int(is_seen.sum())

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments by name."""
        return {name: getattr(self, name) for name in _parameters()}

    def set_params(self, **params: Any) -> "GPSSMForecaster":
        """Set some of the constructor's arguments."""
        for name, value in params.items():
            if name not in _parameters():
                known = list(_parameters())
                raise ValueError(f"there is no parameter '{name}'{nearest(name, known)}. There are: {', '.join(known)}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = _parameters()
        changed = {name: value for name, value in self.get_params().items() if repr(value) != repr(defaults[name])}
        return f"GPSSMForecaster({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def __sklearn_is_fitted__(self) -> bool:
        return "result_" in vars(self)

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        # the next rows of a series are no sample of the rows it was fitted to: its score on these says nothing
        return Tags(
            estimator_type="regressor",
            target_tags=TargetTags(required=True, multi_output=True),
            regressor_tags=RegressorTags(poor_score=True),
            input_tags=InputTags(),
        )

    def _forecasts(self, X: Any, steps: int | None, groups: Any) -> list[tuple[np.ndarray, Forecast]]:
        """Which rows of X go on with which sequence, and their forecast."""
        self._check_fitted()
        if groups is None:
            ahead = self.forecast(X, steps)
            return [(np.arange(ahead.num_steps), ahead)]
        rows_of = _rows_of(groups, len(X) if X is not None else steps)
        controls = X if X is None or isinstance(X, pd.DataFrame) else np.asarray(X)
        pieces = [controls if controls is None else _picked(controls, rows) for rows in rows_of.values()]
        return [
            (rows, self.forecast(piece, len(rows), label)) for (label, rows), piece in zip(rows_of.items(), pieces, strict=True)
        ]

    def _sequence(self, label: Hashable | None) -> int:
        if label is None and len(self._labels) > 1:
            raise ValueError(
                f"{len(self._labels)} sequences were fitted: say by `groups` which of them each row goes on with. "
                f"There are: {', '.join(map(str, self._labels[:10]))}."
            )
        if label is not None and label not in self._labels:
            raise ValueError(f"no sequence '{label}' was fitted{nearest(label, self._labels)}.")
        return 0 if label is None else self._labels.index(label)

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise _not_fitted_error()("This GPSSMForecaster is not fitted yet: call fit(X, y) first.")

    def _check_features(self, X: Any, controls: Float[np.ndarray, "time control"]) -> None:
        if controls.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {controls.shape[1]} features, but GPSSMForecaster is expecting {self.n_features_in_} features as input."
            )
        expected = vars(self).get("feature_names_in_")
        if expected is not None and _is_named(X) and list(X.columns) != list(expected):
            raise ValueError(f"X must have the columns {', '.join(expected)}, in this order, but has {', '.join(X.columns)}.")


def _parameters() -> Mapping[str, Any]:
    """The constructor's arguments and their defaults."""
    given = inspect.signature(GPSSMForecaster.__init__).parameters
    return {name: parameter.default for name, parameter in given.items() if name != "self"}


def _not_fitted_error() -> type[Exception]:
    """scikit-learn's own exception, which is a ValueError, where it is installed."""
    try:
        from sklearn.exceptions import NotFittedError
    except ImportError:
        return ValueError
    return NotFittedError


def _outputs(y: Any) -> tuple[Float[np.ndarray, "time output"], bool]:
    """y as [time, output], and whether it came as [time]."""
    if y is None:
        raise ValueError("GPSSMForecaster requires y to be passed, but the target y is None: give the outputs.")
    values = _numbers(y, "y")
    if values.ndim not in (1, 2):
        raise ValueError(f"y must be [time] or [time, output], but has the shape {values.shape}.")
    if len(values) < 2:
        raise ValueError(f"y must have at least 2 rows, but has n_samples={len(values)}.")
    return (values[:, None], True) if values.ndim == 1 else (values, False)


def _controls(X: Any, length: int | None) -> Float[np.ndarray, "time control"]:
    """X as [time, control], every value finite; as long as y where there is one."""
    if X is None:
        return np.zeros((length or 0, 0))
    values = _numbers(X, "X")
    if values.ndim != 2:
        raise ValueError(
            f"Reshape your data: X must be [time, control], but has the shape {values.shape}. X.reshape(-1, 1) is one control, "
            "X.reshape(1, -1) one row."
        )
    if not len(values):
        raise ValueError(f"Found 0 sample(s) (shape={values.shape}) in X: expected a row for each time step.")
    if not values.shape[1] and not isinstance(X, pd.DataFrame):
        raise ValueError(f"0 feature(s) (shape={values.shape}) while a minimum of 1 is required. Without controls, give X=None.")
    if length is not None and len(values) != length:
        raise ValueError(f"X and y must have a row for each time step, but X has {len(values)} and y has {length}.")
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        kind = "NaN" if np.isnan(values[row, column]) else "infinite"
        raise ValueError(f"X must be finite, but row {row} of column {column} is {kind}: controls must be known.")
    return values


def _numbers(values: Any, what: str) -> np.ndarray:
    if scipy.sparse.issparse(values):
        raise TypeError(f"Sparse {what} is not supported: give {what}.toarray().")
    array = np.asarray(values)
    if np.iscomplexobj(array):
        raise ValueError(f"Complex data not supported: {what} must hold real numbers.")
    return array.astype(float)


def _rows_of(groups: Any, length: int | None) -> dict[Hashable, np.ndarray]:
    """The rows of each sequence, in the order in which their labels appear."""
    if groups is None:
        return {"0": np.arange(length or 0)}
    labels = pd.Series(np.asarray(groups))
    if len(labels) != length or labels.isna().any():
        raise ValueError(f"`groups` must label each of the {length} rows, but has {labels.notna().sum()} labels.")
    return {label: np.flatnonzero(labels == label) for label in labels.unique()}


def _is_named(values: Any) -> bool:
    return isinstance(values, pd.DataFrame) and all(isinstance(column, str) for column in values.columns)


def _names(values: Any, number: int, letter: str) -> list[str]:
    """The columns of a table; y1, y2, ... for what has no names."""
    if _is_named(values):
        return list(values.columns)
    if isinstance(values, pd.Series) and isinstance(values.name, str):
        return [values.name]
    return [f"{letter}{i + 1}" for i in range(number)]


def _picked(values: Any, rows: np.ndarray) -> Any:
    return values.iloc[rows] if isinstance(values, pd.DataFrame) else values[rows]
