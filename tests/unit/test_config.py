"""Flags at their limits and beyond: the message names the flag."""

import pytest

from vllm_coserve.api.config import CoserveConfig, parse_config
from vllm_coserve.api.errors import ConfigurationError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_slo_ms", 0),
        ("ttft_slo_ms", -1),
        ("tpot_slo_ms", float("nan")),
        ("tpot_slo_ms", float("inf")),
        ("pool_gib", 0),
        ("headroom", 1),
        ("headroom", -0.1),
        ("lease_s", 0),
        ("chunk_tokens", 0),
        ("chunk_tokens", 1 << 30),
        ("stall_timeout_s", -2),
        ("rollout_port", 0),
        ("rollout_port", 65536),
        ("policy", "both"),
        ("role", "router"),
        ("start", "off"),
        ("rollout", ""),
        ("rollout_args", "--x 'unbalanced"),
    ],
)
def test_bad_values_name_their_flag(field, value):
    with pytest.raises(ConfigurationError, match="--coserve-" + field.replace("_", "-")):
        parse_config({"rollout": "m", field: value})


def test_unknown_fields_are_refused():
    with pytest.raises(ConfigurationError):
        parse_config({"rollout": "m", "slo": 3})


def test_round_trip_and_argv():
    config = parse_config({"rollout": "m", "rollout_args": "--a 'b c'"})
    assert config.rollout_argv == ["--a", "b c"]
    assert CoserveConfig.model_validate_json(config.model_dump_json()) == config
