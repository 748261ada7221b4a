"""Process groups of an engine with a single rank: one for all purposes.

vLLM makes a dozen (world, tensor, pipeline, data and expert parallel, each for the device and for the host). On CPUs
each has a Gloo thread that wakes up a hundred times a second for messages that never come: with two engines on one core
2,600 interruptions of the one that computes, 3 % of the core.
"""

from __future__ import annotations

from typing import Any

from vllm_coserve.engine.seams import patch


def share_groups_of_a_single_rank() -> None:
    """Patch torch so; of an engine with more ranks, and for other backends than Gloo, nothing changes."""
    shared: list[Any] = []

    def shared_group(original: Any) -> Any:
        def new_group(*args: Any, **kwargs: Any) -> Any:
            import torch.distributed

            if torch.distributed.get_world_size() > 1 or kwargs.get("backend") != "gloo":
                return original(*args, **kwargs)
            if not shared:
                shared.append(original(*args, **kwargs))
            return shared[0]

        return new_group

    def destroyed_with_the_rest(original: Any) -> Any:
        def destroy_process_group(group: Any = None) -> None:
            if shared and group is shared[0]:
                return  # others use it; it goes when all go
            if group is None:
                shared.clear()
            original(group)

        return destroy_process_group

    patch("new_group", shared_group)
    patch("destroy_group", destroyed_with_the_rest)
