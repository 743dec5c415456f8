"""A real peer that trains with DiLoCo until it is killed; it says which epoch it is in."""

from __future__ import annotations

import sys

import moshpit

from .test_over_sockets import PATIENCE_S, Trainer, diloco, patient


def main() -> None:
    with moshpit.join(sys.argv[1], **patient(PATIENCE_S)) as swarm:
        trainer = Trainer(swarm, diloco(), seed=2)
        print("ready", flush=True)
        epoch = 0
        while True:
            trainer.step()
            if trainer.opt.epoch > epoch:
                epoch = trainer.opt.epoch
                print("epoch", epoch, flush=True)


if __name__ == "__main__":
    main()
