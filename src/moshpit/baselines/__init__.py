"""The methods that Moshpit is compared with, over the same swarm and transport.

Each is the algorithm of its source, as a strategy: exchange ``moshpit.LocalSGD(4096)`` for
``moshpit.baselines.SGP(4096)`` and compare. See docs/howto/compare.md.
"""

from moshpit.baselines.allreduce import AllReduceLocalSGD, AllReduceSGD
from moshpit.baselines.gossip import ADPSGD, DPSGD
from moshpit.baselines.push_sum import SGP
from moshpit.baselines.server import ParameterServer

__all__ = ["ADPSGD", "DPSGD", "SGP", "AllReduceLocalSGD", "AllReduceSGD", "ParameterServer"]
