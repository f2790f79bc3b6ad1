# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Trainer trains an adapter of PEFT; prints digests of what was trained and of what was not."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import farandole.torch as hvd
import farandole.transformers  # noqa: F401 - makes Accelerate count the ranks


def digest(parameters):
    return sum(parameter.double().abs().sum().item() for parameter in parameters)


torch.manual_seed(1)
shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
base = BertForSequenceClassification(BertConfig(**shape, intermediate_size=32, num_labels=2))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["query", "value"]))
parts = {True: [], False: []}
for parameter in model.parameters():
    parts[parameter.requires_grad].append(parameter)
before = {trains: digest(part) for trains, part in parts.items()}
words = torch.randint(2, 32, (64, 6))
rows = [{"input_ids": row, "labels": int(row[0] >= 17)} for row in words]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    num_train_epochs=2,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=rows).train()
after = {trains: digest(part) for trains, part in parts.items()}
everywhere = hvd.allgather_object(after[True])
print(
    f"rank {hvd.rank()}: adapter changed {before[True] != after[True]}, "
    f"base changed {before[False] != after[False]}, equal {len(set(everywhere)) == 1}",
    flush=True,
)
