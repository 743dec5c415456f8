"""Parameters and the optimizer's statistics, for a peer that is behind.

They go as parcels: one that names the statistics, one with the parameters, one for each statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch

from moshpit.baselines.kinds import Kind
from moshpit.baselines.world import Muster, World
from moshpit.errors import RemoteError
from moshpit.tensors.layout import VectorLayout
from moshpit.training.parcels import Parcels
from moshpit.training.tensors import Named, is_statistic
from moshpit.types import short

_BYTES_PER_NUMBER: Final = 3  # float32 holds integers up to 2**24
_NAMES_BYTES_MAX: Final = 150
_SHAPED, _SCALAR = "v", "s"
_HEADER, _PARAMETERS, _FIRST_STATISTIC = 0, 1, 2


def give(
    parcels: Parcels,
    world: World,
    to: Sequence[int],
    parameters: Sequence[Named],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Send everything to some members, given by rank."""
    names = _names(parameters, optimizer)
    vectors = [_pack(" ".join(names)), _flat([p.tensor for p in parameters])]
    vectors += [_statistic(name, parameters, optimizer) for name in names]
    for rank in to:
        for part, vector in enumerate(vectors):
            parcels.send(world.members[rank], world.tag(Kind.HANDOVER, 0, part), vector)


def take(
    muster: Muster,
    world: World,
    parameters: Sequence[Named],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Wait for what the donor gives, and load it.

    Raises:
        RemoteError: it is not what this optimizer has.
        Regroup: the donor died.
    """
    donor = world.members[world.donor]

    def part(number: int, numel: int | None) -> torch.Tensor:
        vector = muster.take(world.tag(Kind.HANDOVER, 0, number), donor).vector
        if numel is not None and vector.numel() != numel:
            raise RemoteError(
                short(donor), "bad-handover", f"{vector.numel()} numbers, not {numel}"
            )
        return vector

    names = _unpack(part(_HEADER, None)).split()
    if not all(n[:2] in ("v:", "s:") and n[2:].isidentifier() for n in names):
        raise RemoteError(short(donor), "bad-handover", "what it names is no statistic")
    known = _names(parameters, optimizer)
    if names and known and names != known:
        detail = f"statistics {' '.join(names)}, not {' '.join(known)}"
        raise RemoteError(short(donor), "bad-handover", detail)
    layout = VectorLayout([(p.name, p.tensor) for p in parameters])
    values = part(_PARAMETERS, layout.numel)
    statistics = [
        part(_FIRST_STATISTIC + i, layout.numel if name[0] == _SHAPED else len(parameters))
        for i, name in enumerate(names)
    ]
    layout.write_back(values)
    for named in parameters:
        optimizer.state.pop(named.tensor, None)
    for name, vector in zip(names, statistics, strict=True):
        _load(name, vector, parameters, optimizer)


def _names(parameters: Sequence[Named], optimizer: torch.optim.Optimizer) -> list[str]:
    found: dict[str, None] = {}
    for named in parameters:
        for key, value in optimizer.state.get(named.tensor, {}).items():
            if _is_scalar(value):
                found[f"{_SCALAR}:{key}"] = None
            elif is_statistic(value, named.tensor):
                found[f"{_SHAPED}:{key}"] = None
    names = sorted(found)
    assert sum(map(len, names)) + len(names) <= _NAMES_BYTES_MAX, f"too many statistics: {names}"
    return names


def _is_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float)


def _statistic(
    name: str, parameters: Sequence[Named], optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    key = name[2:]
    values = [optimizer.state.get(p.tensor, {}).get(key) for p in parameters]
    if name[0] == _SCALAR:
        return torch.tensor([0.0 if v is None else float(v) for v in values])
    pairs = zip(values, parameters, strict=True)
    return _flat([torch.zeros_like(p.tensor) if v is None else v for v, p in pairs])


def _load(
    name: str,
    vector: torch.Tensor,
    parameters: Sequence[Named],
    optimizer: torch.optim.Optimizer,
) -> None:
    at, key = 0, name[2:]
    for index, named in enumerate(parameters):
        state: dict[str, Any] = optimizer.state[named.tensor]
        if name[0] == _SCALAR:
            state[key] = vector[index].clone()
            continue
        size = named.tensor.numel()
        value = vector[at : at + size].view(named.tensor.shape)
        state[key] = value.to(named.tensor, copy=True)
        at += size


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().to("cpu", torch.float32).reshape(-1) for t in tensors])


def _pack(text: str) -> torch.Tensor:
    data = text.encode()
    data += bytes(-len(data) % _BYTES_PER_NUMBER or (0 if data else _BYTES_PER_NUMBER))
    cuts = range(0, len(data), _BYTES_PER_NUMBER)
    return torch.tensor(
        [float(int.from_bytes(data[at : at + _BYTES_PER_NUMBER], "little")) for at in cuts]
    )


def _unpack(vector: torch.Tensor) -> str:
    data = b""
    for number in cast("list[float]", cast(Any, vector).tolist()):
        if not 0 <= number < 1 << (8 * _BYTES_PER_NUMBER) or number != int(number):
            return "?"
        data += int(number).to_bytes(_BYTES_PER_NUMBER, "little")
    return data.decode(errors="replace").rstrip("\0")
