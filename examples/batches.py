"""Random crops of one long token sequence. The same seed gives the same batches."""

import torch
from torch import Tensor

# B batch, T context


class Batches:
    def __init__(self, ids: list[int], batch: int, context: int, device: torch.device, seed: int = 0) -> None:
        self.ids = torch.tensor(ids)
        self.batch, self.context, self.device = batch, context, device
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:  # tokens (B, T), and the token after each (B, T)
        starts = torch.randint(len(self.ids) - self.context, (self.batch, 1), generator=self.generator)
        crops = self.ids[starts + torch.arange(self.context + 1)]
        return crops[:, :-1].to(self.device), crops[:, 1:].contiguous().to(self.device)
