"""Sizes and durations: one definition of a GiB, one way to read and to print them."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `12GB`, `11.5GiB` or `2048`; `GB` is 10**9, `GiB` 2**30.

    Raises:
        ValueError: the text is no size.
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a size: write it like 12GB or 11.5GiB")
    return int(float(found[1]) * _FACTORS[found[2].lower()])


def format_bytes(size: float) -> str:
    """A size for people: `3.37 GiB`, `120.0 MiB`, `512 B`."""
    if abs(size) >= GIB:
        return f"{size / GIB:.2f} GiB"
    if abs(size) >= MIB:
        return f"{size / MIB:.1f} MiB"
    if abs(size) >= KIB:
        return f"{size / KIB:.1f} KiB"
    return f"{int(size)} B"


def format_seconds(seconds: float) -> str:
    """A duration for people: `1h02m`, `3m05s`, `4.2s`, `85ms`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    if seconds >= 1:
        return f"{seconds:.1f}s"
    return f"{seconds * 1000:.0f}ms"
