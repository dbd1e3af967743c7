"""Which chain a fit runs along: the fastest of those that apply to what it is handed, or the one that is asked for.

Every chain has the signature of the plain one (`chain.py`), which serves every draw, proposal and kernel and is the reference
that the others are held to. A faster chain comes with a function that says, while the program is traced, whether it applies: to
this kind of draw, kernel and proposal, on this platform.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax

from gpssm.data import Window
from gpssm.draws import AbstractDraw
from gpssm.model import GPSSM
from gpssm.posteriors.base import AbstractPosterior, draw_noise
from gpssm.posteriors.chain import Chain, Noise, Propose, Rollout, chain
from gpssm.posteriors.compiled import compiled_applies, compiled_chain
from gpssm.posteriors.fused import fused_applies, fused_chain
from gpssm.posteriors.local import LocalSteps

ChainName = Literal["auto", "plain", "compiled", "fused"]


class FasterChain(NamedTuple):
    """A chain, and whether it serves what a family would hand it."""

    chain: Chain
    applies: Callable[[AbstractDraw, Propose, LocalSteps, GPSSM, Window], bool]
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")  # where "auto" takes it; whoever asks for it gets it anywhere


FASTER: dict[str, FasterChain] = {  # the first that applies is the one that "auto" takes
    "compiled": FasterChain(compiled_chain, compiled_applies),
    "fused": FasterChain(fused_chain, fused_applies, ("gpu",)),
}


def chain_named(name: str) -> Chain:
    """The chain of that name; "auto" chooses whenever it is called. One that does not apply raises."""
    if name not in get_args(ChainName):
        raise ValueError(f"`chain` must be one of {', '.join(get_args(ChainName))}, but got {name!r}.")

    def chosen(draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window, noise: Noise) -> Rollout:
        resolved = _resolve(name, draw, propose, steps, model, window)
        walk = chain if resolved == "plain" else FASTER[resolved].chain
        return walk(draw, propose, steps, model, window, noise)

    return chosen


def chain_of(model: GPSSM, posterior: AbstractPosterior, window: Window, name: str = "auto") -> str:
    """The name of the chain that runs when `name` is asked for; "none" for a family that has no chain.

    Model and posterior are unwrapped, and nothing is computed.
    """
    taken = ["none"]

    def recording(draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window, noise: Noise) -> Rollout:
        taken[0] = _resolve(name, draw, propose, steps, model, window)
        return chain(draw, propose, steps, model, window, noise)

    def one_sample() -> jax.Array:
        num_steps = len(window.outputs)
        noise = draw_noise(posterior, model, num_steps, key=jax.random.key(0), scheme="plain", num_samples=1)
        arrays = (leaf[0] for leaf in noise[:-1])
        return posterior.rollout(model, window, Noise(*arrays, key=noise.key), recording).states

    jax.eval_shape(one_sample)
    return taken[0]


def _resolve(name: str, draw: AbstractDraw, propose: Propose, steps: LocalSteps, model: GPSSM, window: Window) -> str:
    if name == "plain":
        return name
    if name == "auto":
        here = [(other, faster) for other, faster in FASTER.items() if jax.default_backend() in faster.platforms]
        applying = (other for other, faster in here if faster.applies(draw, propose, steps, model, window))
        return next(applying, "plain")
    if not FASTER[name].applies(draw, propose, steps, model, window):
        kernels = ", ".join(sorted({type(kernel).__name__ for kernel in model.transition.kernels}))
        raise ValueError(
            f"The {name} chain does not serve {type(draw).__name__} with {kernels} on {jax.default_backend()}: expected a case "
            'that it serves. Leave `chain` at "auto", which takes it wherever it applies, or ask for "plain".'
        )
    return name
