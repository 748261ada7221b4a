"""Two tiny but varied models: a Qwen3-style one to serve and a Qwen2-style one to roll out.

Both have seeded random weights. With the usual initializer range of 0.02 such a small model repeats one token for ever,
which would prove nothing, so weights are drawn with a standard deviation of about 1/sqrt(hidden). The two differ in
layers and KV heads, so that their KV blocks differ in size and have to share physical pages of neither's shape.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT_VERSION = 1
SPEC_FILE = "demo_spec.json"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides a model directory's content; two equal specs give the same directory."""

    name: str
    style: str  # "qwen2" or "qwen3"
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    vocab: int = 4096
    max_positions: int = 4096
    seed: int = 0

    def digest(self) -> str:
        """A short hash of the spec and of the format it is written in."""
        text = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token over all layers (bf16 keys and values)."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


SERVING_SPEC = ModelSpec(
    name="demo-serving", style="qwen3", layers=6, hidden=512, intermediate=1536, heads=8, kv_heads=4, seed=11
)
ROLLOUT_SPEC = ModelSpec(
    name="demo-rollout", style="qwen2", layers=8, hidden=512, intermediate=1536, heads=8, kv_heads=2, seed=22
)


def ensure_model(spec: ModelSpec, root: Path) -> Path:
    """Return the directory of `spec` under `root`, writing it unless one with the same spec hash is there.

    The directory is written under another name and renamed at the end, so an interrupted run leaves no half model.
    """
    target = root / f"{spec.name}-{spec.digest()}"
    if (target / SPEC_FILE).is_file():
        return target
    root.mkdir(parents=True, exist_ok=True)
    staging = root / f".{target.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    staging.mkdir()
    _write_tokenizer(spec, staging)
    _write_weights(spec, staging)
    (staging / SPEC_FILE).write_text(json.dumps(asdict(spec), indent=2) + "\n")
    staging.rename(target)
    return target


def build_model(spec: ModelSpec):
    """Build the transformers model of `spec` in bfloat16 with seeded weights (norms 1, biases 0, the rest normal)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common = {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.hidden**-0.5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    }
    if spec.style == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=spec.head_dim, **common))
    elif spec.style == "qwen2":
        if spec.heads * spec.head_dim != spec.hidden:
            raise ValueError(f"{spec.name}: a qwen2-style model needs heads x head_dim = hidden")
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    else:
        raise ValueError(f"{spec.name}: style must be qwen2 or qwen3, not {spec.style!r}")
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, spec.hidden**-0.5, generator=generator)
    model.generation_config.do_sample = False
    return model.to(torch.bfloat16).eval()


def _write_weights(spec: ModelSpec, directory: Path) -> None:
    build_model(spec).save_pretrained(directory, safe_serialization=True)


def _write_tokenizer(spec: ModelSpec, directory: Path) -> None:
    """Train a byte-level BPE tokenizer of exactly `spec.vocab` entries on made-up words and write it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_made_up_lines(spec.seed, lines=400 + spec.vocab // 2), trainer)
    if tokenizer.get_vocab_size() != spec.vocab:
        raise ValueError(f"{spec.name}: the tokenizer got {tokenizer.get_vocab_size()} entries, not {spec.vocab}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=spec.max_positions,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _made_up_lines(seed: int, lines: int) -> list[str]:
    """Seeded lines of made-up words whose frequencies fall off as in natural text; no corpus is needed."""
    rng = random.Random(seed)
    onsets = ["b", "br", "ch", "d", "f", "g", "gl", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "z"]
    vowels = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
    codas = ["", "", "n", "r", "s", "t", "l", "nd", "st", "ck"]
    syllables = [rng.choice(onsets) + rng.choice(vowels) + rng.choice(codas) for _ in range(600)]
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3)))) for _ in range(max(400, 2 * lines))]
    weights = [1.0 / (rank + 3) for rank in range(len(words))]
    return [" ".join(rng.choices(words, weights, k=12)) + "." for _ in range(lines)]
