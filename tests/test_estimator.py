"""The estimator is scikit-learn's in all that scikit-learn asks of it, and a forecaster in the rest."""

import dataclasses
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit
from sklearn.utils.estimator_checks import estimator_checks_generator

import gpssm
from gpssm import GPSSMForecaster

TINY = {"state_dim": 1, "num_inducing": 4, "free_run": 0, "num_steps": 2, "num_samples": 2, "num_forecast_samples": 30}
DO_NOT_APPLY = {
    "check_methods_subset_invariance": "the first row of X is the next time step, so a part of X is another future",
    "check_methods_sample_order_invariance": "rows have an order: shuffled controls give another trajectory",
}
TOO_FEW_ROWS = (  # for the linear dynamics of so many columns to be identified: the rows are repeated
    *("check_n_features_in_after_fitting", "check_estimators_dtypes", "check_estimators_nan_inf", "check_regressor_multioutput"),
    "check_regressors_no_decision_function",
)
# what they find out is the same for every estimator of ours, without a fit or with one
QUICK = (
    *("check_estimator_cloneable", "check_estimator_tags_renamed", "check_valid_tag_types", "check_estimator_repr"),
    *("check_no_attributes_set_in_init", "check_estimators_unfitted", "check_do_not_raise_errors_in_init_or_set_params"),
    *("check_mixin_order", "check_complex_data", "check_estimators_empty_data_messages", "check_fit1d"),
    *("check_estimator_sparse_tag", "check_estimator_sparse_array", "check_estimator_sparse_matrix"),
    *("check_supervised_y_no_nan", "check_non_transformer_estimators_n_iter"),
    *("check_parameters_default_constructible", "check_fit2d_1sample", "check_get_params_invariance", "check_set_params"),
    *("check_requires_y_none", "check_estimators_partial_fit_n_features"),
)


