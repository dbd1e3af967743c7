"""The faster chains: each agrees with the plain one wherever it applies, and the right one is chosen."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case
from gpssm.draws import DrawGivenInducing
from gpssm.elbo import elbo
from gpssm.params import unwrap
from gpssm.posteriors.chain import chain
from gpssm.posteriors.chains import FASTER, FasterChain, chain_named, chain_of


def one(windows, index: int):
    return jax.tree.map(lambda leaf: leaf[index], windows)


def name_of_chain(case: Case, name: str = "auto") -> str:
    model, posterior, windows = case.build()
    return chain_of(*unwrap((model, posterior)), one(windows, 0), name)


def still(draw, propose, steps, model, window, noise):
    """A chain that can be told from the plain one: its divergences are zero."""
    rollout = chain(draw, propose, steps, model, window, noise)
    return eqx.tree_at(lambda r: (r.kl_transition, r.kl_initial), rollout, (jnp.zeros(()), jnp.zeros(())))


@pytest.fixture
def still_given_inducing(monkeypatch):
    """A faster chain that serves draws of v alone."""
    for name in list(FASTER):
        monkeypatch.delitem(FASTER, name)
    applies = lambda draw, propose, steps, model, window: isinstance(draw, DrawGivenInducing)  # noqa: E731
    monkeypatch.setitem(FASTER, "still", FasterChain(still, applies))


@pytest.mark.usefixtures("still_given_inducing")
def test_the_first_chain_that_applies_is_taken_and_told():
    model, posterior, windows = Case("vcdt", "free").build()
    assert name_of_chain(Case("vcdt", "free")) == "still"
    terms = elbo(model, posterior, windows, key=jax.random.key(0), num_samples=2)
    np.testing.assert_array_equal([terms.kl_transition, terms.kl_initial], 0.0)
    plain = elbo(model, posterior, windows, key=jax.random.key(0), num_samples=2, chain="plain")
    assert float(plain.kl_transition) != 0 != float(plain.kl_initial)


@pytest.mark.usefixtures("still_given_inducing")
def test_the_plain_chain_serves_what_no_faster_one_does():
    assert name_of_chain(Case("function-dependent", "free")) == "plain"
    assert name_of_chain(Case("vcdt", "free"), "plain") == "plain"


def test_a_family_without_a_chain_says_so():
    assert name_of_chain(Case("factorised dense", "free")) == "none"


@pytest.mark.usefixtures("still_given_inducing")
def test_a_chain_that_is_asked_for_and_does_not_apply_is_refused():
    with pytest.raises(ValueError, match=r"still chain does not serve ExactDraw.*auto"):
        name_of_chain(Case("function-dependent", "free"), "still")


def test_an_unknown_chain_is_refused():
    with pytest.raises(ValueError, match="must be one of auto, plain, compiled"):
        chain_named("quick")
