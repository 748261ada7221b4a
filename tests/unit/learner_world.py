"""A tiny model and samples for tests of the learner; run by torchrun, a step of all ranks.

torchrun --nproc-per-node=2 -m tests.unit.learner_world OUT.pt
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from rl_driver.training.learner import Learner, LearnerConfig
from rl_driver.training.samples import Sample


def tiny_model(seed=0):
    """A Qwen3 of 20k parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def made_up(count, seed=0, version=0):
    """Samples whose logprobs are the model's own."""
    rng = torch.Generator().manual_seed(seed)
    learner = Learner(tiny_model(), LearnerConfig(bf16=False))
    out = []
    for i in range(count):
        ids = torch.randint(0, 32, (6 + i % 5,), generator=rng).tolist()
        places = list(range(3, len(ids)))
        sample = Sample(ids, places, [0.0] * len(places), (version, version), [1.0, -1.0, 0.5][i % 3])
        (logprobs,) = learner.score([sample])
        out.append(Sample(ids, places, logprobs, (version, version), sample.advantage))
    return out


def config(**kw):
    """Large steps, exact arithmetic."""
    return LearnerConfig(**{"learning_rate": 1e-2, "bf16": False, "aggregate": "token", **kw})


def parameters(learner):
    """All of them in a row, whole also where they are sharded."""
    values = (p.detach() for p in learner.model.parameters())
    return torch.cat([(v.full_tensor() if hasattr(v, "full_tensor") else v).flatten() for v in values])


def main():
    """Each rank adds its share of the samples; the first one writes weights and figures."""
    samples = made_up(12)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    learner = Learner(tiny_model(), config())
    for _ in range(2):
        learner.add(samples[rank::ranks])
        figures = learner.step()
    names = dict(learner.weights())
    whole = parameters(learner)
    if rank == 0:
        torch.save({"parameters": whole, "figures": figures, "names": list(names)}, sys.argv[1])
    dist.barrier()
    os._exit(0)  # gloo's threads abort a process that ends in the usual way, now and then


if __name__ == "__main__":
    main()
