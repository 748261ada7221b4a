"""Tests here are skipped, with the reason, where there is no device."""

from pathlib import Path

import pytest

from tests.gpu.machine import why_not

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    here = [item for item in items if _HERE in item.path.parents]
    reason = why_not() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
