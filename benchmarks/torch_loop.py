"""The rival that one would write in an afternoon: VCDT of the same model and size in PyTorch, a Python loop over time.

It is `pip install torch` away and no dependency of ours. The samples are a batch; parameters are what ours are: kernels, inducing
inputs, q(v), per-step gains, offsets and scales, process and observation noise.
"""

import time
from typing import Any

import numpy as np
import torch

from benchmarks.datasets import Case
from gpssm.params import unwrap

JITTER = 1e-4


class TorchSteps:
    """Adam steps on one sequence with diagonal A and S and separate kernels; timed as `methods.Steps` are."""

    chain, compile_seconds = "torch", 0.0

    def __init__(self, case: Case, precision: str):
        if case.family != "vcdt" or case.is_shared or case.is_full or case.sequences > 1 or case.models > 1:
            raise ValueError(
                f"The PyTorch loop serves VCDT on one sequence with separate kernels and diagonal steps, not {case}."
            )
        self.like = {"dtype": torch.float64 if precision == "float64" else torch.float32}
        data, model, posterior = case.build(0)
        self.parameters = _parameters(case, *unwrap((model, posterior)), self.like)
        self.outputs, self.controls = (torch.tensor(rows[0], **self.like) for rows in (data.outputs, data.controls))
        self.num_samples = case.samples
        self.optimiser = torch.optim.Adam(self.parameters.values(), lr=0.01)

    def seconds(self) -> float:
        """Of one step."""
        began = time.perf_counter()
        self.optimiser.zero_grad()
        loss = -bound(self.parameters, self.outputs, self.controls, self.num_samples) / len(self.outputs)
        loss.backward()
        self.optimiser.step()
        return time.perf_counter() - began

    def memory_bytes(self) -> None:
        return None


def _parameters(case: Case, model: Any, posterior: Any, like: dict[str, Any]) -> dict[str, torch.Tensor]:
    def parameter(values: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(values), **like, requires_grad=True)

    kernels, local = model.transition.kernels, posterior.local
    return {
        "lengthscales": parameter(
            np.log(np.stack([np.broadcast_to(k.lengthscales, case.states + case.controls) for k in kernels]))
        ),
        "variance": parameter(np.log(np.stack([k.variance for k in kernels]))),
        "inducing": parameter(model.transition.inducing_inputs),
        "mean": parameter(posterior.inducing.mean),
        "chol": parameter(posterior.inducing.chol),
        "gain": parameter(local.gain[0]),
        "offset": parameter(local.offset[0]),
        "scale": parameter(np.log(local.chol[0])),
        "process": parameter(np.log(model.process_scale)),
        "noise": parameter(np.log(0.5)),
        "first_mean": parameter(local.initial_mean[0]),
        "first_chol": parameter(local.initial_chol[0]),
    }


def bound(p: dict[str, torch.Tensor], outputs: torch.Tensor, controls: torch.Tensor, num_samples: int) -> torch.Tensor:
    """The bound from `num_samples` trajectories."""
    states, num_inducing = p["mean"].shape
    like = {"dtype": outputs.dtype}
    inverse, variance = torch.exp(-p["lengthscales"]), torch.exp(p["variance"])
    inducing = p["inducing"] * inverse[:, None]
    gram = variance[:, None, None] * torch.exp(
        -0.5 * torch.cdist(inducing, inducing, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    )
    identity = torch.eye(num_inducing, **like)
    chol = torch.linalg.cholesky(gram + JITTER * variance[:, None, None] * identity)
    whitener = torch.linalg.solve_triangular(chol, identity.expand_as(chol), upper=False)
    chol_v = torch.tril(p["chol"])
    v = p["mean"] + torch.einsum("dmn,sdn->sdm", chol_v, torch.randn(num_samples, states, num_inducing, **like))
    values = v.transpose(0, 1)  # [state, sample, inducing]
    process, observed = torch.exp(2 * p["process"]), torch.exp(2 * p["noise"])
    first_chol = torch.tril(p["first_chol"])
    x = p["first_mean"] + torch.randn(num_samples, states, **like) @ first_chol.T
    squared_norms = (inducing**2).sum(-1)
    scales, path, divergence = torch.exp(2 * p["scale"]), [x], torch.zeros((), **like)
    for t in range(len(outputs) - 1):
        point = torch.cat([x, controls[t].expand(num_samples, -1)], dim=1)
        scaled = point * inverse[:, None]  # [state, sample, input]
        squared = (scaled**2).sum(-1, keepdim=True) + squared_norms[:, None] - 2 * scaled @ inducing.transpose(1, 2)
        a = variance[:, None, None] * torch.exp(-0.5 * squared.clamp(min=0)) @ whitener.transpose(1, 2)
        f = x + (a * values).sum(-1).T
        residual = (variance[:, None] - (a**2).sum(-1)).clamp(min=1e-12).T
        mean = p["gain"][t] * f + p["offset"][t]
        spread = scales[t] + p["gain"][t] ** 2 * residual
        x = mean + torch.sqrt(spread) * torch.randn(num_samples, states, **like)
        ratio = ((mean - f) ** 2 + spread + residual) / process
        divergence = divergence + 0.5 * (ratio - 1 + torch.log(process) - torch.log(spread)).sum() / num_samples
        path.append(x)
    seen = torch.stack(path)[..., : outputs.shape[1]]
    density = -0.5 * ((outputs[:, None] - seen) ** 2 / observed + torch.log(2 * torch.pi * observed)).sum() / num_samples
    diagonals = torch.diagonal(chol_v, dim1=1, dim2=2).abs().log().sum()
    kl_inducing = 0.5 * (chol_v**2).sum() + 0.5 * (p["mean"] ** 2).sum() - diagonals - 0.5 * states * num_inducing
    kl_first = (
        0.5 * ((first_chol**2).sum() + (p["first_mean"] ** 2).sum() - states) - torch.diagonal(first_chol).abs().log().sum()
    )
    return density - divergence - kl_inducing - kl_first
