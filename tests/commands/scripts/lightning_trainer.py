"""An autoencoder that the Trainer of Lightning trains."""

import lightning
import torch
from planted import Slow
from torch import nn
from torch.utils.data import DataLoader


class LitAutoEncoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), Slow(), nn.ReLU(), nn.Linear(32, 64))
        self.loss = nn.MSELoss()

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.decoder(self.encoder(batch)), batch)
        print(batch_idx, loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


lightning.seed_everything(3)
trainer = lightning.Trainer(
    max_steps=16,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(LitAutoEncoder(), DataLoader(torch.randn(64, 64), batch_size=4))
