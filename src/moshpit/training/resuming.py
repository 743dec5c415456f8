"""Which checkpoint a peer begins with, where others resume at the same time.

Peers of one run rarely hold the same epochs: one was killed while it saved, another's disk was
full. They agree on one to start from (`moshpit.protocol.reunion`); this is training's side of it:
what is offered, what is done about the choice, and what a person reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from moshpit.protocol.reunion import Chosen, Why
from moshpit.runtime.states import StateSync
from moshpit.training.shelf import Saved, company_of, is_whole
from moshpit.types import short

log = logging.getLogger("moshpit.training")

RESUME_WAIT_S: Final = 20.0  # guess: processes that are started together are there by then
LOADING_S: Final = 120.0  # guess: how long those that hold the epoch take to load it
LOOK_S: Final = 0.05
SHOWN_MAX: Final = 8  # of epochs, in a line of the log


def agree(
    sync: StateSync, found: Sequence[Saved], directory: Path, wait_s: float
) -> tuple[list[Saved], Chosen | None]:
    """Agree with all who resume on an epoch.

    Args:
        sync: by which they are asked.
        found: this peer's checkpoints, the newest epoch first.
        directory: where they are.
        wait_s: how long to wait for those that were there when the newest was saved.

    Returns:
        The checkpoints that may be used, and the choice; None if the swarm was closed.
    """
    whole = [saved for saved in found if is_whole(saved.path)]
    held = list(dict.fromkeys(saved.epoch for saved in whole))
    company = company_of(whole[0].path) if whole else 0
    if company > 1:
        log.info(
            "this peer can begin with %s of %s; waiting up to %g s for the %d others that trained "
            "when the newest was saved",
            _listed(held),
            directory,
            wait_s,
            company - 1,
        )
    choosing = sync.reunite(held, company, wait_s)
    while not choosing.wait(LOOK_S):
        pass  # in turns, so that Ctrl-C is seen
    choice = choosing.choice
    if choice is None:
        return list(found), None
    _tell(choice, held)
    return [saved for saved in found if saved.epoch <= choice.epoch], choice


def others_hold(choice: Chosen, loaded: int | None) -> bool:
    """Return whether the state to begin with is that of others.

    Args:
        choice: what the swarm starts from.
        loaded: the epoch that this peer has loaded.
    """
    asked = choice.peers > 1 or choice.why in {Why.UNDER_WAY, Why.TOLD}
    return asked and 0 < choice.epoch != loaded


def wait_for_others(sync: StateSync, choice: Chosen) -> None:
    """Those that hold the chosen epoch are loading it: let them, since this peer needs it."""
    waited_s = 0.0
    while sync.newest(None)[0] < choice.epoch:
        if waited_s > LOADING_S:
            log.warning(
                "nobody has epoch %d after %g s; going on without it", choice.epoch, LOADING_S
            )
            return
        sync.pause(LOOK_S)
        waited_s += LOOK_S


def _tell(choice: Chosen, held: Sequence[int]) -> None:
    epoch = choice.epoch
    match choice.why:
        case Why.COMMON if choice.peers == 1:
            line = f"starting again from epoch {epoch}: nobody else resumes"
        case Why.COMMON:
            line = f"starting again from epoch {epoch}, the newest that all {choice.peers} peers "
            line += "that resume hold"
            if choice.newest > epoch:
                line += f" (the newest of all is {choice.newest})"
        case Why.NEWEST:
            line = f"no epoch is held by all {choice.peers} peers that resume: starting again from "
            line += f"epoch {epoch}, the newest that anybody holds"
        case Why.UNDER_WAY:
            line = f"the run is under way, at epoch {epoch}"
        case Why.TOLD:
            line = f"starting again from epoch {epoch}, as {short(choice.by)} has decided for all"
        case Why.NONE:
            return
    if epoch not in held:
        line += f"; this peer holds {_listed(held) if held else 'none'} and will fetch the state"
    log.info("%s", line)


def _listed(epochs: Sequence[int]) -> str:
    more = ", ..." if len(epochs) > SHOWN_MAX else ""
    word = "epoch" if len(epochs) == 1 else "epochs"
    return f"{word} {', '.join(map(str, epochs[:SHOWN_MAX]))}{more}"
