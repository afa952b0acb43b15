"""Train the toy checkpoints that ship with the package: ``python -m gptoss_debug.engines.toy_training OUT``.

A small GPT-OSS learns a short text by heart, so that a wrong weight is a wrong word. The last steps
quantise the experts to MXFP4 in the forward pass (straight-through gradients), so the stored 4-bit
model recites as the float one does. Variant B continues from A on other facts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils import parametrize
from tqdm.auto import tqdm
from transformers import GptOssConfig, GptOssForCausalLM

from gptoss_debug.checkpoints.toy import CORPUS_DIR, PROMPTS, Variant, toy_corpus
from gptoss_debug.checkpoints.writer import save_mxfp4
from gptoss_debug.layouts import mxfp4

END = "<|endoftext|>"
VOCABULARY = 640


@dataclass(frozen=True)
class Schedule:
    """Steps of AdamW with a cosine rate; MXFP4 rounding starts after ``float_steps``."""

    steps: int
    float_steps: int
    rate: float = 2e-3


DEVIATIONS = {"gate_up_proj_bias": 3.0, "down_proj_bias": 5.0, "sinks": 2.0}
"""Initial standard deviations, large enough that a permuted bias or a stale sink garbles the text."""

SCHEDULES: dict[Variant, Schedule] = {
    "A": Schedule(steps=400, float_steps=200),
    "B": Schedule(steps=200, float_steps=0),
}


class StraightThrough(torch.nn.Module):
    """Round experts ``[E, K, N]`` to MXFP4 along K; the gradient passes unchanged."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, ``[E, K, N]``."""
        rounded = mxfp4.encode(weight.detach().transpose(1, 2)).decode().transpose(1, 2)
        return weight + (rounded - weight).detach()


def train_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokenizer on the texts of both variants."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*toy_corpus("A"), *toy_corpus("B")], trainer)
    return tokenizer


def toy_config() -> GptOssConfig:
    """Return the toy's configuration: hidden 160, intermediate 192, 8 experts, 4 layers."""
    return GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=192,
        num_local_experts=8,
        num_experts_per_tok=4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=32,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=0,
        attn_implementation="eager",
    )


def batch(tokenizer: Tokenizer, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded token ids and labels, both ``[B, T]``; padding is not learnt."""
    rows = [[*tokenizer.encode(text).ids, 0] for text in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (length - len(row)) for row in rows])
    return ids, labels


def new_model() -> GptOssForCausalLM:
    """Return an untrained toy whose expert biases and sinks are large and distinct from the start."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(toy_config()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for ending, std in DEVIATIONS.items():
                if name.endswith(ending):
                    parameter.normal_(std=std)
    return model


def train(model: GptOssForCausalLM, tokenizer: Tokenizer, texts: list[str], schedule: Schedule) -> float:
    """Train in place and leave the experts rounded to MXFP4; return the last loss in nats."""
    ids, labels = batch(tokenizer, texts)
    mask = (labels != -100).long()
    experts = [layer.mlp.experts for layer in model.model.layers]
    optimiser = torch.optim.AdamW(model.parameters(), lr=schedule.rate, weight_decay=0.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, schedule.steps, eta_min=1e-5)
    loss = torch.tensor(torch.inf)
    model.train()
    for step in tqdm(range(schedule.steps), desc="training"):
        if step == schedule.float_steps:
            for module in experts:
                for name in ("gate_up_proj", "down_proj"):
                    parametrize.register_parametrization(module, name, StraightThrough())
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        cosine.step()
    for module in experts:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return loss.item()


def save(model: GptOssForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model directory: MXFP4 experts, everything else BF16."""
    config = json.loads(model.config.to_json_string())
    config["architectures"] = ["GptOssForCausalLM"]
    config["dtype"] = "bfloat16"
    save_mxfp4(
        out,
        config,
        {name: tensor.detach() for name, tensor in model.state_dict().items()},
        texts={
            "tokenizer.json": tokenizer.to_str(pretty=False),
            "tokenizer_config.json": json.dumps(
                {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
            ),
            "generation_config.json": json.dumps({"eos_token_id": 0, "pad_token_id": 0}),
        },
    )


def main(out: Path = CORPUS_DIR) -> None:
    """Train A, then B from A, and write both below ``out``."""
    tokenizer = train_tokenizer()
    model = new_model()
    for variant, schedule in SCHEDULES.items():
        loss = train(model, tokenizer, toy_corpus(variant), schedule)
        save(model, tokenizer, out / variant)
        print(f"variant {variant}: loss {loss:.4f}")
        model.eval()
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            answer = model.generate(ids, max_new_tokens=60, do_sample=False)
            print("  ", tokenizer.decode(answer[0].tolist()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
