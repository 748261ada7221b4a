"""What the command lines of this project share: how wrong values are told, and what an address is."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from pydantic import ValidationError

from vllm_coserve.api.errors import ConfigurationError


def wrong_flags(
    exc: ValidationError, flag_of: Callable[[str], str], hint_of: Callable[[str], str] = lambda field: ""
) -> ConfigurationError:
    """Each wrong flag with its value and what is allowed, a line each; values of keys are not repeated."""
    lines = []
    for error in exc.errors():
        if not error["loc"]:  # flags that contradict each other
            lines.append(str(error["ctx"]["error"]))
            continue
        field = str(error["loc"][0])
        shown = "" if "key" in field else f" {error.get('input')!r}"
        hint = f" ({hint_of(field)})" if hint_of(field) else ""
        lines.append(f"{flag_of(field)}{shown}: {error['msg'].removeprefix('Value error, ')}{hint}")
    return ConfigurationError("\n".join(lines))


def check_url(url: str, with_path: bool = False) -> str:
    """The address of a server without a slash at its end.

    Raises:
        ValueError: it is none, or has parts that do not belong there, such as a path unless `with_path`.
    """
    parts = urlsplit(url)
    usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    usable = usable and url.isprintable() and " " not in url and (with_path or parts.path in ("", "/"))
    if not usable or parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address such as http://127.0.0.1:8000")
    return url.rstrip("/")


def is_own_machine(host: str) -> bool:
    """Whether an address means, on any machine, that machine itself: localhost, 127.0.0.1, ::1, 0.0.0.0 and so on."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return address.is_loopback or address.is_unspecified
