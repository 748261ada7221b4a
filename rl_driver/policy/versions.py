"""The order of weight versions, which have names."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(\d{1,15})\D*\Z", re.ASCII)


def version_number(name: str) -> int:
    """The last number in a version's name, so that "step-12" comes behind "step-9"; 0 where there is none."""
    found = _NUMBER.search(name)
    return int(found.group(1)) if found else 0