def checks():
    """Every check that scikit-learn has for a regressor; those that do not apply are skipped, and most that fit are slow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather have a subclass of its own
        found = list(estimator_checks_generator(GPSSMForecaster(**TINY)))
    for estimator, check in found:
        name = check.func.__name__
        marks = [] if name in QUICK else [pytest.mark.slow]
        marks += [pytest.mark.skip(reason=DO_NOT_APPLY[name])] if name in DO_NOT_APPLY else []
        yield pytest.param(estimator, check, id=name, marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_scikit_learns_own_checks_pass(estimator, check, monkeypatch):
    if check.func.__name__ in TOO_FEW_ROWS:
        monkeypatch.setattr("gpssm.estimator.fit", fit_repeatedly)
    check(estimator)


def fit_repeatedly(data, **how):
    """A fit to the same rows eight times over."""
    longer = {name: tuple(np.tile(a, (8, 1)) for a in getattr(data, name)) for name in ("outputs", "controls")}
    return gpssm.fit(dataclasses.replace(data, **longer), **how)


@pytest.fixture(scope="module")
def series() -> pd.DataFrame:
    """A driven system with a gap in what was seen, seventy rows in two batches."""
    rng = np.random.default_rng(0)
    valve, level = rng.normal(size=70), np.zeros(70)
    for t in range(69):
        level[t + 1] = 0.8 * level[t] + np.tanh(valve[t])
    table = pd.DataFrame({"valve": valve, "level": 20 + 3 * level + 0.1 * rng.normal(size=70), "batch": ["a"] * 40 + ["b"] * 30})
    table.loc[[5, 6], "level"] = np.nan
    return table


@pytest.fixture(scope="module")
def fitted(series) -> GPSSMForecaster:
    known = series[:60]
    return GPSSMForecaster(**TINY).fit(known[["valve"]], known["level"], groups=known["batch"])


def test_a_prediction_goes_on_where_the_training_rows_end(series, fitted):
    future = series[60:]
    labels = ["b"] * 10
    mean, deviation = fitted.predict(future[["valve"]], groups=labels, return_std=True)
    ahead = fitted.forecast(future[["valve"]], label="b")
    assert np.array_equal(mean, ahead.mean[:, 0])
    assert np.array_equal(deviation, ahead.standard_deviation[:, 0])
    assert (ahead.first_step, ahead.output_names) == (20, ("level",))
    assert (np.abs(mean - future["level"]) < 5 * deviation).all()
    assert fitted.score(future[["valve"]], future["level"], groups=labels) == pytest.approx(
        ahead.log_density(future[["level"]].to_numpy()).mean()
    )
    last_control_changed = future[["valve"]].assign(
        valve=future.valve.where(future.index != 69, 9.0)
    )  # it acts after the last row
    assert np.array_equal(fitted.predict(last_control_changed, groups=labels), mean)


def test_rows_of_several_sequences_are_told_apart_by_their_labels(series, fitted):
    controls = np.repeat(series[["valve"]].to_numpy()[60:65], 2, axis=0)
    both = fitted.predict(controls, groups=["a", "b"] * 5)
    alone = {label: fitted.predict(controls[::2], groups=[label] * 5) for label in "ab"}
    assert np.array_equal(both[::2], alone["a"])
    assert np.array_equal(both[1::2], alone["b"])
    assert fitted.result_.data.lengths == (40, 20)
    assert list(fitted.feature_names_in_) == ["valve"]
    scores = fitted.score(controls, [*[np.nan] * 9, 20.0], groups=["a", "b"] * 5)
    assert np.isfinite(scores)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, s: m.predict(s[["valve"]]), "2 sequences were fitted: say by `groups`"),
        (lambda m, s: m.predict(s[["valve"]], groups=["c"] * len(s)), "no sequence 'c' was fitted"),
        (lambda m, s: m.predict(s[["valve"]], groups=["a"]), "must label each of the 10 rows"),
        (lambda m, s: m.predict(s[["valve", "level"]], groups=s["batch"]), "expecting 1 features"),
        (lambda m, s: m.predict(s[["level"]], groups=s["batch"]), "X must have the columns valve"),
        (lambda m, s: m.predict(steps=3), "expected X"),
        (lambda m, s: m.forecast(s[["valve"]], steps=3, label="a"), "X has 10 rows"),
        (lambda m, s: m.score(s[["valve"]], s[["level", "level"]], groups=s["batch"]), "must have 1 outputs"),
        (lambda m, s: m.score(s[["valve"]], np.full(10, np.nan), groups=s["batch"]), "nothing to score"),
        (lambda m, s: clone(m).set_params(random_state=-1).fit(s[["valve"]], s["level"]), "whole number from 0"),
        (lambda m, s: clone(m).set_params(kernel="rbf").fit(s[["valve"]], s["level"]), "`kernel` must be one of"),
        (lambda m, s: m.set_params(kernels="se"), "the nearest name is 'kernel'"),
    ],
)
def test_what_cannot_be_answered_is_told(series, fitted, call, message):
    with pytest.raises(ValueError, match=message):
        call(fitted, series[60:])


def test_without_controls_the_number_of_rows_is_said_or_counted(series, monkeypatch):
    level = series["level"].to_numpy()
    alone = GPSSMForecaster(**TINY).fit(None, level[:50])
    assert alone.n_features_in_ == 0
    assert alone.predict(steps=4).shape == (4,)
    assert np.array_equal(alone.predict(pd.DataFrame(index=range(4))), alone.predict(steps=4))
    assert np.isfinite(alone.score(None, level[50:54]))
    with pytest.raises(ValueError, match="say how many rows"):
        alone.predict()


def test_a_clone_is_unfitted_and_repeats_the_fit_to_the_last_bit(series, fitted):
    again = clone(fitted)
    assert repr(again) == repr(fitted) == f"GPSSMForecaster({', '.join(f'{k}={v}' for k, v in TINY.items())})"
    with pytest.raises(NotFittedError):
        again.predict(series[["valve"]])
    known = series[:60]
    again.fit(known[["valve"]], known["level"], groups=known["batch"])
    labels = ["a"] * 5
    assert np.array_equal(
        again.predict(series[["valve"]][:5], groups=labels), fitted.predict(series[["valve"]][:5], groups=labels)
    )


def test_scikit_learn_is_not_needed(series):
    code = """
import sys
sys.modules["sklearn"] = None
import gpssm
from gpssm import GPSSMForecaster
try:
    GPSSMForecaster(state_dim=2).predict(steps=3)
except ValueError as error:
    print(repr(GPSSMForecaster(state_dim=2)), error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "GPSSMForecaster(state_dim=2) This GPSSMForecaster is not fitted yet: call fit(X, y) first.\n"


@pytest.mark.slow
def test_a_grid_search_over_a_growing_past_chooses_by_the_log_density(series):
    search = GridSearchCV(GPSSMForecaster(**TINY), {"mean": ["linear", "zero"]}, cv=TimeSeriesSplit(2, test_size=8))
    search.fit(series[["valve"]], series["level"])
    assert search.best_params_ == {"mean": "linear"}
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
