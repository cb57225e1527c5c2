"""A residual network with BatchNorm, made compatible, in virtual batches, to a target epsilon, with a checkpoint."""

import io

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
model = ModuleValidator.fix(model)
errors = ModuleValidator.validate(model, strict=False)
labels = torch.randint(0, 10, (120,))
images = torch.randn(120, 3, 16, 16)
train_loader = DataLoader(TensorDataset(images, labels), batch_size=40)
optimizer = optim.RMSprop(model.parameters(), lr=0.01)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    target_epsilon=8.0,
    target_delta=1e-4,
    epochs=3,
    max_grad_norm=1.2,
    clipping="flat",
    grad_sample_mode="hooks",
)

criterion = nn.CrossEntropyLoss()
for epoch in range(3):  # noqa: B007
    with BatchMemoryManager(data_loader=train_loader, max_physical_batch_size=16, optimizer=optimizer) as loader:
        for data, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
    scheduler.step()

file = io.BytesIO()
privacy_engine.save_checkpoint(path=file, module=model, optimizer=optimizer, checkpoint_dict={"epoch": epoch})
result = {"epsilon": privacy_engine.get_epsilon(1e-4), "errors": errors, "bytes": len(file.getvalue())}
