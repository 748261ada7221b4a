"""A tiny policy that knows the form of a task's answers: with random weights every answer would be nonsense.

    python -m rl_driver.training.warm_start --task frozen_lake --out out/policy

It imitates a teacher that is right now and then, until answers have the right form. No weights are downloaded.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from rl_driver.envs.arithmetic import Arithmetic
from rl_driver.envs.base import Task
from rl_driver.envs.dialogue import Dialogue, Frame
from rl_driver.envs.frozen_lake import FrozenLake

_SPECIAL = ("<|endoftext|>", "<|im_end|>")
FRAME = Frame(before="", after="\n", between="", stop="<|im_end|>")
_MERGES = 40


def make_policy(task: Task, out: Path, skill: float, batches: int, seed: int = 0, batch: int = 16) -> float:
    """Write a warm-started model of 144k parameters with its tokenizer; returns the last loss.

    Args:
        skill: how often the teacher is right; 0 teaches the form only.
        batches: of `batch` episodes each.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer(task)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_theta=1000.0,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(FRAME.stop),
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rng, loss = random.Random(seed), torch.tensor(0.0)
    for number in range(batches):
        texts = [demonstration(task, tokenizer, seed * 10**9 + number * batch + i, rng, skill) for i in range(batch)]
        longest = max(len(t) for t, _ in texts)
        ids = torch.zeros(batch, longest, dtype=torch.long)
        labels = torch.full((batch, longest), -100)
        for row, (token_ids, outputs) in enumerate(texts):
            ids[row, : len(token_ids)] = torch.tensor(token_ids)
            labels[row, outputs] = ids[row, outputs]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=FRAME.stop, pad_token=_SPECIAL[0]).save_pretrained(
        out
    )
    return float(loss.detach())


def demonstration(
    task: Task, tokenizer: Any, seed: int, rng: random.Random, skill: float
) -> tuple[list[int], list[int]]:
    """An episode as its teacher plays it: its tokens, and the places of the teacher's."""
    dialogue, outputs = Dialogue(tokenizer, FRAME), []
    episode = task.episode(seed)
    seen = episode.begin()
    while not seen.done:
        dialogue.observe(seen.text)
        answer = episode.demonstrate(rng, skill)
        token_ids = [*tokenizer.encode(answer, add_special_tokens=False).ids, FRAME.stop_id(tokenizer)]
        outputs += range(len(dialogue.token_ids), len(dialogue.token_ids) + len(token_ids))
        dialogue.answered(token_ids)
        seen = episode.answer(answer)
    return dialogue.token_ids, outputs


def _tokenizer(task: Task) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(_SPECIAL) + len(alphabet) + _MERGES,
        special_tokens=list(_SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(task.texts(), trainer)
    return tokenizer


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", choices=("frozen_lake", "arithmetic"), default="frozen_lake")
    p.add_argument("--size", type=int, default=3, help="of the lake (%(default)s)")
    p.add_argument("--frozen", type=float, default=0.8, help="share of ice (%(default)s)")
    p.add_argument("--turns-max", type=int, default=6, help="moves on the lake (%(default)s)")
    p.add_argument("--largest", type=int, default=9, help="operand of the sums (%(default)s)")
    p.add_argument("--skill", type=float, default=0.0, help="how often the teacher is right (%(default)s)")
    p.add_argument("--batches", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, required=True)
    o = p.parse_args()
    task: Task = FrozenLake(o.size, o.frozen, o.turns_max) if o.task == "frozen_lake" else Arithmetic(o.largest)
    loss = make_policy(task, o.out, o.skill, o.batches, o.seed)
    print(f"{o.out}: loss {loss:.3f} after {o.batches} batches")


if __name__ == "__main__":
    main()
