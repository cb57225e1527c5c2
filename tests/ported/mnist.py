"""A small convolutional network on images of digits, trained privately for an epoch, then tested."""

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class SampleConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(8, 16, 4, 2)
        self.fc1 = nn.Linear(16 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


labels = torch.randint(0, 10, (256,))
images = torch.randn(256, 1, 28, 28) * 0.3 + labels[:, None, None, None] / 10
train_loader = DataLoader(TensorDataset(images, labels), batch_size=64)
model = SampleConvNet()
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0)
privacy_engine = PrivacyEngine(secure_mode=False)
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)

model.train()
criterion = nn.CrossEntropyLoss()
for epoch in range(2):  # noqa: B007
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
    epsilon = privacy_engine.accountant.get_epsilon(delta=1e-5)

model.eval()
with torch.no_grad():
    correct = (model(images).argmax(1) == labels).sum().item()
result = {"epsilon": epsilon, "sigma": float(optimizer.noise_multiplier), "accuracy": correct / len(labels)}
