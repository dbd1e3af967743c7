"""Posterior families over one shared chain, and the sources of their per-step parameters."""

from gpssm.posteriors.base import AbstractPosterior as AbstractPosterior
from gpssm.posteriors.base import draw_noise as draw_noise
from gpssm.posteriors.chain import Noise as Noise
from gpssm.posteriors.chain import Rollout as Rollout
from gpssm.posteriors.factorised_linear import FactorisedDense as FactorisedDense
from gpssm.posteriors.factorised_linear import FactorisedLinear as FactorisedLinear
from gpssm.posteriors.factorised_nonlinear import FactorisedNonlinear as FactorisedNonlinear
from gpssm.posteriors.function_dependent import FunctionDependent as FunctionDependent
from gpssm.posteriors.function_dependent import FunctionDependentPathwise as FunctionDependentPathwise
from gpssm.posteriors.local import AbstractLocal as AbstractLocal
from gpssm.posteriors.local import AmortisedSteps as AmortisedSteps
from gpssm.posteriors.local import FilteringSteps as FilteringSteps
from gpssm.posteriors.local import FreeSteps as FreeSteps
from gpssm.posteriors.local import PriorSteps as PriorSteps
from gpssm.posteriors.local import free_steps_from as free_steps_from
from gpssm.posteriors.parametric import Parametric as Parametric
from gpssm.posteriors.pr_ssm import PRSSM as PRSSM
from gpssm.posteriors.pr_ssm import PRSSMCorrected as PRSSMCorrected
from gpssm.posteriors.vcdt import VCDT as VCDT
