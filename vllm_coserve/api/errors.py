"""Errors of the co-serving runtime: configuration, contract, transient."""


class CoserveError(Exception):
    """Base of all errors raised by vllm-coserve."""


class ConfigurationError(CoserveError):
    """The user asked for something impossible; the text says the exact fix."""


class ContractError(CoserveError):
    """An assumption about vLLM or about the other engine does not hold; the process must not go on."""
