# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Generation by a tensor-parallel model of transformers (`tp_plan="auto"`) on CPUs, which asks for
Gloo. The whole model on each rank is the reference. Arguments: a directory.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

rank = int(os.environ["RANK"])
folder = Path(sys.argv[1], f"model-{rank}")
torch.manual_seed(5)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
LlamaForCausalLM(config).save_pretrained(folder)
words = torch.randint(0, 64, (3, 7))


def generate(model):
    with torch.no_grad():
        logits = model(words).logits
        words_after = model.generate(words, max_new_tokens=12, do_sample=False, pad_token_id=0)
    return logits, words_after


whole_logits, whole_words = generate(AutoModelForCausalLM.from_pretrained(folder))
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
logits, words_after = generate(model)
torch.testing.assert_close(logits, whole_logits, rtol=1e-4, atol=1e-5)
assert torch.equal(words_after, whole_words)
rows = model.model.layers[0].mlp.up_proj.weight
rows = rows.to_local() if hasattr(rows, "to_local") else rows
print(
    f"rank {rank}: {len(rows)} of 128 rows, {dist.get_backend()},"
    f" engine {type(dist.group.WORLD).__name__}",
    flush=True,
)
dist.destroy_process_group()
