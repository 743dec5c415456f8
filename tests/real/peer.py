"""A real peer for tests: averages on command, and says truthfully what came of it.

Reads JSON lines (commands) from standard input, writes JSON lines (events) to standard
output. Ends when its input ends, so nothing outlives the test.

Every peer knows every peer's input: peer number i has ``a_i · r + b_i`` with ``r`` shared, so it
can recompute from a report's ledger what each chunk must be, and tell how far off it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import moshpit
from moshpit.config import ReachConfig, SwarmConfig, TransportConfig, preset
from moshpit.errors import AdmissionError, KeyInUseError, TicketError
from moshpit.events import RoundReport
from moshpit.tensors.layout import ChunkPlan
from moshpit.types import short
from tests.real.script import say


def coefficients(number: int) -> tuple[float, float]:
    return 1.0 + 0.25 * number, float(number * number)


def inputs(number: int, numel: int) -> torch.Tensor:
    shared = torch.linspace(-1.0, 1.0, numel)
    a, b = coefficients(number)
    return a * shared + b


def random_inputs(seed: int, number: int, numel: int) -> torch.Tensor:
    values = np.random.default_rng((seed, number)).standard_normal(numel, np.float32)
    return torch.from_numpy(values)


def ledger_error(report: RoundReport, result: torch.Tensor, numbers: dict[str, int]) -> float:
    """How far the result is from what the round's ledger says, worst over all chunks."""
    numel = result.numel()
    plan = ChunkPlan.of(numel, TransportConfig())
    shared = torch.linspace(-1.0, 1.0, numel)
    worst = 0.0
    for chunk, mask in enumerate(report.ledger):
        seats = [s for s in range(len(report.peers)) if mask >> s & 1]
        mass = a = b = 0.0
        for seat in seats:
            number = numbers[short(report.peers[seat])]
            weight = 1.0 + number
            a_i, b_i = coefficients(number)
            mass, a, b = mass + weight, a + weight * a_i, b + weight * b_i
        if chunk not in report.missing and abs(mass - report.masses[chunk]) > 1e-6 * mass:
            return float("inf")
        part = plan.slice(chunk)
        expected = (a / mass) * shared[part] + b / mass
        worst = max(worst, (result[part] - expected).abs().max().item())
    return worst


def report_fields(report: RoundReport) -> dict[str, object]:
    return {
        "axis": report.axis,
        "group": report.group.hex(),
        "outcome": report.outcome.value,
        "peers": [short(p) for p in report.peers],
        "contributors": [short(p) for p in report.contributors()],
        "ledger": list(report.ledger),
        "missing": list(report.missing),
        "meeting_s": report.meeting_s,
        "moving_s": report.moving_s,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "span": list(report.span),
        "reach": list(report.reach),
        "blames": [[short(b.peer), b.reason] for b in report.blames],
    }


def average(swarm: moshpit.Swarm, command: dict[str, Any], number: int, numel: int) -> None:
    numbers = command.get("numbers", {})
    assert isinstance(numbers, dict)
    drawn = "seed" in command  # random inputs and weights that the test knows, too
    mine = random_inputs(command["seed"], number, numel) if drawn else inputs(number, numel)
    weight = command["weights"][number] if drawn else 1.0 + number
    if command.get("poison"):
        mine[numel // 2] = float("nan")
    say("averaging")
    began = time.monotonic()
    try:
        (result,), report = swarm.average([mine], weight=weight)
    except KeyInUseError:
        raise  # the end of this peer
    except moshpit.MoshpitError as error:
        say("error", kind=type(error).__name__, text=str(error))
        return
    seconds = time.monotonic() - began
    error = None
    if len(report.rounds) == 1 and numbers and not drawn:
        error = ledger_error(report.rounds[0], result, numbers)
    mean = None
    if "numbers" in command and not drawn:
        total = sum(1.0 + n for n in numbers.values())
        a = sum((1.0 + n) * coefficients(n)[0] for n in numbers.values()) / total
        b = sum((1.0 + n) * coefficients(n)[1] for n in numbers.values()) / total
        mean = (result - (a * torch.linspace(-1.0, 1.0, numel) + b)).abs().max().item()
    say(
        "averaged",
        at=time.time(),  # by its own clock
        epoch=report.epoch,
        stale=report.stale,
        outcome=report.outcome.value,
        seconds=seconds,
        digest=hashlib.sha256(result.numpy().tobytes()).hexdigest(),
        ledger_error=error,
        mean_error=mean,
        values=result.tolist() if drawn else None,
        rounds=[report_fields(r) for r in report.rounds],
    )


def quick_reach(unit_s: float) -> ReachConfig:
    """Settings by which a peer asks and acts as soon as it can."""
    return ReachConfig(
        first_s=unit_s,
        confirm_s=unit_s,
        unknown_s=4 * unit_s,
        hidden_s=4 * unit_s,  # often, but there is a limit to how often others answer
        addresses_s=unit_s,
        no_reducer_s=unit_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ticket", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--role", default="worker")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--preset", default="lan")
    parser.add_argument("--plaintext", action="store_true")
    parser.add_argument("--notices", action="store_true", help="say what it is told")
    parser.add_argument("--reach-s", type=float, help="how soon it looks whether it can be dialled")
    parser.add_argument("--advertise")
    parser.add_argument("--identity", default="new")
    parser.add_argument("--upnp", action="store_true")
    parser.add_argument("--log", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.log:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    config = preset(args.preset)
    if args.reach_s is not None:
        config = replace(config, reach=quick_reach(args.reach_s))
    try:
        take_part(args, config)
    except (KeyInUseError, AdmissionError, TicketError) as error:
        say("failed", kind=type(error).__name__, text=str(error))


def take_part(args: argparse.Namespace, config: SwarmConfig) -> None:
    swarm = moshpit.join(
        args.ticket,
        role=args.role,
        listen=args.listen if args.role != "client" else None,
        advertise=args.advertise,
        plaintext=args.plaintext,
        group_size=args.group_size,
        schedule=args.schedule,
        config=config,
        identity=args.identity,
        upnp=args.upnp,
    )
    if args.notices:
        swarm.listen(lambda n: say("notice", code=n.code, detail=n.detail))
    say("joined", peer=short(swarm.peer_id), addresses=[str(a) for a in swarm.addresses])
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "wait":
                swarm.wait_for_peers(command["peers"], timeout_s=command.get("timeout_s", 200.0))
                say("ready")
            case "average":
                average(swarm, command, args.number, args.numel)
            case "cpu":
                say("cpu", process_s=time.process_time())
            case "bulk":  # headers, payloads and tags of all chunks since the start
                transport = swarm._driver._transport
                links = [transport.stats(r.peer) for r in swarm.peers()]
                out, into = sum(s.bulk_out for s in links), sum(s.bulk_in for s in links)
                say("bulk", sent=out, received=into)
            case "peers":
                records = {short(r.peer): [r.role, r.addresses] for r in swarm.peers()}
                say("peers", peers=list(records), records=records, role=swarm.role.value)
            case "leave":
                break
    swarm.close()
    say("left")


if __name__ == "__main__":
    main()
