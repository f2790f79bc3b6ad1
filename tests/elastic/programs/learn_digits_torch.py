# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Learns the digits with torch in an elastic job."""

import torch
from digits_epochs import BATCH, end, goes_on, print_epoch, test_x, test_y, train_x, train_y

import farandole.torch as hvd

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
images, digits = torch.tensor(train_x).view(-1, 1, 8, 8), torch.tensor(train_y)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(32 * 16, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(digits)


def everywhere(value):
    return bool(hvd.allreduce(torch.tensor([value]), op=hvd.Max)[0])


@hvd.elastic.run
def train(state):
    while goes_on(state.epoch, hvd, everywhere):
        print_epoch(state.epoch, hvd)
        indices = list(sampler)
        for number, start in enumerate(range(0, len(indices), BATCH)):
            batch = indices[start : start + BATCH]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), digits[batch]).backward()
            optimizer.step()
            sampler.record_batch(number, BATCH)
            if number % 5 == 4:
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
with torch.no_grad():
    found = model(torch.tensor(test_x).view(-1, 1, 8, 8)).argmax(1)
end(float((found == torch.tensor(test_y)).float().mean()))
