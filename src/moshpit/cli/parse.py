"""Words that people type, read into numbers."""

from __future__ import annotations

import re

from moshpit.errors import ConfigError

DURATION_S_MAX = 100 * 365 * 86400  # guess: calendars and timers overflow far beyond it
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def duration_s(text: str) -> int:
    """Read a length of time: ``90s``, ``30m``, ``12h``, ``7d``, ``2w``; a bare number is seconds.

    Raises:
        ConfigError: it is none, or longer than `DURATION_S_MAX`.

    Example:
        >>> duration_s("7d")
        604800
        >>> duration_s("1h30m")
        5400
    """
    bare = text.strip().lower()
    if re.fullmatch(r"\d{1,9}", bare):
        bare += "s"
    if not re.fullmatch(r"(\d{1,9}[smhdw])+", bare):
        raise ConfigError(f"{text!r} is no length of time: write 30m, 12h, 7d or 1h30m")
    seconds = sum(int(n) * _UNITS_S[unit] for n, unit in re.findall(r"(\d+)([smhdw])", bare))
    if seconds > DURATION_S_MAX:
        raise ConfigError(f"{text!r} is longer than 100 years")
    return seconds


_COUNT_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def count_of(text: str) -> float:
    """Read how many: ``200``, ``20k``, ``350M``, ``1.3B`` or ``1.3g``, ``2T``; decimal.

    Raises:
        ConfigError: it is no number above 0.

    Example:
        >>> count_of("1.3B"), count_of("350M"), count_of("2e4")
        (1300000000.0, 350000000.0, 20000.0)
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\d{1,2})?([kmgbt]?)", text.strip().lower())
    value = float(found[1] + (found[2] or "")) * _COUNT_UNITS[found[3]] if found else 0.0
    if value <= 0:
        raise ConfigError(f"{text!r} is no number above 0: write 200, 20k, 350M or 1.3B")
    return value


def seconds_of(text: str) -> float:
    """Read a short length of time: ``0.8``, ``0.8s``, ``50ms``, ``2m``; a bare number is seconds.

    Raises:
        ConfigError: it is none, or 0.

    Example:
        >>> seconds_of("0.8"), seconds_of("50ms"), seconds_of("2m")
        (0.8, 0.05, 120.0)
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s|m)?", text.strip().lower())
    value = float(found[1]) * {"ms": 1e-3, "m": 60.0}.get(found[2], 1.0) if found else 0.0
    if value <= 0:
        raise ConfigError(f"{text!r} is no length of time above 0: write 0.8, 50ms or 2m")
    return value


def human_bytes(count: float) -> str:
    """Return a number of bytes as people read it.

    >>> human_bytes(1536), human_bytes(20)
    ('1.5 KB', '20 B')
    """
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def human_s(seconds: float) -> str:
    """Return a time as people read it.

    >>> human_s(0.0123), human_s(75), human_s(4000), human_s(200_000), human_s(7 * 86400 - 1)
    ('12.3 ms', '1m15s', '1h06m', '2d08h', '7d00h')
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d{hours:02d}h"
