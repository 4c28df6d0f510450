"""Tokens of vLLM's engine on a CPU, with its own attention or with ours: `python vllm_engine.py stock|strobe FAMILY FOLDER`.

vLLM on a CPU knows one attention backend, so ours takes its name. Random weights are wide: with narrow ones the logits
are flat, and attention that returns zeros would pass.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[(7 * i + j * j) % 120 + 3 for j in range(n)] for i, n in enumerate((5, 40, 100, 33))]


def save_model(family: str, folder: str) -> None:
    import torch
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "mistral":
        model: Any = transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=20))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.25)
    model.save_pretrained(folder)


def use_ours() -> list[int]:
    """A list that grows by 1 with each call of our attention."""
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from strobe.compat.vllm import backend

    calls: list[int] = []

    class Impl(backend.Impl):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().forward(*args, **kwargs)

    class CpuBackend(backend.Backend):
        supported_dtypes = [*backend.Backend.supported_dtypes, torch.float32]

        @staticmethod
        def get_name() -> str:
            return "CPU_ATTN"

        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

    vars(backend)["CpuBackend"] = CpuBackend
    register_backend(AttentionBackendEnum.CPU_ATTN, "strobe.compat.vllm.backend.CpuBackend")
    return calls


def main() -> None:
    which, family, folder = sys.argv[1:]
    if not Path(folder, "config.json").exists():
        save_model(family, folder)
    calls = use_ours() if which == "strobe" else []
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32,
        max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=True,  # so that prompts come in pieces
    )  # fmt: skip
    wanted = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], wanted)
    print("\nFOUND " + json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in found], "calls": len(calls)}))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    main()
