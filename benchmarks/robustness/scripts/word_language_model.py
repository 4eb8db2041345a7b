"""A recurrent language model that updates its parameters by hand, without an optimizer."""

import torch
from planted import Slow
from torch import nn

TOKENS, LENGTH, BATCH, LR = 200, 8, 4, 0.5


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(TOKENS, 32)
        self.rnn = nn.LSTM(32, 32, 2, dropout=0.2)
        self.between = Slow()
        self.decoder = nn.Linear(32, TOKENS)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        decoded = self.decoder(self.between(self.drop(output)))
        return nn.functional.log_softmax(decoded.view(-1, TOKENS), dim=1), hidden


torch.manual_seed(1111)
corpus = torch.randint(0, TOKENS, (LENGTH * 14 + 1, BATCH))
model = RNNModel()
criterion = nn.NLLLoss()
hidden = (torch.zeros(2, BATCH, 32), torch.zeros(2, BATCH, 32))
model.train()
for batch, start in enumerate(range(0, corpus.size(0) - 1, LENGTH)):
    data = corpus[start : start + LENGTH]
    targets = corpus[start + 1 : start + 1 + LENGTH].view(-1)
    model.zero_grad()
    hidden = tuple(state.detach() for state in hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-LR)
    print(batch, loss.item().hex())
