# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Trainer that reads Parquet by a loader: once without interruption, and once resumed from a
checkpoint in the middle of an epoch. Arguments: a directory.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import farandole.torch as hvd
import farandole.transformers
from farandole.data import ParquetLoader

ROWS, BATCH_SIZE, ACCUMULATED = 100, 8, 2
folder = Path(sys.argv[1])


def make_model():
    torch.manual_seed(1)
    shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**shape, **options, intermediate_size=32, num_labels=2)
    return BertForSequenceClassification(config)


class RecordingTrainer(farandole.transformers.Trainer):
    """Notes the first word of each row that it trains with."""

    seen: list

    def compute_loss(self, model, inputs, *args, **options):
        self.seen.append(inputs["row"].tolist())
        rest = {name: value for name, value in inputs.items() if name != "row"}
        return super().compute_loss(model, rest, *args, **options)


def train(loader, resume=None, **options):
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=3,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=1e-2,
        save_steps=4,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = RecordingTrainer(model=make_model(), args=arguments, train_dataset=loader)
    trainer.seen = []
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make_loader(**options):
    known = {"batch_size": BATCH_SIZE, "tail": "drop_last", "framework": "torch"}
    return ParquetLoader(folder / "rows", **{**known, **options})


hvd.init(process_sets="dynamic")
if hvd.rank() == 0:
    words = torch.randint(2, 32, (ROWS, 6), generator=torch.Generator().manual_seed(2))
    columns = {"input_ids": words.tolist(), "labels": (words[:, 0] > 16).long().tolist()}
    (folder / "rows").mkdir()
    pq.write_table(pa.table({**columns, "row": range(ROWS)}), folder / "rows" / "a.parquet")
hvd.barrier()
whole = train(make_loader())
resumed = train(make_loader(), resume=str(folder / "out" / "checkpoint-4"))
same = all(
    torch.equal(a, b)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
)
mine = torch.tensor([row for batch in whole.seen[:6] for row in batch])
everywhere = hvd.allgather(mine).unique()
print(
    f"rank {hvd.rank()}: {whole.state.global_step} steps, {len(everywhere)} rows in an epoch,"
    f" resumed alike: {same}, batches alike: {whole.seen[8:] == resumed.seen},"
    f" examples: {whole.num_examples(whole.get_train_dataloader())}",
    flush=True,
)
for options in ({"batch_size": 4}, {"tail": "keep"}, {"rank": 0, "size": 1}):
    try:
        train(make_loader(**options))
    except ValueError as error:
        print(f"refused {sorted(options)}: {error}", flush=True)
