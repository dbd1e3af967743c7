"""The paper's three experiments, as functions and as commands (`gpssm reproduce kink | sysid | cartpole`).

Each fits all methods to all of its data, keeps what is fitted in its folder, so that the same call goes on after a kill, and
writes `results.json`, `table.md` and figures there, our numbers beside the published ones.
"""

from gpssm.reproduce.cartpole import CartPoleSettings, reproduce_cart_pole
from gpssm.reproduce.kink import KinkSettings, reproduce_kink
from gpssm.reproduce.kink_long import KinkLongSettings, reproduce_kink_long
from gpssm.reproduce.sysid import BUILDERS, SysidSettings, reproduce_sysid

__all__ = [
    "BUILDERS",
    "CartPoleSettings",
    "KinkLongSettings",
    "KinkSettings",
    "SysidSettings",
    "reproduce_cart_pole",
    "reproduce_kink",
    "reproduce_kink_long",
    "reproduce_sysid",
]
