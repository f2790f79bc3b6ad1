# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Trainer whose curves the run viewer draws. Arguments: a directory."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import farandole.transformers
from farandole.common.rank_progress import OWN_PROGRESS

torch.manual_seed(1)
shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(**shape, intermediate_size=32, num_labels=2))
words = torch.randint(2, 32, (80, 6))
rows = [{"input_ids": row, "labels": int(row[0] > 16)} for row in words]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    # The last epoch is half of one: 8 and 4 steps.
    num_train_epochs=1.5,
    per_device_train_batch_size=5,
    logging_steps=2,
    logging_nan_inf_filter=False,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to="none",
    disable_tqdm=True,
)
trainer = farandole.transformers.Trainer(
    model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:20]
)
trainer.train()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    print(f"checkpoint noted: {'checkpoint_at' in OWN_PROGRESS.take_report()}", flush=True)
    print(f"losses {losses} evaluated {evaluated}", flush=True)
