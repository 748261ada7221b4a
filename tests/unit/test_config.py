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
        ("rollout_args", "--port 3"),
        ("rollout_args", "--tensor_parallel_size=2"),
        ("rollout_args", "-tp 2"),
        ("rollout_args", "--coserve-lease-s 3"),
        ("headroom", float("nan")),
        ("lease_s", 1e300),
        ("ttft_slo_ms", 1e300),
        ("memory", "both"),
    ],
)
def test_bad_values_name_their_flag(field, value):
    with pytest.raises(ConfigurationError, match="--coserve-" + field.replace("_", "-")):
        parse_config({"rollout": "m", field: value})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"policy": "ttft"}, "needs --coserve-ttft-slo-ms"),
        ({"policy": "tpot", "ttft_slo_ms": 5}, "needs --coserve-tpot-slo-ms"),
        ({"policy": "ttft", "ttft_slo_ms": 5, "role": "decode"}, "binds nothing on a decode instance"),
        ({"policy": "tpot", "tpot_slo_ms": 5, "role": "prefill"}, "binds nothing on a prefill instance"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, says):
    with pytest.raises(ConfigurationError, match=says):
        parse_config({"rollout": "m", **flags})


def test_unknown_fields_are_refused():
    with pytest.raises(ConfigurationError):
        parse_config({"rollout": "m", "slo": 3})


def test_round_trip_and_argv():
    config = parse_config({"rollout": "m", "rollout_args": "--a 'b c'"})
    assert config.rollout_argv == ["--a", "b c"]
    assert CoserveConfig.model_validate_json(config.model_dump_json()) == config
