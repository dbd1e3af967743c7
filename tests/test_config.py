import re

import jax.random as jr
import pytest

from gpssm import config
from gpssm.config import Config, parse, to_toml
from gpssm.datasets import kink
from gpssm.kernels import Matern
from gpssm.means import FunctionMean


def test_what_is_written_is_read_back():
    changed = config.override(
        Config(),
        {
            "seed": 7,
            "data": {"source": 'a "b".csv', "outputs": ["y", "z"], "time": "t", "train_fraction": 0.5},
            "start": {"state_dim": 3, "kernel": "my_kernels:make", "emission": "mine:Emission"},
            "fit": {"tolerance": "none", "batch_size": 4, "learning_rate": 1},
            "forecast": {"quantiles": [0.1, 0.9]},
        },
    )
    assert parse(to_toml(changed)) == changed
    assert parse(to_toml(Config())) == Config()
    assert changed.fit.tolerance is None
    assert isinstance(changed.fit.learning_rate, float)


def test_differences_name_the_setting_and_both_values():
    assert config.differences(Config(), parse("seed = 3\n[fit]\nnum_steps = 1")) == ["fit.num_steps: 800, 1", "seed: 0, 3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =", "not TOML"),
        ("[fit]\nnum_step = 3", "the nearest name is 'num_steps'"),
        ("[strat]\nmean = 'zero'", "the nearest name is 'start'"),
        ("num_steps = 3", r"belongs into the table \[fit\]"),
        ("fit = 1", "must be a table"),
        ("[fit]\nnum_steps = 'a'", "must be a whole number"),
        ("[fit]\nnum_steps = 1.5", "must be a whole number"),
        ("[fit]\nlearning_rate = true", "must be a number"),
        ("[fit]\nscheme = 'best'", '"plain" or "antithetic"'),
        ("[fit]\nby_pieces = 1", "true or false"),
        ("[data]\noutputs = 'y'", "must be a list"),
        ("[data]\noutputs = [1]", "text in quotes"),
        ("[data]\ntrain_fraction = 1.5", "train_fraction"),
        ("[start]\nstate_dim = 0", "whole number from 1"),
        ("[start]\nkernel = 'rbf'", "must be one of se"),
        ("[start]\nkernel = 'a b:c'", "module:name"),
        ("[start]\nemission = 'poisson'", "module:name"),
        ("seed = -1", "whole number from 0"),
        ("[forecast]\nquantiles = [0.9, 0.1]", "rise"),
        ("[forecast]\nstride = 0", "at least 1"),
    ],
)
def test_bad_settings_are_told(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_file_is_named_in_its_errors(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("sed = 1")
    with pytest.raises(ValueError, match=re.escape(str(file)) + ".*nearest name is 'seed'"):
        config.read(file)
    with pytest.raises(FileNotFoundError, match=r"nearest name is 'run.toml'"):
        config.read(tmp_path / "rum.toml")


def test_parts_of_ones_own_take_their_places(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(
        "from gpssm.kernels import Matern\nfrom gpssm.means import FunctionMean\n"
        "def kernel(lengthscales, variance):\n    return Matern(lengthscales, variance, 1.5)\n"
        "def half(point):\n    return 0.5 * point\n"
        "def mean(num_states, num_controls):\n    return FunctionMean(half)\n"
        "def wrong(*arguments):\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = kink(30, seed=0).dataset
    start = {"state_dim": 1, "num_inducing": 5, "free_run": 0}
    settings = config.override(Config(), {"start": start | {"kernel": "my_parts:kernel", "mean": "my_parts:mean"}})
    model, posterior = config.build(settings, data, key=jr.key(0))
    assert isinstance(model.transition.kernels[0], Matern)
    assert isinstance(model.transition.mean, FunctionMean)
    assert type(posterior).__name__ == "VCDT"
    with pytest.raises(ValueError, match="nearest name is 'kernel'"):
        config.resolve("my_parts:kernl", "start.kernel")
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        config.resolve("no_such_module:x", "start.kernel")
    with pytest.raises(ValueError, match="must give an AbstractKernel"):
        config.build(config.override(settings, {"start": {"kernel": "my_parts:wrong"}}), data, key=jr.key(0))
