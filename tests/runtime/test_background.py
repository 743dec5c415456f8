"""The network's thread takes no processor from training but its own."""

from __future__ import annotations

import torch

from moshpit.runtime.background import NetworkThread


async def threads() -> int:
    torch.ones(1 << 18).add_(1.0)
    return torch.get_num_threads()


def test_the_network_computes_in_one_thread_and_leaves_the_trainers_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    network = NetworkThread("test")
    try:
        assert network.call(threads()) == 1
        assert torch.get_num_threads() == 3
        torch.ones(1 << 18).add_(1.0)
        assert network.call(threads()) == 1
    finally:
        network.stop()
        torch.set_num_threads(before)
