"""Models that several tests share: a tiny random qwen2, and the real SmolLM2-135M."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may depend on a network
# Tiny tensors gain nothing from threads, and on a busy machine each operation waits for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The quickstart's checkpoint, made once in the user's cache as `make demo` makes it."""
    from poros.config import read_config

    config = read_config(ROOT / "examples" / "quickstart.yaml")
    if not Path(config.model).exists() or not Path(config.data).exists():
        argv, sys.argv = sys.argv, ["prepare_quickstart.py"]
        try:
            runpy.run_path(str(ROOT / "examples" / "prepare_quickstart.py"), run_name="__main__")
        finally:
            sys.argv = argv
    return Path(config.model)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen2 of five blocks (grouped heads, biases, untied head) with a byte tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-qwen2")
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        symbol: i for i, symbol in enumerate(["<pad>", "<|im_start|>", "<|im_end|>", *symbols])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder
