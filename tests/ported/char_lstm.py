"""Names to languages by their letters: padded names, an embedding, an LSTM; noise found for a target first."""

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.layers import DPLSTM
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)


class CharNNClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.lstm = DPLSTM(12, 16, batch_first=True)
        self.out_layer = nn.Linear(16, 4)

    def forward(self, x, hidden=None):
        x, _ = self.lstm(self.embedding(x), hidden)
        return self.out_layer(x[:, -1])


def padded_collate(batch):
    x = pad_sequence([name for name, _ in batch], batch_first=True)
    return x, torch.stack([label for _, label in batch])


labels = torch.randint(0, 4, (160,))
names = [torch.randint(1, 26, (int(n),)) + label for n, label in zip(torch.randint(3, 10, (160,)), labels)]
train_loader = DataLoader(list(zip(names, labels)), batch_size=40, num_workers=0, collate_fn=padded_collate)
sigma = get_noise_multiplier(target_epsilon=6.0, target_delta=1e-3, sample_rate=40 / 160, epochs=3, accountant="rdp")
model = CharNNClassifier()
optimizer = optim.Adam(model.parameters(), lr=0.01)
privacy_engine = PrivacyEngine(accountant="rdp")
compatible = privacy_engine.is_compatible(module=model, optimizer=optimizer, data_loader=train_loader)
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=sigma,
    max_grad_norm=1.5,
    poisson_sampling=True,
)

criterion = nn.CrossEntropyLoss()
for epoch in range(3):  # noqa: B007
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
result = {"epsilon": privacy_engine.accountant.get_epsilon(delta=1e-3), "sigma": sigma, "compatible": compatible}
