"""A real peer that stops in the middle of its second backward pass, and says so."""

from __future__ import annotations

import sys
import threading

import torch

import moshpit

from .test_over_sockets import wait_until_all_are_attached
from .test_overlapped import Trainer, overlapped, small_chunks


def main() -> None:
    with moshpit.join(sys.argv[1], **small_chunks()) as swarm:
        trainer = Trainer(swarm, overlapped(), seed=2)
        print("ready", flush=True)
        swarm.wait_for_peers(3)
        wait_until_all_are_attached([swarm])
        trainer.step()

        def stop(_: torch.Tensor) -> None:
            print("halfway", flush=True)
            threading.Event().wait()

        # Some parameters' gradients have been given away by then, the others have not.
        trainer.model.embed.weight.register_hook(stop)
        trainer.step()


if __name__ == "__main__":
    main()
