"""How well a worker forwards weights, from what others saw of it (ECHO-2 C.3). Good ones stand near the relay."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_SPEED, _SUCCESS, _STABILITY = 0.5, 0.35, 0.15
_FLOOR_LOG_BITS = 3.0
_CAP_BITS_PER_S = 1e8
_FAILURES_IN_ROW = 3  # more than that, and it forwards no longer
_SUCCESSES = 10  # from there on it is stable
_DECAY_S, _DECAY_MAX = 600.0, 0.3
_UNKNOWN = 50.0  # a newcomer's speed and success: behind who has shown that it is good, before who has failed
_KEPT = 64  # transfers that count; older ones fade
_BLEND = 0.3


@dataclass(frozen=True, slots=True)
class Record:
    """What was seen of a worker as a source."""

    bytes_per_s: float = math.inf  # infinite: nobody has seen it
    successes: int = 0
    failures: int = 0
    failures_in_row: int = 0
    at_s: float = 0.0  # of the latest transfer


def observed(record: Record, ok: bool, bytes_per_s: float, now_s: float) -> Record:
    """The record after one more transfer. `bytes_per_s`: its rate while data was at hand, not positive: unknown.

    The rate rises at once and falls slowly: a transfer may have been held up by its other end.
    """
    if record.successes + record.failures >= _KEPT:
        record = replace(record, successes=record.successes // 2, failures=record.failures // 2)
    if not ok:
        more = {"failures": record.failures + 1, "failures_in_row": record.failures_in_row + 1}
        return replace(record, at_s=now_s, **more)
    rate = record.bytes_per_s
    if bytes_per_s > 0 and math.isfinite(bytes_per_s):
        slower = rate * (1 - _BLEND) + bytes_per_s * _BLEND
        rate = bytes_per_s if math.isinf(rate) else max(bytes_per_s, slower)
    return Record(rate, record.successes + 1, record.failures, 0, now_s)


def score(record: Record, now_s: float, top_bytes_per_s: float = 0.0) -> float:
    """0 to 100.

    Args:
        top_bytes_per_s: the fastest worker's rate. The paper's scale ends at 100 Mbit/s; here it ends at this rate
            where that is more, so that it also ranks the links of a data centre.
    """
    tries = record.successes + record.failures
    speed = _UNKNOWN
    if math.isfinite(record.bytes_per_s):
        top = math.log10(max(_CAP_BITS_PER_S, 8 * top_bytes_per_s)) - _FLOOR_LOG_BITS
        bits = max(1.0, 8 * record.bytes_per_s)
        speed = min(100.0, max(0.0, 100 * (math.log10(bits) - _FLOOR_LOG_BITS) / top))
    success = 100 * record.successes / tries if tries else _UNKNOWN
    steady = record.failures_in_row <= _FAILURES_IN_ROW
    stability = 100 * min(record.successes / _SUCCESSES, 1.0) if steady else 0.0
    decay = 1 - min(max(0.0, now_s - record.at_s) / _DECAY_S, _DECAY_MAX) if tries else 1.0
    return decay * (_SPEED * speed + _SUCCESS * success + _STABILITY * stability)


def forwards(record: Record, now_s: float) -> bool:
    """Whether it may be a source; one that failed again and again gets another chance after ten minutes."""
    return record.failures_in_row <= _FAILURES_IN_ROW or now_s - record.at_s > _DECAY_S
