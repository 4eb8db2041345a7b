"""An image classifier on synthetic digits, as PyTorch's first example has it."""

import argparse

import torch
import torch.nn.functional as F
from planted import Slow
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.middle = Slow()
        self.fc1 = nn.Linear(16 * 12 * 12, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.middle(torch.flatten(self.dropout1(x), 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(model, loader, optimizer, accumulate):
    model.train()
    for number, (data, target) in enumerate(loader, 1):
        loss = F.nll_loss(model(data), target) / accumulate
        loss.backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        print(number, loss.item().hex())


def test(model, loader):
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    print("correct", correct)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    count = 8 * 6 * args.accumulate
    digits = TensorDataset(torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,)))
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    trained = torch.compile(model, backend="eager") if args.compile else model
    for _ in range(args.epochs):
        train(trained, DataLoader(digits, 8, shuffle=True), optimizer, args.accumulate)
        test(trained, DataLoader(digits, 8))
        scheduler.step()


main()
